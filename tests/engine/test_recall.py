"""Rank 0's questions to the ranks about what they can read back, without an engine."""

import pytest
from engine_fakes import request

from tided.control.messages import Recalled, Restore
from tided.engine.recall import Candidate, Recalls
from tided.errors import PairError

HELD = [Candidate(24, "c"), Candidate(16, "b"), Candidate(8, "a")]
ASKED = request("asked")


def two() -> Recalls:
    recalls = Recalls(2, lambda _: HELD)
    assert recalls.find(ASKED) is None
    return recalls


def test_what_all_have_read_is_restored():
    recalls = two()
    ((recall,), forget) = recalls.take()
    assert (recall.keys, forget) == (["c", "b", "a"], [])
    recalls.heard(Recalled(0, recall.ticket, [0, 1, 2], 0))
    assert recalls.find(ASKED) is None
    recalls.heard(Recalled(1, recall.ticket, [0, 1], 0))
    assert recalls.find(ASKED).restore == Restore(recall.ticket, 24)
    assert recalls.pending == 0


def differing(recalls: Recalls) -> None:
    ((recall,), _) = recalls.take()
    recalls.heard(Recalled(0, recall.ticket, [0, 1, 2], 0))
    recalls.heard(Recalled(1, recall.ticket, [1, 2], 1))


def test_where_the_ranks_differ_the_longest_that_all_hold_is_asked_for():
    recalls = two()
    differing(recalls)
    ((recall,), forget) = recalls.take()
    assert (recall.keys, forget) == (["b"], [recall.ticket - 1])


def test_what_no_step_has_asked_for_is_given_up_without_a_word():
    """The set changes, and strict snapshots with it, when the second question waits for a step: a step that asks and
    forgets at once would have every rank keep what nobody fetches."""
    recalls = two()
    differing(recalls)
    recalls.renew()
    begin, forget = recalls.take()
    assert (begin, forget) == ([], [1])
    recalls.check({"asked"}, ())


@pytest.mark.parametrize("told", [False, True])
def test_a_request_that_is_gone_leaves_nothing(told):
    recalls = two()
    ((recall,), _) = recalls.take()
    if told:
        for rank in (0, 1):
            recalls.heard(Recalled(rank, recall.ticket, [0], 0))
    with pytest.raises(PairError, match="does not wait"):
        recalls.check((), ())
    recalls.drop(ASKED)
    recalls.check((), ())
    assert recalls.take() == ([], [recall.ticket])
    recalls.heard(Recalled(1, recall.ticket, [0], 0))  # late, and for nobody
    assert recalls.pending == 0


def test_a_lane_of_which_one_rank_lost_the_context_is_not_back():
    recalls = Recalls(2)
    assert recalls.is_back(3) is None
    ((recall,), _) = recalls.take()
    recalls.heard(Recalled(0, recall.ticket, [0], 0))
    assert recalls.is_back(3) is None
    recalls.heard(Recalled(1, recall.ticket, [], -1))
    assert recalls.is_back(3) is False
    recalls.left(3)
    recalls.check((), ())
