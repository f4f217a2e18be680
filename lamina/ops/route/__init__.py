"""Expert routing.

route(logits, bias, top_k, scale)          learned: the top_k of sqrt(softplus(logits)) + bias -> (experts, weights).
route_by_table(logits, experts, scale)     hash: the experts are given, the gate still weighs them.
`triton.py` (which needs Triton) does either in one launch.
"""

from dataclasses import dataclass

from lamina.ops.route.ref import route, route_by_table
from lamina.ops.route.softmax import route_chosen, route_sigmoid, route_softmax

__all__ = ["RouteCase", "route", "route_by_table", "route_chosen", "route_sigmoid", "route_softmax"]


@dataclass(frozen=True, slots=True)
class RouteCase:
    """What an implementation may refuse: top_k of so many experts."""

    experts: int
    top_k: int
