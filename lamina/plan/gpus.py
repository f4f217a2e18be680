"""GPUs by name with their memory, and how several of them share a model."""

from lamina.base.errors import ConfigError
from lamina.base.sizes import GiB
from lamina.plan.records import Mesh, PlanOptions

#: GiB that CUDA or HIP report as the card's total, as users' logs quote it (the printed names are rounded up); of gb10 the
#: system memory it shares with the processor
GPUS: dict[str, float] = {
    "a100-40g": 39.39, "a100-80g": 79.14, "b200": 178.35, "gb10": 119.67, "h20": 95.0, "h100": 79.1, "h200": 139.8, "l4": 22.03,
    "l40s": 44.42, "mi300x": 191.98, "mi325x": 255.98, "mi355x": 287.98, "rtx-4090": 23.64, "rtx-5090": 31.36,
    "rtx-pro-6000": 94.97,
}  # fmt: skip


def memory_of(options: PlanOptions) -> int | None:
    """Bytes of one GPU; None if neither a GPU nor a size is named. Raises ConfigError for both or an unknown name."""
    if options.gpu is None:
        return options.memory_bytes
    if options.memory_bytes is not None:
        raise ConfigError("memory", options.memory_bytes, "left out where --gpu is given: that names the memory")
    name = options.gpu.lower().replace("_", "-")
    if name not in GPUS:
        raise ConfigError("gpu", options.gpu, f"one of {', '.join(GPUS)}; or give --memory, such as 141GB")
    return int(GPUS[name] * GiB)


def resolve_mesh(options: PlanOptions) -> Mesh:
    """The mesh that the options ask for.

    gpus = tp x dp. gpus alone (or ep alone, which names as many) is tensor parallel over all; with dp given, tp = gpus / dp;
    with tp given, dp = gpus / tp. ep spreads whole experts over that many of them, and where it is smaller than tp, each
    expert is still cut over the tp / ep GPUs of its group. Raises ConfigError where the numbers do not go together.
    """
    for name, value in (("gpus", options.gpus), ("tp", options.tp), ("ep", options.ep), ("dp", options.dp)):
        if value is not None and not 1 <= value <= 65_536:
            raise ConfigError(name, value, "an integer from 1 to 65536")
    product = (options.tp or 1) * (options.dp or 1)
    has_parts = options.tp is not None or options.dp is not None
    gpus = options.gpus or (product if has_parts else options.ep or 1)
    if gpus % product:
        raise ConfigError("gpus", gpus, f"a multiple of tp x dp = {product}")
    tp = options.tp or gpus // (options.dp or 1)
    dp = gpus // tp
    if options.dp is not None and dp != options.dp:
        raise ConfigError("gpus", gpus, f"tp x dp = {product}")
    ep = options.ep
    if ep is not None and (gpus % ep or (ep % tp and tp % ep)):
        allowed = [n for n in range(1, gpus + 1) if gpus % n == 0 and (n % tp == 0 or tp % n == 0)]
        raise ConfigError("ep", ep, f"one of {', '.join(map(str, allowed))} for {gpus} GPUs with tp {tp}")
    return Mesh(gpus, tp, dp, ep)
