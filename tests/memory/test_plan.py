"""Predicted bytes equal the bytes that the ledger's pages really hold."""

import pytest

from lamina.base.errors import ConfigError
from lamina.memory.ledger import Lease, Ledger
from lamina.memory.plan import Held, Prediction, measured, predict, requests_that_fit
from tests.memory.shapes import logs_only, scans_only, tiny, v4_flash


def start(ledger: Ledger, tokens: list[int], checkpoints: tuple[int, ...] = ()) -> Lease:
    """A request that has computed all of these tokens, with checkpoints on the way."""
    lease = ledger.admit(tokens, 4)
    assert isinstance(lease, Lease)
    for stop in sorted({*checkpoints, len(tokens)}):
        if stop > lease.position:
            assert ledger.extend(lease, stop - lease.position)
            if stop in checkpoints:
                assert ledger.checkpoint(lease)
            ledger.commit(lease, tokens[lease.committed : stop])
    return lease


def same(one: Prediction, other: Prediction, ledger: Ledger) -> None:
    assert one == other
    assert one.total == sum(row.nbytes for row in one.rows) == one.pages * one.page_bytes
    assert one.pages == ledger.num_pages - ledger.free_pages


@pytest.mark.parametrize("layout", [tiny(), tiny(8), logs_only(), scans_only(), v4_flash()])
def test_predicted_equals_measured(layout) -> None:
    ledger = Ledger(layout, 200)
    same(predict(layout, []), measured(layout, ledger), ledger)
    has_slot = bool(layout.slot_pages)
    one = start(ledger, [1] * 11, (3, 8) if has_slot else ())
    start(ledger, [2] * 400 if layout.block_tokens == 256 else [2] * 17)
    length = 400 if layout.block_tokens == 256 else 17
    held = [Held(11, (3, 8) if has_slot else ()), Held(length)]
    same(predict(layout, held), measured(layout, ledger), ledger)
    ledger.finish(one)
    held[0] = Held(11, (3, 8, 11) if has_slot else (), running=False)
    same(predict(layout, held), measured(layout, ledger), ledger)
    ledger.cancel(ledger.leases[0])
    held[1] = Held(length, running=False)
    same(predict(layout, held), measured(layout, ledger), ledger)


def test_shared_blocks_count_once() -> None:
    layout = tiny()
    ledger = Ledger(layout, 60)
    start(ledger, [1] * 9, (8,))
    lease = start(ledger, [*[1] * 8, 2, 2, 2])
    assert lease.hit.position == 8
    same(predict(layout, [Held(9, (8,)), Held(11, shared_blocks=2)]), measured(layout, ledger), ledger)


def test_rows_name_every_memory_and_what_is_left() -> None:
    layout = tiny()
    table = predict(layout, [Held(9, (8,))])
    assert [row.name for row in table.rows] == ["window", "c2", "c2_fold", "c4", "c4_fold", "hidden", "padding", "checkpoints"]
    assert table.nbytes("c2") == 3 * 2 * 261 and table.nbytes("window") == 2 * 5 * 22 and table.nbytes("hidden") == 32
    assert table.nbytes("checkpoints") == layout.checkpoint_pages(8) * layout.page_bytes
    assert "padding" in table.table() and f"{table.total:,}" in table.table()


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ConfigError):
        predict(tiny(), [Held(-1)])
    with pytest.raises(ConfigError):
        requests_that_fit(logs_only(), 1000, 0)
