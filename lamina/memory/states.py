"""The states of a lease, in the order in which they come; the last three are ends."""

RUNNING, CLOSING = "running", "closing"
FINISHED, PREEMPTED, CANCELLED = "finished", "preempted", "cancelled"
