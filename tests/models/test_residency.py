"""Routing with an incomplete resident set, and the demand that is recorded before it."""

import pytest
import torch

from packers.shards import Checkpoint
from tests.models.rig import CPU, GOLDEN, full_bank, settings
from tided.models.families import family_of
from tided.models.parallel import Alone


@pytest.fixture
def tide():
    """A model of its own, whose bank the test changes."""
    checkpoint = Checkpoint.open(GOLDEN)
    bank = full_bank(checkpoint)
    model = family_of(checkpoint.config).load(checkpoint, settings(numerics="fp32"), Alone(), bank, CPU)
    return model, bank


def test_an_expert_nobody_wants_may_leave(tide, prompt):
    model, bank = tide
    whole = model.prefill(model.open_lane(0), prompt[:4], "all")
    unwanted = [(layer, e) for layer in range(10) for e in range(8) if bank.tap.counts[0, layer, e] == 0]
    assert unwanted
    for layer, expert in unwanted:
        bank.slots[bank.tables.slot_of[layer, expert]] = 255
        bank.tables.withdraw(layer, expert)
    bank.tap.take(0)
    assert torch.equal(model.prefill(model.open_lane(0), prompt[:4], "all"), whole)
    assert bank.tap.totals[0].tolist()[1] == 0


def test_demand_is_what_the_router_wanted(tide, prompt):
    model, bank = tide
    model.prefill(model.open_lane(3), prompt, "none")
    wanted, mass, totals = bank.tap.take(3)
    assert wanted.sum(1).tolist() == [101 * 3] * 10
    absent = wanted.argmax(1)
    for layer, expert in enumerate(absent.tolist()):
        bank.tables.withdraw(layer, expert)
    model.prefill(model.open_lane(3), prompt, "none")
    again, mass_again, totals_again = bank.tap.take(3)
    # Layer 0 sees the same input whatever is resident, so it wants the same.
    assert torch.equal(again[0], wanted[0])
    torch.testing.assert_close(mass_again[0], mass[0])
    assert totals[1] == 0
    assert totals_again[1] == sum(again[layer, expert] for layer, expert in enumerate(absent.tolist()))
    assert totals_again[0] == 10 * 101 * 3
    assert 0 < totals_again[3] < totals_again[2] == pytest.approx(10 * 101)


def test_too_few_residents_for_the_router(tide, prompt):
    model, bank = tide
    for expert in range(6):
        bank.tables.withdraw(4, expert)
    with pytest.raises(ValueError, match="2 routable experts, the router needs 3"):
        model.prefill(model.open_lane(0), prompt, "none")


def test_bounded_replay_records_only_rows_it_computes(prompt):
    checkpoint = Checkpoint.open(GOLDEN)
    bank = full_bank(checkpoint)
    config = settings(decoder_replay="bounded")
    model = family_of(checkpoint.config).load(checkpoint, config, Alone(), bank, CPU)
    model.prefill(model.open_lane(0), prompt, "last")
    assert bank.tap.counts[0].sum(1).tolist() == [101 * 3] * 6 + [32 * 3] * 4
