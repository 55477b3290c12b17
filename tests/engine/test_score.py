"""Log probabilities of given tokens, against their meaning."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tided.engine.score import SCORED_ROWS, likeliest, logprobs, pieces
from tided.errors import PairError

VOCAB = 24
values = st.one_of(st.floats(-20, 20, width=32), st.sampled_from([0.0, 1.0]))  # ties are common
grids = st.lists(st.lists(values, min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=4).map(torch.tensor)


@settings(max_examples=80, deadline=None)
@given(grids, st.integers(1, VOCAB))
def test_the_likeliest_come_first_and_of_equals_the_lowest_id(logits, count):
    wanted = [sorted(range(VOCAB), key=lambda at, row=row: (-row[at], at))[:count] for row in logits.tolist()]
    assert likeliest(logits, count).tolist() == wanted


@settings(max_examples=60, deadline=None)
@given(grids, st.integers(0, VOCAB + 3), st.data())
def test_log_probabilities_are_of_the_whole_distribution(logits, most, data):
    ids = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=len(logits), max_size=len(logits)))
    told = logprobs(logits, ids, most)
    for row, token_id, one in zip(logits.double().tolist(), ids, told, strict=True):
        total = math.log(sum(math.exp(x) for x in row))
        assert one.token_id == token_id
        assert one.logprob == pytest.approx(row[token_id] - total, abs=1e-6)
        assert one.rank == 1 + sum(x > row[token_id] for x in row)
        assert [value for _, value in one.top] == pytest.approx([row[at] - total for at, _ in one.top], abs=1e-6)
        assert [at for at, _ in one.top] == sorted(range(VOCAB), key=lambda at, row=row: (-row[at], at))[:most]


def test_logits_of_few_rows_are_there_at_a_time():
    seen, rows = [], torch.randn(3 * SCORED_ROWS + 7, VOCAB)

    def head(part):
        seen.append(len(part))
        return part

    for count in (len(rows), len(rows) - 1, SCORED_ROWS, 1, 0):  # nothing follows a prompt's last row
        found = list(pieces(head, rows, count))
        assert [first for first, _ in found] == list(range(0, count, SCORED_ROWS))
        assert torch.equal(torch.cat([rows[:0], *(part for _, part in found)]), rows[:count])
    assert max(seen) == SCORED_ROWS


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_not_scored(value):
    logits = torch.zeros(2, VOCAB)
    logits[1, 3] = value
    with pytest.raises(PairError, match="no numbers"):
        logprobs(logits, [0, 0], 2)
