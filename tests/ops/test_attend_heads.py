"""Attention over selected rows of a log that all heads share: against plain softmax, with NaN in whatever is not to be read."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from lamina.base.formats import latent
from lamina.ops.attend_heads import HeadsCase, Past, attend_heads
from lamina.ops.index_topk import index_topk
from lamina.ops.store import LatentCodec, Place, StateCodec, Store

SIZE = 16  # rows a page
HEADS, RANK, ROPE = 3, 20, 6
#: (start, stop) of sequences: one row or several, below and above what may be selected, over the borders of tiles and pages
LENGTHS = [(0, 70), (63, 64), (64, 65), (100, 101), (120, 140), (0, 3), (199, 200), (20, 22), (10, 11)]


def written(rows: ModuleType, codec: LatentCodec, lengths: list[tuple[int, int]]) -> tuple[Store, list, list[Tensor]]:
    """A log of random rows, the parts of a step over it, and the rows of each sequence."""
    generator = torch.Generator().manual_seed(1)
    each = max(-(-stop // SIZE) for _, stop in lengths)
    order = torch.randperm(len(lengths) * each + 1, generator=generator).tolist()
    store, parts, values = rows.poisoned_store(codec, len(order), SIZE), [], []
    store.place = Place("block")
    for number, (start, stop) in enumerate(lengths):
        blocks = tuple(order[number * each : number * each + -(-stop // SIZE)])
        parts.append(rows.Part(start, stop, blocks, (0,)))
        values.append(torch.randn(stop, codec.width, generator=generator))
        where = torch.arange(stop)
        store.write(torch.tensor(blocks)[where // SIZE], where % SIZE, codec.encode(values[-1]))
    return store, parts, values


@pytest.mark.parametrize("top_k", [1, 20, 63, 64, 65, 130])
def test_selected_rows_and_no_others(top_k: int, rows: ModuleType) -> None:
    """In sequences whose queries all see more than top_k, rows that were not selected are NaN."""
    codec = LatentCodec(RANK, ROPE, "fp32")
    store, parts, values = written(rows, codec, LENGTHS)
    sequences = rows.arrays(parts)
    generator = torch.Generator().manual_seed(2)
    num = sequences.positions.shape[0]
    q = torch.randn(num, HEADS, codec.width, generator=generator)
    selected = torch.full((num, top_k), -1)
    wanted: dict[int, Tensor] = {}
    for row, _, position in rows.places(parts):
        if position >= top_k:
            wanted[row] = torch.randperm(position + 1, generator=generator)[:top_k].sort().values
            selected[row] = wanted[row]
        else:
            wanted[row] = torch.arange(position + 1)
    for number, part in enumerate(parts):
        if part.start < top_k:
            continue
        read = torch.cat([wanted[row] for row, owner, _ in rows.places(parts) if owner == number] + [torch.zeros(1).long()])
        unread = torch.tensor(sorted(set(range(part.stop)) - set(read.tolist())), dtype=torch.int64)
        store.write(
            torch.tensor(part.blocks)[unread // SIZE], unread % SIZE, (torch.full((len(unread), codec.width), torch.nan),)
        )
    case = HeadsCase(HEADS, 1, 0.3, top_k=top_k)
    found = attend_heads(q, (), Past(store, codec), case, sequences, selected)
    for row, number, _ in rows.places(parts):
        seen = values[number][wanted[row]].double()
        weights = torch.softmax(q[row].double() @ seen.T * 0.3, dim=-1)
        torch.testing.assert_close(found[row], (weights @ seen[:, :RANK]).float(), rtol=1e-5, atol=1e-5)
    assert not found[sequences.num_rows :].any()


def test_bits_of_selected_rows_do_not_depend_on_the_step(rows: ModuleType) -> None:
    """One row at a time gives what 150 rows of one sequence give."""
    top_k, codec = 37, LatentCodec(RANK, ROPE, "fp32")
    store, (part,), _ = written(rows, codec, [(0, 150)])
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(152, HEADS, codec.width, generator=generator)
    selected = torch.stack([torch.randperm(max(top_k, row + 1), generator=generator)[:top_k].sort().values for row in range(152)])
    case, past = HeadsCase(HEADS, 1, 0.3, top_k=top_k), Past(store, codec)
    whole = attend_heads(q, (), past, case, rows.arrays([part]), selected)
    for start, stop in ((0, 1), (36, 37), (37, 38), (30, 50), (149, 150), (64, 130)):
        step = rows.arrays([rows.Part(start, stop, part.blocks, (0,))])
        taken = slice(start, start + step.positions.shape[0])
        alone = attend_heads(q[taken].clone(), (), past, case, step, selected[taken])
        assert rows.same_bits(alone[: stop - start], whole[start:stop])


@pytest.mark.parametrize("top_k", [1, 7, 64, 65])
@pytest.mark.parametrize(("spread", "at_once"), [(0, 4096), (2, 4096), (2, 64)])
def test_an_index_of_every_token(
    top_k: int, spread: int, at_once: int, rows: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers make real ties: they go to the lowest token, however many are scored at once; tokens ascend."""
    monkeypatch.setattr("lamina.ops.index_topk.ref._SCORED_COLUMNS", at_once)
    generator = torch.Generator().manual_seed(4)
    store, parts, _ = written(rows, LatentCodec(4, 2, "fp32"), LENGTHS)
    log = Store(StateCodec(6), store.views, 0, Place("block"))
    keys = []
    for part in parts:
        keys.append(torch.randint(-spread, spread + 1, (part.stop, 6), generator=generator).float())
        where = torch.arange(part.stop)
        log.write(torch.tensor(part.blocks)[where // SIZE], where % SIZE, (keys[-1],))
    sequences = rows.arrays(parts)
    num = sequences.positions.shape[0]
    q, weights = (torch.randint(-3, 4, shape, generator=generator).float() for shape in ((num, 5, 6), (num, 5)))
    found = index_topk(q, weights, log, sequences, 1, top_k)
    assert found is not None
    for row, number, position in rows.places(parts):
        scores = (weights[row, :, None] * (q[row] @ keys[number][: position + 1].T).clamp(min=0)).sum(0)
        best = sorted(scores.argsort(descending=True, stable=True)[:top_k].tolist())
        assert found[row].tolist() == best + [-1] * (top_k - len(best))


@pytest.mark.parametrize(("cache_format", "nbytes"), [("fp8", 656), ("bf16", 1152), ("fp32", 2304)])
def test_a_latent_row(cache_format: str, nbytes: int, rows: ModuleType) -> None:
    """Sizes of the shipped shapes; what is read is what was stored; the value is the unrotated part of the key."""
    codec = LatentCodec(512, 64, cache_format)
    assert rows.poisoned_store(codec, 1, 1).row_bytes == nbytes
    assert [name for name, _, _ in codec.fields] == [name for name, _, _ in latent(cache_format, 512, 64)]
    x = torch.randn(9, 576, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 3, 9)[:, None]
    stored = codec.encode(x)
    read = codec.decode(stored)
    keys, values = codec.keys_values(stored)
    assert torch.equal(keys[:, 0], read) and torch.equal(values[:, 0], read[:, :512])
    allowed = {"fp32": 0.0, "bf16": 2.0**-8, "fp8": 2.0**-4}[cache_format]
    floor = x.abs().amax(-1, keepdim=True) * 2.0**-17  # e4m3 has steps of 2^-9 below its smallest exponent
    assert bool(((read - x).abs() <= allowed * x.abs() + (floor if cache_format == "fp8" else 0)).all())
    assert torch.equal(codec.decode(codec.encode(read)), read)
