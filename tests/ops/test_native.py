"""The C kernels against the definitions, for the instructions of this machine and for lesser ones; and how they are found."""

import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lamina.layers.heads import Context, GroupedAttention, RmsNorm
from lamina.layers.rounding import rounded
from lamina.ops import native
from lamina.ops.attend_heads import HeadsCase, Past, attend_heads
from lamina.ops.attend_heads.native import NativeHeads, Positioning, gate
from lamina.ops.gated.native import gated
from lamina.ops.gated.ref import gated as defined_gated
from lamina.ops.gemm.native import NativeWeight
from lamina.ops.residual.native import add, norm
from lamina.ops.rope_norm import rope_tables
from lamina.ops.store import HeadsCodec, Place, Store

BF16, FP32 = torch.bfloat16, torch.float32
SIZE = 16  # rows a page
PLAIN = Positioning(None, None, None, 0.0, False, False, True, False)
ROOT = Path(__file__).resolve().parents[2]
#: flags, and what /proc/cpuinfo must name
INSTRUCTIONS = {"native": ((), ()), "avx2": (("-mavx2", "-mfma"), ("avx2", "fma")), "sse": (("-msse4.2",), ("sse4_2",))}

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(scope="module", params=sorted(INSTRUCTIONS))
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The functions, compiled with some flags, are those that all calls find."""
    flags, needed = INSTRUCTIONS[request.param]
    if not flags:
        assert native.library() is not None, native.why_not()
        yield
        return
    info = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not info.exists() or not set(needed) <= set(info.read_text().split()):
        pytest.skip(f"the machine has not {needed}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_CACHE", str(tmp_path_factory.mktemp(request.param)))
        patch.delenv("LAMINA_NATIVE", raising=False)
        patch.setattr(native, "_FLAGS", ((*flags, "-O1", "-fopenmp"),))
        native._found.cache_clear()
        assert native.library() is not None, native.why_not()
        yield
    native._found.cache_clear()


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    native.use_threads(torch.get_num_threads())


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# Products ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "out"), [(1, 1), (7, 5), (33, 31), (64, 32), (100, 129), (257, 300)])
def test_products(width: int, out: int, compiled: None, rows: ModuleType) -> None:
    """Each row alone, among others, on two threads and with other strides gives the same bits, which are near fp64's."""
    matrix, bias, x = randn(out, width, seed=1), randn(out, seed=2), randn(29, width, seed=3)
    weight = NativeWeight(matrix)
    native.use_threads(1)
    whole = weight.times(x, bias)
    want = x.double() @ matrix.double().T + bias.double()
    bound = 1e-6 * (x.abs().double() @ matrix.abs().double().T + 1)
    assert bool(((whole - want).abs() <= bound).all())
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 25):
        native.use_threads(1 + count % 2)
        assert rows.same_bits(weight.times(x[3 : 3 + count], bias), whole[3 : 3 + count])
    apart = torch.full((29, width + 3), torch.nan)
    apart[:, 1:-2] = x
    assert rows.same_bits(weight.times(apart[:, 1:-2], bias), whole)
    assert rows.same_bits(weight.times(x.T.contiguous().T, bias), whole)
    assert rows.same_bits(weight.times(x[None, :, None], bias)[0, :, 0], whole)
    assert rows.same_bits(weight.times(x, bias, BF16), whole.to(BF16).float())
    assert rows.same_bits(weight.times(x), weight.times(x, torch.zeros(out)))
    assert weight.times(x[:0]).shape == (0, out)


def test_a_product_of_what_is_not_a_number(compiled: None) -> None:
    """NaN and infinity stay in their rows; NaN is NaN in bf16 whatever its bits, and what is too large infinite."""
    weight, x = NativeWeight(torch.eye(40)), randn(14, 40)
    x[3, 5] = torch.nan
    x[4] = torch.tensor(0x7F800001, dtype=torch.int32).view(FP32)
    found = weight.times(x, None, BF16)
    assert bool(found[3:5].isnan().all()) and not bool(found[[*range(3), *range(5, 14)]].isnan().any())
    one = NativeWeight(torch.ones(1, 1))
    for value in (3.4e38, -3.4e38, torch.inf, -torch.inf, 1e-40, 0.0, 1.00390625, 1.01171875):
        x = torch.tensor([[value]])
        assert torch.equal(one.times(x, None, BF16), x.to(BF16).float())


# Norms, residuals, activations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 5, 16, 37, 64, 100])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_norms_and_residuals(width: int, dtype: torch.dtype, compiled: None) -> None:
    x, found = rounded(randn(6, width, seed=1), dtype), randn(6, width, seed=2)
    x[1, 0], x[2], x[3, -1] = torch.nan, 0.0, 1e30
    near = {"rtol": 2.0**-7 if dtype == BF16 else 2e-5, "atol": 2e-6, "equal_nan": True}
    for weight in (None, randn(width, seed=3)):
        for centres in (False, True):
            of = RmsNorm(weight, 1e-5, centres)
            exact = [0, 1, 2, 4, 5]
            torch.testing.assert_close(norm(x, of, dtype)[exact], rounded(of.forward(x), dtype)[exact], **near)
            assert norm(x[:0], of, dtype).shape == (0, width)
    for after in (None, RmsNorm(randn(width, seed=3), 1e-6)):
        for scale, share in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.3), (2.0, 0.0)):
            part = found if after is None else rounded(after.forward(found), dtype)
            want = rounded(part * scale + (x * share if share else 0), dtype)
            torch.testing.assert_close(add(x, found.clone(), after, scale, share, dtype), want, **near)
    apart = randn(width, 6, seed=2).T
    torch.testing.assert_close(add(x, apart, None, 1.0, 1.0, dtype), rounded(x + apart, dtype), **near)


@pytest.mark.parametrize("width", [1, 15, 32, 50])
def test_activations(width: int, compiled: None) -> None:
    wide = randn(5, 2 * width, seed=1, scale=5)
    wide[1, 0], wide[2, 0], wide[3, 0], wide[4, 0] = torch.nan, torch.inf, -80.0, -0.0
    for activation in ("silu", "gelu_tanh", "relu2"):
        for has_gate in (True, False):
            for factor in (1.0, 0.3) if has_gate else (1.0,):
                want = defined_gated(wide, None, activation, has_gate, factor)
                found = gated(wide, activation, has_gate, factor, FP32)
                torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6, equal_nan=True)
                assert torch.equal(
                    gated(wide, activation, has_gate, factor, BF16).nan_to_num(), found.to(BF16).float().nan_to_num()
                )
                assert gated(wide[:0], activation, has_gate, factor, FP32).shape[0] == 0


def test_the_exponential(compiled: None) -> None:
    """1 / (1 + e^-x) over the whole range, through gates: within a few units of the last place; its ends and NaN."""
    x = torch.cat([torch.linspace(-86, 86, 20011), randn(2000, scale=1e-3), torch.tensor([0.0, -0.0])])
    out = torch.ones_like(x)
    gate(out, x, FP32)
    want = torch.sigmoid(x.double())
    assert float(((out - want) / want).abs().max()) < 4 * 2.0**-24 * 2
    ends = torch.tensor([100.0, torch.inf, -100.0, -torch.inf, torch.nan])
    out = torch.ones(5)
    gate(out, ends, FP32)
    assert out[:2].tolist() == [1, 1] and out[2:4].abs().max() < 1e-37 and bool(out[4].isnan())


# Attention --------------------------------------------------------------------------------------------------------------


def layer_of(case: HeadsCase, store: Store, p: Positioning = PLAIN, dtype: torch.dtype = FP32) -> NativeHeads:
    assert isinstance(store.codec, HeadsCodec)
    return NativeHeads(case, Past(store, store.codec), p, dtype)


def stored(rows: ModuleType, codec: HeadsCodec, lengths: list[tuple[int, int]], kind: str, size: int) -> tuple[Store, list, list]:
    """A memory with the rows of positions before each start, NaN elsewhere, the parts of a step, and all rows of each."""
    each = 1 if kind == "slot" else max(-(-stop // size) for _, stop in lengths)
    order = torch.randperm(len(lengths) * each + 1, generator=torch.Generator().manual_seed(1)).tolist()
    store, parts, values = rows.poisoned_store(codec, len(order), size), [], []
    store.place = Place(kind)  # type: ignore[arg-type]
    for number, (start, stop) in enumerate(lengths):
        own = tuple(order[number * each : (number + 1) * each])
        parts.append(rows.Part(start, stop, own if kind == "block" else (), own[:1]))
        values.append(codec.encode(randn(stop, codec.width, seed=10 + number)))
        where = torch.arange(stop if kind == "block" else start)[-size if kind == "slot" else 0 :]
        pages = torch.tensor(own)[where // size if kind == "block" else where * 0]
        store.write(pages, where % size, tuple(part[where] for part in values[-1]))
    return store, parts, values


CASES = [
    (HeadsCase(1, 1, 0.4), 8, 8), (HeadsCase(4, 2, 0.3, softcap=5.0), 20, 12), (HeadsCase(3, 3, 0.3, window=20), 24, 24),
    (HeadsCase(6, 1, 0.2, window=64), 40, 56), (HeadsCase(16, 1, 0.2), 33, 16), (HeadsCase(8, 2, 0.1, reset=32), 64, 64),
    (HeadsCase(13, 1, 0.1, window=70), 16, 32), (HeadsCase(2, 1, 0.06), 256, 250), (HeadsCase(100, 1, 0.3), 8, 8),
]  # fmt: skip


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_attention(number: int, sinks: bool, compiled: None, rows: ModuleType) -> None:
    """The definition's values; one query gives what all give, alone or not, on one thread or two; NaN is never read."""
    case, key_dim, value_dim = CASES[number]
    case = replace(case, sinks=randn(case.heads, seed=7)) if sinks else case
    fmt = "bf16" if (number + sinks) % 2 else "fp32"
    codec = HeadsCodec(case.kv_heads, key_dim, value_dim, fmt)
    kinds = ["block"] if case.window is None else ["block", "slot"]
    whole_q = randn(131, case.heads, key_dim, seed=5)
    for kind in kinds:
        lengths = [(0, 131), (70, 71), (63, 65), (0, 1), (120, 131), (64, 65), (63, 64)]
        size = SIZE if kind == "block" else case.window + 3
        store, parts, values = stored(rows, codec, lengths, kind, size)
        sequences = rows.arrays(parts)
        where = rows.places(parts)
        own = tuple(
            torch.cat([part[p.start : p.stop] for part, p in zip(field, parts, strict=True)]
                      + [field[0].new_full((sequences.positions.shape[0] - len(where), field[0].shape[1]), torch.nan)])
            for field in zip(*values, strict=True)
        )  # fmt: skip
        q = torch.full((sequences.positions.shape[0], case.heads, key_dim), torch.nan)
        for row, _, position in where:
            q[row] = whole_q[position]
        layer = layer_of(case, store)
        native.use_threads(1)
        found = layer.attend(q * case.scale, own, sequences)
        assert not found[len(where) :].any()
        want = attend_heads(q, own, Past(store, codec), case, sequences).flatten(1)
        torch.testing.assert_close(found[: len(where)], want[: len(where)], rtol=2e-5, atol=2e-5)
        native.use_threads(2)
        assert rows.same_bits(layer.attend(q * case.scale, own, sequences), found)
        half = layer_of(case, store, dtype=BF16).attend(q * case.scale, own, sequences)
        assert rows.same_bits(half, found.to(BF16).float())
        for index, part in enumerate(parts):  # each alone
            step = rows.arrays([part])
            first = next(row for row, owner, _ in where if owner == index)
            count = part.stop - part.start
            pad = step.positions.shape[0] - count
            alone_own = tuple(torch.cat([x[first : first + count], x[:1].expand(pad, -1)]) for x in own)
            alone_q = torch.cat([q[first : first + count], q[:1].expand(pad, -1, -1)])
            alone = layer.attend(alone_q * case.scale, alone_own, step)
            assert rows.same_bits(alone[:count], found[first : first + count])
    # in a log the same sequence in any cuts
    store, parts, values = stored(rows, codec, [(0, 131)], "block", SIZE)
    layer = layer_of(case, store)
    padded = torch.cat([whole_q, whole_q[:13]])
    found = layer.attend(padded[:136] * case.scale, values[0], rows.arrays(parts))
    for start, stop in ((0, 1), (1, 3), (17, 40), (63, 64), (64, 65), (60, 70), (127, 131), (130, 131)):
        step = rows.arrays([replace(parts[0], start=start, stop=stop)])
        some = padded[start:][: step.positions.shape[0]]
        assert rows.same_bits(layer.attend(some * case.scale, values[0], step)[: stop - start], found[start:stop])


# Queries, keys and values -----------------------------------------------------------------------------------------------

GAINS = (RmsNorm(None, 1e-6), RmsNorm(randn(20, seed=8), 1e-5))
WIDE = (RmsNorm(randn(80, seed=8), 1e-5), RmsNorm(randn(40, seed=9), 1e-6))
VARIANTS: list[dict[str, object]] = [
    {}, {"b_in": True}, {"q_norm": GAINS[0], "k_norm": GAINS[1]}, {"q_norm": GAINS[1], "norm_after_rope": True, "angle": 0},
    {"q_norm": WIDE[0], "k_norm": WIDE[1], "norm_all": True, "angle": 1}, {"angle": 1}, {"angle": 0, "is_gated": True},
    {"v_norm": RmsNorm(None, 1e-6), "b_in": True, "angle": 0, "temperature": (8.0, 0.1, 1.0)},
]  # fmt: skip


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_a_layer(number: int, dtype: torch.dtype, compiled: None, rows: ModuleType) -> None:
    """From a projection's rows to the result, against the same layer without kernels; and what both have kept."""
    options = dict(VARIANTS[number])
    heads, kv, dim = 4, 2, 20
    is_gated = bool(options.get("is_gated", False))
    wide = (heads + 2 * kv + heads * is_gated) * dim
    bias = randn(wide, seed=6) if options.pop("b_in", False) else None
    codec, case = HeadsCodec(kv, dim, dim, "fp32" if dtype == FP32 else "bf16"), HeadsCase(heads, kv, 0.2)
    lengths, matrices = (
        [(0, 70), (30, 31), (64, 65)],
        (randn(wide, 24, seed=3, scale=0.3), randn(24, heads * dim, seed=4, scale=0.1)),
    )
    results = []
    for by_kernels in (False, True):
        store, parts, _ = stored(rows, codec, lengths, "block", SIZE)
        sequences = rows.arrays(parts)
        positions = sequences.positions
        angles = tuple(rope_tables(positions, 100.0 ** -torch.linspace(0, 1, pairs)) for pairs in (10, 3))
        past = Past(store, codec)
        plain = GroupedAttention(
            w_in=matrices[0], b_in=bias, w_out=matrices[1], b_out=None, past=past, codec=codec, case=case,
            angle=options.get("angle"), **{k: v for k, v in options.items() if k != "angle"},
        )  # type: ignore[arg-type]  # fmt: skip
        if by_kernels:
            norms = [None if n is None else (n.weight, n.eps) for n in (plain.q_norm, plain.k_norm)]
            v_eps = 0.0 if plain.v_norm is None else plain.v_norm.eps
            told = Positioning(bias, norms[0], norms[1], v_eps, plain.norm_all, plain.norm_after_rope, True, is_gated)
            plain = replace(plain, kernels=layer_of(case, store, told, dtype))
        x = rounded(randn(positions.shape[0], 24, seed=5), dtype)
        out = plain.forward(x, Context(positions, sequences, angles, dtype))
        results.append((out[: sequences.num_rows], [view.float().nan_to_num() for view in store.views]))
    near = {"rtol": 2.0**-6, "atol": 2.0**-6} if dtype == BF16 else {"rtol": 2e-5, "atol": 1e-5}
    torch.testing.assert_close(results[1][0], results[0][0], **near)
    torch.testing.assert_close(results[1][1], results[0][1], **near)


def test_nothing(compiled: None, rows: ModuleType) -> None:
    """No rows and no sequences."""
    codec, case = HeadsCodec(2, 8, 8, "fp32"), HeadsCase(4, 2, 1.0)
    layer = layer_of(case, rows.poisoned_store(codec, 1, SIZE))
    q, own, _ = layer.project(torch.empty(0, 64), None, None)
    assert q.shape == (0, 4, 8) and own[0].shape == (0, 16)
    gate(torch.empty(0), torch.empty(0), FP32)


def test_a_nan_is_kept_as_one(compiled: None, rows: ModuleType) -> None:
    """One whose upper half alone would be infinity, in rows that are kept in bf16."""
    layer = layer_of(HeadsCase(1, 1, 1.0), rows.poisoned_store(HeadsCodec(1, 8, 8, "bf16"), 1, SIZE))
    _, own, _ = layer.project(torch.full((1, 24), 0x7F800001, dtype=torch.int32).view(FP32), None, None)
    assert all(bool(part.isnan().all()) for part in own)


# How they are found -----------------------------------------------------------------------------------------------------


def python(code: str, tmp_path: Path, **changes: str | None) -> str:
    """What a new process says; None takes a variable away. It must end by itself."""
    known: dict[str, str | None] = {**os.environ, "LAMINA_CACHE": str(tmp_path / "kept"), "OMP_NUM_THREADS": "1", **changes}
    environment = {key: value for key, value in known.items() if value is not None}
    line = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture
def why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Variables may be set; then `native.why_not()` looks anew. Afterwards all is as it was."""
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path / "kept"))
    monkeypatch.delenv("LAMINA_NATIVE", raising=False)
    native._found.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    native._found.cache_clear()


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LAMINA_NATIVE", "0", "LAMINA_NATIVE=0"),
        ("CC", "nothing-of-this-name", "no C compiler 'nothing-of-this-name'"),
        ("CC", "", "no C compiler"),
        ("CC", "cc 'open", "CC is no command"),
        ("CC", "false", "could not be compiled"),
        ("LAMINA_CACHE", "/proc/no-such-directory", "could not be compiled"),
    ],
)
def test_without(name: str, value: str, said: str, why_not: pytest.MonkeyPatch) -> None:
    why_not.setenv(name, value)
    assert native.library() is None and said in str(native.why_not())
    native.use_threads(2)


def test_a_compiler_that_fails(why_not: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It says its version and compiles nothing: its last line is the reason, whatever bytes it writes; no file stays behind."""
    why_not.setenv("CC", script(tmp_path / "cc", 'test "$1" = --version && exit 0\nprintf "\\377\\nno room\\n" >&2\nexit 1\n'))
    assert native.library() is None and str(native.why_not()).endswith("no room")
    assert not list((tmp_path / "kept").iterdir())


def test_a_compiler_that_makes_nonsense(why_not: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it wrote is no library."""
    lines = 'test "$1" = --version && exit 0\nwhile test "$1" != -o; do shift; done\necho nonsense >"$2"\n'
    why_not.setenv("CC", script(tmp_path / "cc", lines))
    assert native.library() is None and "could not be compiled" in str(native.why_not())


def test_a_directory_of_others(why_not: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept").chmod(0o777)
    assert native.library() is None and "not this user's alone" in str(native.why_not())


def test_no_home(why_not: pytest.MonkeyPatch) -> None:
    for name in ("LAMINA_CACHE", "XDG_CACHE_HOME", "HOME"):
        why_not.delenv(name, raising=False)

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    why_not.setattr(native.Path, "home", nowhere)
    assert native.library() is None and "home directory" in str(native.why_not())


def test_one_that_was_cut_short(why_not: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is compiled again, and not loaded: its missing pages would end the process."""
    why_not.setattr(native, "_FLAGS", (("-O0",),))
    path = native._kept(["cc"], sorted(native._SOURCES.glob("*/native.c")))
    whole = path.read_bytes()
    made = path.stat().st_mtime_ns
    assert native._kept(["cc"], sorted(native._SOURCES.glob("*/native.c"))) == path and path.stat().st_mtime_ns == made
    for content in (whole[:-100], whole[: len(whole) // 2], b"", whole[:-1] + b"x"):
        path.write_bytes(content)
        assert not native._is_whole(path)
    assert native.library() is not None and native._is_whole(path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_importing_compiles_nothing(tmp_path: Path) -> None:
    """Nor does it import torch."""
    code = "import sys, lamina, lamina.cli; print('torch' in sys.modules, 'lamina.ops.native' in sys.modules)"
    assert python(code, tmp_path, CC="false") == "False False" and not (tmp_path / "kept").exists()


@pytest.mark.long
def test_no_read_or_write_past_an_end(tmp_path: Path) -> None:
    """The checks above with the address and undefined-behaviour sanitisers."""
    libraries = [
        subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(path).exists() for path in libraries):
        pytest.skip("the compiler has no sanitisers")
    compiler = "cc -fsanitize=address,undefined -fno-sanitize-recover=undefined -g"
    settings = {"LAMINA_CACHE": str(tmp_path), "CC": compiler, "OMP_NUM_THREADS": "1", "ASAN_OPTIONS": "detect_leaks=0"}
    names = "native and (products or number or residuals or activations or exponential or attention or layer or nothing)"
    line = [sys.executable, "-m", "pytest", "-x", "-s", str(Path(__file__)), "-k", f"({names}) and not avx2 and not sse"]
    # the compiler itself must not be preloaded: it runs first
    compiling = [sys.executable, "-c", "from lamina.ops import native; native._found()"]
    subprocess.run(compiling, env={**os.environ, **settings}, cwd=ROOT, capture_output=True, timeout=100, check=False)
    preloaded = {**os.environ, **settings, "LD_PRELOAD": " ".join(libraries)}
    done = subprocess.run(line, env=preloaded, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, (done.stdout + done.stderr)[-4000:]


def _forked(weight: NativeWeight, x: Tensor, want: Tensor) -> None:
    native.use_threads(1)
    os._exit(0 if torch.equal(weight.times(x), want) else 1)


def test_threads_and_forks(rows: ModuleType) -> None:
    """Two threads of Python at once have no memory in common; a forked process computes on one thread of its own."""
    weights = [NativeWeight(randn(200, 90, seed=seed)) for seed in (1, 2)]
    x = randn(60, 90, seed=3)
    native.use_threads(2)
    wants = [weight.times(x) for weight in weights]
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda i: rows.same_bits(weights[i % 2].times(x), wants[i % 2]), range(100)):
            assert found
    process = multiprocessing.get_context("fork").Process(target=_forked, args=(weights[0], x, wants[0]))
    process.start()
    process.join(30)
    is_stuck = process.is_alive()
    process.kill()
    assert not is_stuck and process.exitcode == 0
