"""Hyper-connections: several residual streams mixed around every sub-layer.

hyper_pre(streams, mixer)                 -> input of the sub-layer [T, D], post [T, S], comb [T, S, S].
hyper_post(streams, output, post, comb)   -> new streams [T, S, D].
hyper_head(streams, mixer)                -> [T, D], the streams collapsed for the head.
"""

from lamina.ops.hyper.ref import Mixer, hyper_head, hyper_post, hyper_pre

__all__ = ["Mixer", "hyper_head", "hyper_post", "hyper_pre"]
