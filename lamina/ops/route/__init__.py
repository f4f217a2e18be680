"""Expert routing.

route(logits, bias, top_k, scale)          learned: the top_k of sqrt(softplus(logits)) + bias -> (experts, weights).
route_by_table(logits, experts, scale)     hash: the experts are given, the gate still weighs them.
"""

from lamina.ops.route.ref import route, route_by_table

__all__ = ["route", "route_by_table"]
