"""Demand is what the router wanted, by lane; warm-up forwards do not count."""

import torch

from tided.experts.tables import DemandTap, RoutingTables

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
    torch.testing.assert_close(tap.totals, torch.tensor([[2, 0, 1, 0], [4, 1, 2, 0.6]], dtype=torch.float64))


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
