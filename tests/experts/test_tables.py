"""Demand is what the router wanted, by lane; warm-up forwards do not count."""

import pytest
import torch

from tided.experts.sendings import SENDINGS, Sendings
from tided.experts.tables import KEPT_STEPS, DemandTap, RoutingTables, Together

CPU = torch.device("cpu")


def record(tap: DemandTap) -> None:
    """Three rows of lanes 1, 0, 1 in layer 1, two picks each; the second pick of row 2 missed."""
    tap.record(
        1,
        torch.tensor([1, 0, 1]),
        torch.tensor([[0, 3], [3, 2], [3, 0]]),
        torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]]),
        torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.4, 0.6]]),
        torch.tensor([[False, False], [False, False], [False, True]]),
    )


def test_picks_scores_and_misses_are_kept_by_lane():
    tap = DemandTap(2, 2, 4, CPU)
    record(tap)
    assert tap.counts[1, 1].tolist() == [2, 0, 0, 2]
    assert tap.mass[1, 1].tolist() == [33, 0, 0, 18]
    assert tap.counts[0, 1].tolist() == [0, 0, 1, 1]
    assert tap.mass[0, 1].tolist() == [0, 0, 8, 4]
    assert not tap.counts[:, 0].any()
    expected = torch.tensor([[2, 0, 1, 0, 0, 0, 0, 0], [4, 1, 2, 0.6, 0, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(tap.totals, expected)


def test_what_becomes_of_a_missed_pick_is_counted():
    tap = DemandTap(1, 1, 4, CPU, light=0.2)
    lanes, wanted, weights = torch.tensor([0]), torch.tensor([[0, 1, 2]]), torch.tensor([[0.7, 0.2, 0.1]])
    missed, read = torch.tensor([[True, True, True]]), torch.tensor([[True, False, False]])
    tap.record(0, lanes, wanted, weights, weights, missed, read)
    torch.testing.assert_close(tap.totals[0], torch.tensor([3, 3, 1, 1, 1, 1, 0.7, 0.1], dtype=torch.float64))


@pytest.mark.parametrize("steps", [1, 3])
def test_the_weights_wanted_since_the_last_time_are_those_of_all_lanes_without_the_light_ones(steps):
    tap = DemandTap(2, 2, 4, CPU, light=0.3)
    for _ in range(steps):
        tap.begin_step()
        record(tap)
    expected = torch.zeros(2, 4)
    expected[1] = steps * torch.tensor([0.6, 0, 0.5, 0.75 + 0.5 + 0.4])
    weights, rows = tap.take_wanted()
    torch.testing.assert_close(weights, expected)
    assert rows.tolist() == [0, 3 * steps]
    tap.begin_step()
    assert not any(part.any() for part in tap.take_wanted())
    assert tap.counts.sum() == 6 * steps


def test_a_rank_that_nobody_asks_keeps_the_wishes_of_a_few_steps():
    tap = DemandTap(2, 2, 4, CPU)
    for _ in range(3 * KEPT_STEPS):
        tap.begin_step()
        record(tap)
    tap.add_up()
    assert len(tap.wishes) == KEPT_STEPS


def test_layers_with_other_rows_are_added_with_theirs():
    """Bounded replay: layers behind see the last rows of a chunk only."""
    tap = DemandTap(2, 2, 4, CPU)
    record(tap)
    tap.record(
        0, torch.tensor([1]), torch.tensor([[2, 1]]), torch.ones(1, 2), torch.full((1, 2), 0.5), torch.ones(1, 2) > 2
    )
    assert tap.counts[1].sum(1).tolist() == [2, 4]
    assert len(tap.wishes[-1]) == 2
    assert tap.take_wanted().rows.tolist() == [1, 3]


def test_rows_that_were_given_up_are_no_rows_of_a_layer():
    tap = DemandTap(2, 2, 4, CPU)
    record(tap)
    tap.keep(1, 1)
    assert tap.take_wanted().rows.tolist() == [0, 2]


def test_taking_a_lane_empties_it_alone_and_gives_copies():
    tap = DemandTap(2, 2, 4, CPU)
    record(tap)
    counts, mass, totals = tap.take(1)
    record(tap)
    assert counts[1].tolist() == [2, 0, 0, 2]
    assert (float(mass.sum()), float(totals[0])) == (51, 4)
    assert tap.counts[1, 1].tolist() == [2, 0, 0, 2]
    assert tap.counts[0, 1].tolist() == [0, 0, 2, 2]


def test_warm_up_forwards_are_not_demand():
    tap = DemandTap(2, 2, 4, CPU)
    tap.enabled = False
    record(tap)
    assert not tap.counts.any()
    assert not tap.mass.any()
    assert not tap.totals.any()


def test_an_absent_expert_is_neither_routable_nor_anywhere():
    tables = RoutingTables(2, 3, CPU)
    assert tables.slot_of.tolist() == [[-1] * 3] * 2
    tables.publish(1, 2, 7)
    assert (int(tables.slot_of[1, 2]), int(tables.routable.sum())) == (7, 1)
    tables.withdraw(1, 2)
    assert tables.slot_of.tolist() == [[-1] * 3] * 2
    assert not tables.routable.any()


def test_uses_of_a_lane_outlive_its_prompt_and_end_with_its_request():
    tap = DemandTap(1, 1, 4, CPU)
    lanes, wanted, weights = torch.tensor([0]), torch.tensor([[0, 1, 2]]), torch.tensor([[0.7, 0.2, 0.1]])
    missed, read = torch.tensor([[True, True, False]]), torch.tensor([[True, False, False]])
    for _ in range(2):
        tap.record(0, lanes, wanted, weights, weights, missed, read)
        tap.take(0)
    expected = torch.tensor([[2, 2, 2, 0], [1.4, 0.4, 0, 0], [1.4, 0, 0, 0]])
    torch.testing.assert_close(tap.uses[:, 0, 0], expected)
    tap.forget(0)
    assert not tap.uses.any()


def test_experts_that_a_step_touches_are_those_of_all_its_rows_once():
    """Given up or not; rows of two passes apart; nothing of the step before."""
    tap = DemandTap(2, 2, 4, CPU)
    assert tap.touched() == 0
    tap.begin_step()
    record(tap)
    assert tap.touched() == 3
    tap.keep(1, 1)
    tap.add_up()
    assert tap.touched() == 3
    record(tap)
    assert tap.touched() == 6
    tap.begin_step()
    record(tap)
    assert tap.touched() == 3


class FakeStanding:
    """Adds nothing; what it keeps is there once `behind` was waited for."""

    def __init__(self, wanted: torch.Tensor, weights: torch.Tensor) -> None:
        self.layers, self.told = torch.arange(len(wanted)), []
        self._coming, self._kept = (wanted, weights), (torch.zeros_like(wanted), torch.zeros_like(weights))
        self.behind = self

    def add(self, rows):
        self.told.append(rows)
        return self._kept

    def synchronize(self) -> None:
        for kept, coming in zip(self._kept, self._coming, strict=True):
            kept.copy_(coming)


def test_wishes_that_lie_where_a_graph_leaves_them_are_its_to_add_once_a_step():
    """Two layers, rows of lanes 0, 0, 1, of which the second is given up."""
    tap = DemandTap(2, 2, 4, CPU)
    wanted = torch.tensor([[[0, 3], [3, 2], [1, 0]], [[2, 3], [3, 1], [2, 0]]])
    weights = torch.tensor([0.75, 0.25]).expand(2, 3, 2) * torch.tensor([1.0, 0, 1])[:, None]
    standing = FakeStanding(wanted, weights)
    step = Together(
        torch.arange(2), torch.tensor([0, 0, 1]), wanted, weights, weights, weights < 0, None, (0, 0, 1), standing
    )
    tap.begin_step()
    tap.record_step(step)
    tap.keep(0, 1)
    tap.add_up()
    assert standing.told == [[0, 2]]
    assert not tap.counts.any(), "the graph adds them to the books"
    taken = tap.take_wanted()
    assert taken.rows.tolist() == [2, 2]
    assert taken.weights.tolist() == [[1, 0.75, 0, 0.25], [0.25, 0, 1.5, 0.25]], "read before they had come"

    tap.begin_step()
    tap.record_step(step)
    tap.add_up()
    tap.record_step(step)
    tap.keep(0, 1)
    tap.add_up()
    assert standing.told == [[0, 2], None], "what it keeps of this step would be written over"
    assert tap.counts.sum(2).tolist() == [[2, 2], [2, 2]]
    assert tap.take_wanted().rows.tolist() == [3 + 2, 3 + 2]


def test_changes_at_once_are_sent_at_their_end_and_the_last_of_a_pair_stands(monkeypatch):
    tables, sent = RoutingTables(2, 4, CPU), []
    send = Sendings.send
    monkeypatch.setattr(Sendings, "send", lambda self: (sent.append(1), send(self)))
    with tables.at_once():
        tables.change({(0, 1): 5, (1, 2): 6})
        tables.change({(0, 1): -1})
        tables.change({(1, 3): 5})
        assert not tables.routable.any()
    assert (tables.slot_of[1].tolist(), len(sent)) == ([-1, -1, 6, 5], 1)
    assert torch.equal(tables.routable, tables.slot_of >= 0)
    with tables.at_once():
        pass
    assert len(sent) == 1, "nothing was changed"
    tables.change({(0, 1): 2})
    assert (tables.slot_of[0].tolist(), len(sent)) == ([-1, 2, -1, -1], 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_launched_between_two_changes_sees_the_first_however_late_it_runs():
    tables, seen = RoutingTables(2, 4, torch.device("cuda")), []
    torch.cuda._sleep(100_000_000)
    for slot in range(2 * SENDINGS):
        with tables.at_once():
            tables.change({(0, 1): slot})
            tables.change({(1, slot % 4): -1 if slot % 2 else slot})
        seen.append((tables.slot_of.clone(), tables.routable.clone()))
    assert [int(slot_of[0, 1]) for slot_of, _ in seen] == list(range(2 * SENDINGS))
    assert all(torch.equal(routable, slot_of >= 0) for slot_of, routable in seen)
