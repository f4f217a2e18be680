"""Every op with its implementations: which one runs on a machine for a model's widths, and why the others do not.

    catalog(machine, dims, kernels)   one row for each implementation, the fastest first within its op
    refusals(rows)                    what makes a model unservable there: ops of which nothing but the definition is left

The definition (`ref.py`) is what runs on a CPU; on a GPU it is a yardstick and never chosen.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lamina.ops.attend import AttendCase
from lamina.ops.compress import CompressCase
from lamina.ops.experts import ExpertsCase
from lamina.ops.gemm import GemmCase
from lamina.ops.hyper import HyperCase
from lamina.ops.index_topk import IndexCase
from lamina.ops.machine import Machine
from lamina.ops.rope_norm import RopeNormCase
from lamina.ops.route import RouteCase
from lamina.ops.store import StoreCase, attention_codec, index_codec

DEFINITION = "reference"
NEEDS_TRITON = "Triton is not installed"


@dataclass(frozen=True, slots=True)
class Dims:
    """What implementations may refuse of a model.

    group_width   columns that one group of the output projection sums over.   index_heads  0 where no layer has an index.
    max_entries   entries of the longest log that an index chooses from.
    dense, expert formats as stored: fp8 or plain; fp4, fp8 or plain.   act  bf16 or fp32: what values between ops are rounded to.
    activation    fp8 or bf16: what products with quantised weights are asked to read.
    """

    hidden: int
    streams: int
    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    groups: int
    group_width: int
    index_heads: int
    index_dim: int
    top_k: int
    max_entries: int
    experts: int
    experts_per_token: int
    inner: int
    dense_format: str
    expert_format: str
    cache_format: str
    index_format: str
    act: str
    activation: str


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation of an op, or of a case of it that has kernels of its own.

    why_not  in one line; None for the one that is chosen.
    """

    op: str
    implementation: str
    why_not: str | None

    @property
    def is_chosen(self) -> bool:
        """Whether it is the one that runs."""
        return self.why_not is None


#: name of an implementation, and a function that says why it does not serve, or None; needs Triton unless it is the definition
_Candidate = tuple[str, Callable[[], str | None]]


def catalog(machine: Machine, dims: Dims, kernels: str = "auto") -> tuple[Row, ...]:
    """All implementations of all ops that a model of these dims has.

    kernels  auto: the fastest that serve; portable: those that run on every GPU.
    """
    rows: list[Row] = []
    for op, candidates in _candidates(machine, dims, kernels):
        chosen: str | None = None
        for name, refuses in candidates:
            why = None if machine.has_triton or machine.device == "cpu" else NEEDS_TRITON
            if why is None:
                why = f"runs on NVIDIA GPUs, not on {machine.device}" if machine.device == "cpu" else refuses()
            if why is None and chosen is not None:
                why = f"{chosen} is faster"
            chosen = chosen or (name if why is None else None)
            rows.append(Row(op, name, why))
        rows.append(Row(op, DEFINITION, None if machine.device == "cpu" else "the definition, for CPUs and for tests"))
    return tuple(rows)


def refusals(rows: Iterable[Row]) -> tuple[str, ...]:
    """One line for each op of which no implementation is chosen: the op, and why its most portable kernels refuse."""
    listed = tuple(rows)
    served = {row.op for row in listed if row.is_chosen}
    last = {row.op: row.why_not for row in listed if row.implementation != DEFINITION}
    return tuple(f"{op}: {why}" for op, why in last.items() if op not in served)


def _candidates(machine: Machine, dims: Dims, kernels: str) -> list[tuple[str, list[_Candidate]]]:
    """Ops in the order of a layer, with implementations that are asked only where Triton is."""
    has_index = dims.index_heads > 0
    return [
        ("gemm", _gemm(machine, dims)),
        ("gemm, many rows", [("gluon, fp8 rows", lambda: _many_rows(machine, dims, kernels)), *_gemm(machine, dims)]),
        ("hyper", [("triton", lambda: _hyper(machine, dims))]),
        ("rope_norm", [("triton", lambda: _rope_norm(machine, dims))]),
        ("store", [("triton", lambda: _store(machine, dims))]),
        *([("compress", [("triton", lambda: _compress(machine, dims))])] if dims.max_entries else []),
        *([("index_topk", [("triton", lambda: _index(machine, dims))])] if has_index else []),
        ("attend", [("gluon, fp8", lambda: _hopper_attend(machine, dims, kernels)), ("triton", lambda: _attend(machine, dims))]),
        ("route", [("triton", lambda: _route(machine, dims))]),
        ("experts", _experts(machine, dims, kernels)),
        ("sample", [("triton", lambda: _sample(machine))]),
        ("move", [("triton", lambda: _move(machine))]),
    ]


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _no_fp8(machine: Machine, dims: Dims, stored: str) -> str | None:
    """Why products with weights stored so do not read fp8 rows."""
    if stored == "plain":
        return "the weights are not quantised"
    if dims.act == "fp32":
        return "activations are fp32"
    if dims.activation != "fp8":
        return f"activation_format={dims.activation}"
    if not machine.has_fp8:
        return "e4m3 products need compute capability 8.9, this GPU has {}.{}".format(*machine.capability)
    return None


def _not_hopper(machine: Machine, kernels: str) -> str | None:
    """Why kernels that are written for Hopper are left out."""
    if kernels == "portable":
        return "kernels=portable"
    return None if machine.capability == (9, 0) else _needs(machine, "9.0")


def _needs(machine: Machine, least: str) -> str:
    return "needs compute capability {}, this GPU has {}.{}".format(least, *machine.capability)


def _reads_fp8(machine: Machine, dims: Dims) -> bool:
    return _no_fp8(machine, dims, dims.dense_format) is None


def _gemm(machine: Machine, dims: Dims) -> list[_Candidate]:
    def refuses(is_fp8: bool) -> str | None:
        from lamina.ops.gemm import triton

        widths = (dims.hidden, dims.q_rank, dims.inner)
        cases = [*(GemmCase(width, 1, is_fp8) for width in widths), GemmCase(dims.group_width, dims.groups, is_fp8)]
        return _first(triton.refuses(machine, case) for case in cases)

    return [
        ("triton, fp8 rows", lambda: _no_fp8(machine, dims, dims.dense_format) or refuses(True)),
        (f"triton, {dims.act} rows", lambda: refuses(False)),
    ]


def _many_rows(machine: Machine, dims: Dims, kernels: str) -> str | None:
    """Why prefills do not take the kernel that is written for Hopper."""
    why = _no_fp8(machine, dims, dims.dense_format) or _not_hopper(machine, kernels)
    if why is not None:
        return why
    odd = next((width for width in (dims.hidden, dims.q_rank, dims.inner, dims.group_width) if width % 128), None)
    return None if odd is None else f"needs widths that are multiples of 128, not {odd}"


def _experts(machine: Machine, dims: Dims, kernels: str) -> list[_Candidate]:
    case = ExpertsCase("fp8" if _no_fp8(machine, dims, dims.expert_format) is None else "bf16", dims.hidden, dims.inner)

    def fp4() -> str | None:
        from lamina.ops.experts import triton

        if dims.expert_format != "fp4":
            return f"the experts are stored in {dims.expert_format}, not in fp4"
        if dims.act == "fp32":
            return "activations are fp32"
        return triton.refuses(machine, case)

    def hopper() -> str | None:
        why = fp4() or _not_hopper(machine, kernels)
        if why is not None:
            return why
        if case.activation != "fp8":
            return "multiplies fp8 rows, not bf16"
        return None if min(case.hidden, case.inner) > 128 else "needs widths of more than 128"

    def plain() -> str | None:
        return None if machine.capability >= (8, 0) else _needs(machine, "8.0")

    return [("gluon, fp4", hopper), ("triton, fp4", fp4), ("triton, any format", plain)]


def _hyper(machine: Machine, dims: Dims) -> str | None:
    from lamina.ops.hyper import triton

    return triton.refuses(machine, HyperCase(dims.streams, dims.hidden))


def _rope_norm(machine: Machine, dims: Dims) -> str | None:
    from lamina.ops.rope_norm import triton

    return triton.refuses(machine, RopeNormCase(dims.head_dim, dims.rope_dim))


def _store(machine: Machine, dims: Dims) -> str | None:
    from lamina.ops.store import triton

    codecs = [attention_codec(dims.cache_format, dims.head_dim, dims.rope_dim)]
    codecs += [index_codec(dims.index_format, dims.index_dim)] if dims.index_heads else []
    cases = [StoreCase(codec.width, dims.rope_dim, tuple(dtype for _, dtype, _ in codec.fields)) for codec in codecs]
    return _first(triton.refuses(machine, case) for case in cases)


def _compress(machine: Machine, dims: Dims) -> str | None:
    from lamina.ops.compress import triton

    widths = (dims.head_dim, *((dims.index_dim,) if dims.index_heads else ()))
    return _first(triton.refuses(machine, CompressCase(width, dims.rope_dim)) for width in widths)


def _index(machine: Machine, dims: Dims) -> str | None:
    from lamina.ops.index_topk import triton

    return triton.refuses(
        machine, IndexCase(dims.index_format, dims.index_heads, dims.index_dim, dims.top_k, dims.max_entries)
    )  # fmt: skip


def _attend(machine: Machine, dims: Dims) -> str | None:
    from lamina.ops.attend import triton

    is_fp8 = _reads_fp8(machine, dims)
    return triton.refuses(machine, AttendCase(dims.heads, dims.head_dim, dims.rope_dim, dims.cache_format, is_fp8))


def _hopper_attend(machine: Machine, dims: Dims, kernels: str) -> str | None:
    from lamina.ops.attend import hopper

    why = _not_hopper(machine, kernels)
    if why is not None:
        return why
    if dims.act == "fp32":
        return "activations are fp32"
    if dims.cache_format != "fp8":
        return f"reads fp8 entries, not {dims.cache_format}"
    width, rope = hopper.SHAPE
    if (dims.head_dim, dims.rope_dim) != (width, rope):
        return f"needs {width} dims of which {rope} are rotated, not {dims.head_dim} and {dims.rope_dim}"
    return _attend(machine, dims)


def _route(machine: Machine, dims: Dims) -> str | None:
    from lamina.ops.route import triton

    return triton.refuses(machine, RouteCase(dims.experts, dims.experts_per_token))


def _sample(machine: Machine) -> str | None:
    from lamina.ops.sample import triton

    return triton.refuses(machine)


def _move(machine: Machine) -> str | None:
    from lamina.ops.move import triton

    return triton.refuses(machine)
