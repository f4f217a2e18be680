"""Hyper-connections: several residual streams mixed around every sub-layer.

hyper_pre(streams, mixer)                 -> input of the sub-layer [T, D], post [T, S], comb [T, S, S].
hyper_post(streams, output, post, comb)   -> new streams [T, S, D].
hyper_head(streams, mixer)                -> [T, D], the streams collapsed for the head.
`triton.py` (which needs Triton) does all that lies between two sub-layers at once.
"""

from dataclasses import dataclass

from lamina.ops.hyper.ref import Mixer, hyper_head, hyper_post, hyper_pre

__all__ = ["HyperCase", "Mixer", "hyper_head", "hyper_post", "hyper_pre"]


@dataclass(frozen=True, slots=True)
class HyperCase:
    """What an implementation may refuse: S streams of width D."""

    streams: int
    hidden: int
