"""Sampling against a brute-force definition in fp64, row independence bit for bit, and counter-based random numbers."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lamina.ops.sample import SampleBatch, sample, token_logprobs
from lamina.ops.sample.draws import uniform

INF = math.inf


def make_batch(num_rows: int, **fields: Tensor) -> SampleBatch:
    """A batch with temperature 1 and no filter, and the given fields."""
    base = dataclasses.replace(SampleBatch.greedy(num_rows), temperature=torch.ones(num_rows))
    return dataclasses.replace(base, **fields)


def full(num_rows: int, value: float) -> Tensor:
    return torch.full((num_rows,), value, dtype=torch.float64)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


# Brute force: Python numbers, one row, sorted lists, no shared code --------------------------------------------------


def brute_distribution(
    logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """Probability of each token by the definition: min_p, then top_k, then top_p, equals by lowest id."""
    peak = max(logits)
    weights = [math.exp((x - peak) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = [i for i in order if weights[i] >= min_p * weights[order[0]]]
    if top_k > 0:
        kept = kept[:top_k]
    total, reached, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if nucleus and reached >= top_p * total:
            break
        nucleus.append(i)
        reached += weights[i]
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


def brute_penalised(
    logits: list[float], prompt: set[int], output: list[int], repetition: float, presence: float, frequency: float
) -> list[float]:
    edited = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / repetition if logit > 0 else logit * repetition
        edited.append(logit - frequency * output.count(token) - presence * (token in output))
    return edited


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.05},
    {"top_p": 0.6},
    {"top_p": 0.97},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.9, "top_k": 12, "top_p": 0.5},
]


def inverse_draw(probabilities: list[float], number: float) -> int:
    reached = 0.0
    for token, probability in enumerate(probabilities):
        reached += probability
        if probability and reached > number:
            return token
    return max(i for i, probability in enumerate(probabilities) if probability)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["smooth", "equals", "peaked", "holes"])
def test_every_draw_is_the_inverse_of_the_cumulative_distribution(setting: dict[str, float], kind: str) -> None:
    rows = 97
    logits = torch.randn(40, generator=torch.Generator().manual_seed(len(kind))) * 2
    logits = {"smooth": logits, "equals": logits.round(), "peaked": logits * 8, "holes": logits.masked_fill(logits < -0.5, -INF)}[
        kind
    ]
    numbers = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    columns = {
        name: full(rows, value) if name != "top_k" else torch.full((rows,), int(value), dtype=torch.int64)
        for name, value in setting.items()
    }
    drawn = sample(logits.repeat(rows, 1), make_batch(rows, uniforms=numbers, **columns)).tolist()
    expected = brute_distribution(logits.tolist(), **setting)  # type: ignore[arg-type]
    assert drawn == [inverse_draw(expected, number) for number in numbers.tolist()]


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[7], SETTINGS[11], SETTINGS[12]], ids=str)
def test_chi_square(setting: dict[str, float]) -> None:
    """4,000 counter-based draws follow the brute-force distribution; the bound is the 1 - 1e-6 quantile (Wilson-Hilferty)."""
    rows = 4_000
    logits = torch.randn(24, generator=torch.Generator().manual_seed(5)) * 1.5
    columns = {
        name: full(rows, value) if name != "top_k" else torch.full((rows,), int(value), dtype=torch.int64)
        for name, value in setting.items()
    }
    numbers = torch.tensor([uniform(1234, 0, position) for position in range(rows)], dtype=torch.float64)
    drawn = sample(logits.repeat(rows, 1), make_batch(rows, uniforms=numbers, **columns))
    expected = torch.tensor(brute_distribution(logits.tolist(), **setting), dtype=torch.float64) * rows  # type: ignore[arg-type]
    seen = torch.bincount(drawn, minlength=24).double()
    assert bool((seen[expected == 0] == 0).all())
    common = expected >= 5
    chi = float(((seen - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum()) - 1
    assert chi < freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    flat = torch.full_like(expected, rows / 24)  # the test can fail: a flat distribution is far outside
    assert float(((seen - flat) ** 2 / flat).sum()) > 1_000


def test_greedy_takes_the_lowest_of_equals_and_ignores_filters() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-INF, -INF, -5.0, -5.0], [7.0, 7.0, 7.0, 7.0]])
    batch = dataclasses.replace(SampleBatch.greedy(3), top_p=full(3, 0.1), min_p=full(3, 1.0), top_k=ints(1, 2, 3))
    assert sample(logits, batch).tolist() == [1, 2, 0]


def test_top_k_keeps_exactly_k_of_equals() -> None:
    logits = torch.zeros(1000, 8)
    logits[:, 5] = 1.0
    numbers = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = sample(logits, make_batch(1000, uniforms=numbers, top_k=torch.full((1000,), 3, dtype=torch.int64)))
    assert set(drawn.tolist()) == {0, 1, 5}
    drawn = sample(logits * 0, make_batch(1000, uniforms=numbers, top_p=full(1000, 0.5)))
    assert set(drawn.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("number", [0.0, 5e-324, 2.0**-53, 0.5, 1 - 2.0**-53, 1.0])
def test_a_token_of_probability_zero_never_comes_out(number: float) -> None:
    logits = torch.full((6, 50), -INF)
    logits[0, 7] = -3.0
    logits[1, [0, 49]] = torch.tensor([0.0, -2e3])  # underflows to probability 0
    logits[2, [20, 30]] = 1.0
    logits[3] = torch.linspace(-200, 200, 50)
    logits[4, 1:49] = 0.0
    logits[5, [3, 4]] = torch.tensor([0.0, -40.0])  # too small to move the sum, at its end
    for column in (
        {},
        {"top_p": full(6, 0.3)},
        {"top_k": ints(1, 1, 2, 50, 3, 2)},
        {"temperature": full(6, 1e-30)},
        {"min_p": full(6, 1.0)},
    ):
        drawn = sample(logits, make_batch(6, uniforms=full(6, number), **column)).tolist()
        assert drawn[0] == 7 and drawn[1] == 0 and drawn[2] in (20, 30) and 1 <= drawn[4] < 49 and drawn[5] in (3, 4)
        assert logits[3, drawn[3]] > -INF
    drawn = sample(logits, make_batch(6, uniforms=full(6, number))).tolist()
    assert drawn[2] == (30 if number >= 0.5 else 20) and drawn[4] == (48 if number > 0.99 else 1 if number < 0.01 else 25)


@pytest.mark.parametrize("seed", range(12))
def test_penalties_bias_and_bans(seed: int) -> None:
    """Edited logits are seen through 101 draws of each row, evenly spaced, and through the most likely token."""
    generator, repeats = torch.Generator().manual_seed(seed), 101
    logits = torch.randn(3, 12, generator=generator) * 2
    prompts, outputs = [{1, 2, 3, 6}, set(), {0}], [[3, 3, 4, 8], [5, 9, 9, 9], []]
    seen, counts = torch.zeros(3, 12, dtype=torch.bool), torch.zeros(3, 12, dtype=torch.int32)
    for row in range(3):
        seen[row, list(prompts[row])] = True
        for token in outputs[row]:
            counts[row, token] += 1
    penalties = {
        "repetition": torch.tensor([1.5, 0.7, 2.0]),
        "presence": torch.tensor([0.5, -1.0, 2.0]),
        "frequency": torch.tensor([0.25, 0.5, -2.0]),
    }
    edited = logits.clone()
    edited[0, 3] += 2.5
    edited[2, 1] -= 100.0
    edited[1, [5, 6]] = -INF
    rows = [
        brute_penalised(edited[r].tolist(), prompts[r], outputs[r], *(p[r].item() for p in penalties.values())) for r in range(3)
    ]
    numbers = (torch.arange(repeats, dtype=torch.float64) + 0.5) / repeats
    batch = make_batch(
        3 * repeats,
        prompt_seen=seen.repeat_interleave(repeats, 0),
        output_counts=counts.repeat_interleave(repeats, 0),
        uniforms=numbers.repeat(3),
        bias_rows=torch.cat([torch.arange(repeats), 2 * repeats + torch.arange(repeats), torch.arange(repeats)]),
        bias_ids=ints(3, 1, 3).repeat_interleave(repeats),
        bias_values=torch.tensor([2.0, -100.0, 0.5]).repeat_interleave(repeats),
        banned_rows=repeats + torch.arange(repeats).repeat(2),
        banned_ids=ints(5, 6).repeat_interleave(repeats),
        **{name: values.repeat_interleave(repeats) for name, values in penalties.items()},
    )
    many = logits.repeat_interleave(repeats, 0)
    original = many.clone()
    assert sample(many, batch).tolist() == [
        inverse_draw(brute_distribution(row), number) for row in rows for number in numbers.tolist()
    ]
    greedy = sample(many, dataclasses.replace(batch, temperature=torch.zeros(3 * repeats)))
    assert greedy[::repeats].tolist() == [max(range(12), key=row.__getitem__) for row in rows]
    assert torch.equal(many, original)


def test_masks_keep_only_what_they_allow() -> None:
    """After bias, bans and penalties; rows without a mask keep their tokens; allowed ones come out as often as they should."""
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(6))
    allowed = [3, 31, 32, 39]
    words = torch.tensor([[1 << 3 | -(1 << 31), 1 | 1 << 7]], dtype=torch.int32)
    bias = {"bias_rows": ints(1, 2), "bias_ids": ints(5, 5), "bias_values": torch.tensor([90.0, 90.0])}
    base = make_batch(4, **bias, banned_rows=ints(1), banned_ids=ints(39), uniforms=full(4, 0.5))
    free = sample(logits, base).tolist()
    masked = dataclasses.replace(base, mask_rows=ints(1), mask_words=words)
    drawn = []
    for number in np.linspace(0.001, 0.999, 400):
        tokens = sample(logits, dataclasses.replace(masked, uniforms=torch.tensor([0.5, number, 0.5, 0.5]).double())).tolist()
        assert tokens[:1] + tokens[2:] == free[:1] + free[2:]
        drawn.append(tokens[1])
    weights = logits[1, allowed[:3]].double().softmax(dim=0)
    for token, weight in zip(allowed[:3], weights.tolist(), strict=True):
        assert drawn.count(token) / 400 == pytest.approx(weight, abs=0.01)
    assert set(drawn) == set(allowed[:3])


def test_masks_are_refused_where_they_do_not_fit() -> None:
    logits = torch.zeros(2, 40)
    words = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="mask_words=\\(1, 1\\): a bit for each token"):
        sample(logits, make_batch(2, mask_rows=ints(0), mask_words=words))
    with pytest.raises(ValueError, match="logits row 1 of 2 has maximum -inf"):
        sample(logits, make_batch(2, mask_rows=ints(1), mask_words=torch.zeros(1, 2, dtype=torch.int32)))


def test_what_each_penalty_looks_at() -> None:
    flat = torch.ones(1, 3)
    look = make_batch(
        1,
        temperature=torch.zeros(1),
        prompt_seen=torch.tensor([[True, False, False]]),
        output_counts=torch.zeros(1, 3, dtype=torch.int32),
    )
    assert sample(flat, dataclasses.replace(look, presence=full(1, 2.0), frequency=full(1, 2.0))).item() == 0
    assert sample(flat, dataclasses.replace(look, repetition=full(1, 1.1))).item() == 1
    counted = dataclasses.replace(look, output_counts=torch.tensor([[0, 1, 2]], dtype=torch.int32))
    assert sample(flat, dataclasses.replace(counted, repetition=full(1, 0.5), prompt_seen=None)).item() == 1
    assert sample(flat, dataclasses.replace(counted, frequency=full(1, -1.0))).item() == 2
    assert sample(flat, dataclasses.replace(counted, presence=full(1, -1.0))).item() == 1


def rows_of(batch: SampleBatch, rows: list[int]) -> SampleBatch:
    """The batch of a few rows of a full one; sparse edits are renumbered."""
    assert batch.prompt_seen is not None and batch.output_counts is not None and batch.bias_values is not None
    assert (
        batch.bias_rows is not None
        and batch.bias_ids is not None
        and batch.banned_rows is not None
        and batch.banned_ids is not None
    )
    bias = [(new, i) for new, old in enumerate(rows) for i, row in enumerate(batch.bias_rows.tolist()) if row == old]
    banned = [(new, i) for new, old in enumerate(rows) for i, row in enumerate(batch.banned_rows.tolist()) if row == old]
    return SampleBatch(
        temperature=batch.temperature[rows],
        top_k=batch.top_k[rows],
        top_p=batch.top_p[rows],
        min_p=batch.min_p[rows],
        repetition=batch.repetition[rows],
        presence=batch.presence[rows],
        frequency=batch.frequency[rows],
        uniforms=batch.uniforms[rows],
        prompt_seen=batch.prompt_seen[rows],
        output_counts=batch.output_counts[rows],
        bias_rows=ints(*[new for new, _ in bias]),
        bias_ids=batch.bias_ids[[i for _, i in bias]],
        bias_values=batch.bias_values[[i for _, i in bias]],
        banned_rows=ints(*[new for new, _ in banned]),
        banned_ids=batch.banned_ids[[i for _, i in banned]],
    )


@pytest.mark.parametrize("vocab_size", [33, 4_099, 40_001])
def test_rows_do_not_see_each_other(vocab_size: int) -> None:
    num_rows, generator = 9, torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 4
    batch = SampleBatch(
        temperature=torch.tensor([0.0, 1.0, 0.3, 1.0, 2.0, 1.0, 0.0, 1.0, 1.0]),
        top_k=ints(0, 0, 5, 0, 20, 0, 3, 0, 1),
        top_p=torch.tensor([1.0, 0.9, 1.0, 0.5, 0.8, 1.0, 0.1, 0.999, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.1, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0]),
        repetition=torch.rand(num_rows, generator=generator) + 0.5,
        presence=torch.randn(num_rows, generator=generator),
        frequency=torch.randn(num_rows, generator=generator),
        uniforms=torch.rand(num_rows, generator=generator, dtype=torch.float64),
        prompt_seen=torch.rand(num_rows, vocab_size, generator=generator) < 0.3,
        output_counts=torch.randint(0, 4, (num_rows, vocab_size), generator=generator, dtype=torch.int32),
        bias_rows=ints(0, 3, 3, 8),
        bias_ids=ints(1, 2, 2, 30),
        bias_values=torch.tensor([5.0, 0.1, 0.7, 9.0]),
        banned_rows=ints(2, 5),
        banned_ids=ints(4, 6),
    )
    together = sample(logits, batch).tolist()
    for row in range(num_rows):
        assert sample(logits[row : row + 1], rows_of(batch, [row])).item() == together[row]
    order = torch.randperm(num_rows, generator=generator).tolist()
    assert sample(logits[order], rows_of(batch, order)).tolist() == [together[row] for row in order]
    strided = logits.t().contiguous().t()
    assert sample(strided, batch).tolist() == together

    tokens = torch.tensor(together)
    whole = token_logprobs(logits, tokens, 5)
    for row in range(num_rows):
        for alone, part in zip(token_logprobs(logits[row : row + 1], tokens[row : row + 1], 5), whole, strict=True):
            assert torch.equal(alone[0], part[row])
    for moved, part in zip(token_logprobs(strided, tokens, 5), whole, strict=True):
        assert torch.equal(moved, part)


def test_logprobs_ranks_and_tops() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(130, 50, generator=generator) * 3  # more rows than are worked on at once
    logits[3] = logits[3].round()  # equals
    logits[4, 1:] = -INF
    logits[5] = 0.0
    tokens = torch.randint(0, 50, (130,), generator=generator)
    exact = logits.double().log_softmax(dim=-1)
    for k in (0, 1, 7, 49, 50):
        logprob, rank, top_ids, top_logprobs = token_logprobs(logits, tokens, k)
        assert (logprob.dtype, rank.dtype, top_ids.dtype) == (torch.float32, torch.int64, torch.int64)
        assert top_ids.shape == top_logprobs.shape == (130, k)
        for row in range(130):
            values = logits[row].tolist()
            assert rank[row] == 1 + sum(value > values[tokens[row]] for value in values)
            assert top_ids[row].tolist() == sorted(range(50), key=lambda i: (-values[i], i))[:k]
            torch.testing.assert_close(logprob[row].double(), exact[row, tokens[row]], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(top_logprobs[row].double(), exact[row, top_ids[row]], rtol=1e-6, atol=1e-6)


def test_bad_rows_are_refused_by_number() -> None:
    good = torch.zeros(3, 4)
    for value in (math.nan, INF):
        bad = good.clone()
        bad[1, 2] = value
        for call in (lambda x: sample(x, make_batch(3)), lambda x: token_logprobs(x, ints(0, 0, 0), 1)):
            with pytest.raises(ValueError, match="row 1 of 3"):
                call(bad)
        with pytest.raises(ValueError, match="row 1 of 3"):  # a ban does not hide it
            sample(bad, make_batch(3, banned_rows=ints(1), banned_ids=ints(2)))
    empty = good.clone()
    empty[2] = -INF
    with pytest.raises(ValueError, match="row 2 of 3"):
        sample(empty, make_batch(3))
    with pytest.raises(ValueError, match="row 0 of 3"):
        sample(good, make_batch(3, banned_rows=ints(0, 0, 0, 0), banned_ids=ints(0, 1, 2, 3)))
    for batch in (make_batch(2), make_batch(3, output_counts=torch.zeros(3, 5, dtype=torch.int32))):
        with pytest.raises(ValueError, match="needed"):
            sample(good, batch)
    with pytest.raises(ValueError, match="float32"):
        sample(good.double(), make_batch(3))
    for tokens, k in ((ints(0, 0), 1), (ints(0, 0, 0), 5), (ints(0, 0, 0), -1)):
        with pytest.raises(ValueError, match="needed"):
            token_logprobs(good, tokens, k)
    assert sample(good[:0], make_batch(0)).shape == (0,)
    assert token_logprobs(good[:0], ints(), 2)[2].shape == (0, 2)


# Random numbers ------------------------------------------------------------------------------------------------------


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x64-10 (Salmon et al., 2011), written out."""
    mask, (a, b, c, d), (k, m) = (1 << 64) - 1, counter, key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (right >> 64) ^ b ^ k, right & mask, (left >> 64) ^ d ^ m, left & mask
        k, m = (k + 0x9E3779B97F4A7C15) & mask, (m + 0xBB67AE8584CAA73B) & mask
    return a, b, c, d


def test_draws_are_the_published_generator() -> None:
    assert philox((0, 0, 0, 0), (0, 0))[0] == 0x16554D9ECA36314C  # the known answer published with the generator
    for seed, child, position in [
        (0, 0, 0),
        (7, 1, 2),
        (-1, 0, 0),
        (2**64 - 1, 0, 0),
        (-(2**63), 5, 10**6),
        (9, 2**64 - 1, 2**64 - 1),
    ]:
        word = philox((1, position, child, 0), (seed % 2**64, int(seed < 0)))[0]
        assert uniform(seed, child, position) == ((word >> 12) + 0.5) / 2**52


def test_golden_draws() -> None:
    assert [uniform(0, 0, 0), uniform(0, 0, 1), uniform(-1, 0, 0), uniform(2**64 - 1, 0, 0), uniform(42, 3, 1000)] == [
        0.011546754286331562, 0.21185954403345753, 0.6548295103529941, 0.23494158814525556, 0.8560028030915331,
    ]  # fmt: skip


@pytest.mark.parametrize("axis", ["seed", "child", "position"])
def test_draws_are_uniform_and_independent_along_each_axis(axis: str) -> None:
    count = 4_000
    values = np.array([uniform(**({"seed": 11, "child": 2, "position": 3} | {axis: index})) for index in range(count)])
    assert values.min() > 0.0 and values.max() < 1.0 and len(set(values)) == count
    ordered = np.sort(values)
    distance = max(np.max(np.arange(1, count + 1) / count - ordered), np.max(ordered - np.arange(count) / count))
    assert distance < 2.7 / math.sqrt(count)  # Kolmogorov-Smirnov, p about 1e-6
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 5 / math.sqrt(count)


def test_draws_refuse_what_they_cannot_tell_apart() -> None:
    for seed, child, position in [(2**64, 0, 0), (-(2**63) - 1, 0, 0), (0, -1, 0), (0, 0, -1), (0, 2**64, 0), (0, 0, 2**64)]:
        with pytest.raises(ValueError, match="64-bit"):
            uniform(seed, child, position)
