"""What a request asks of its logits: bias, penalties, bans, a grammar's mask."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tided.engine.logits import BANNED, shaped
from tided.engine.sampling import sample
from tided.engine.types import Request, Sampling

VOCAB = 40
tokens = st.integers(0, VOCAB - 1)
rows = st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB).map(torch.tensor)


def request(prompt=(1,), **fields) -> Request:
    own = {name: fields.pop(name) for name in ("min_tokens", "stop_ids") if name in fields}
    return Request(
        request_id="r",
        prompt_ids=list(prompt),
        sampling=Sampling(**fields),
        max_tokens=8,
        **{"stop_ids": (0,), **own},
    )


def bits(ids) -> bytes:
    flags = np.zeros(VOCAB, dtype=np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").tobytes()


@settings(max_examples=60, deadline=None)
@given(rows, st.lists(tokens, max_size=12), st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_are_subtracted_by_the_answer_s_counts(row, drawn, presence, frequency):
    asked = request(prompt=[5, 6, 7], presence_penalty=presence, frequency_penalty=frequency)
    before, got = row.clone(), shaped(row, asked, drawn, len(drawn), None)
    counts = Counter(drawn)
    expected = [x - counts[i] * frequency - (counts[i] > 0) * presence for i, x in enumerate(row.tolist())]
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-4, rtol=1e-5)
    assert torch.equal(row, before), "the model's own logits stay"


@settings(max_examples=60, deadline=None)
@given(rows, st.lists(tokens, min_size=1), st.lists(tokens), st.floats(0.1, 2))
def test_repetition_scales_what_prompt_and_answer_hold_once_however_often(row, prompt, drawn, penalty):
    got = shaped(row, request(prompt=prompt, repetition_penalty=penalty), drawn, len(drawn), None)
    seen = {*prompt, *drawn}
    expected = [(x / penalty if x > 0 else x * penalty) if i in seen else x for i, x in enumerate(row.tolist())]
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-4, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(rows, st.dictionaries(tokens, st.floats(-99, 100, width=32), max_size=6))
def test_bias_is_added(row, bias):
    got = shaped(row, request(logit_bias=bias), [], 0, None)
    expected = torch.tensor([x + bias.get(i, 0) for i, x in enumerate(row.tolist())])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_bias_of_minus_100_is_a_ban_whatever_the_logit(temperature):
    row = torch.full((VOCAB,), -500.0)
    row[3], row[4] = 500.0, 100.0
    asked = request(logit_bias={3: -100.0}, temperature=temperature, top_p=1.0)
    got = shaped(row, asked, [], 0, None)
    assert sample(got[None], [(asked.sampling, 0)]) == [4]


def test_bias_is_added_before_the_filters():
    """A token that top-k alone would drop is drawn for its bias."""
    row = torch.arange(VOCAB, dtype=torch.float32)
    asked = request(logit_bias={2: 90.0}, top_k=1)
    assert sample(shaped(row, asked, [], 0, None)[None], [(asked.sampling, 0)]) == [2]


@settings(max_examples=40, deadline=None)
@given(rows, st.sets(tokens, min_size=1), st.integers(0, 2**63))
def test_only_what_the_mask_allows_is_drawn(row, ids, seed):
    asked = request(temperature=1.5, top_p=1.0, seed=seed, logit_bias=dict.fromkeys(range(0, VOCAB, 3), 100.0))
    got = shaped(row, asked, [], 0, bits(ids))
    assert sample(got[None], [(asked.sampling, 9)])[0] in ids
    assert {i for i, x in enumerate(got.tolist()) if x > BANNED} == ids


def test_a_mask_that_is_shorter_than_the_vocabulary_allows_nothing_beyond_its_end():
    got = shaped(torch.zeros(VOCAB), request(), [], 0, b"\x06")
    assert (got > BANNED).nonzero().squeeze(1).tolist() == [1, 2]


def test_no_stop_id_is_drawn_before_min_tokens():
    row = torch.zeros(VOCAB)
    row[0], row[7] = 50.0, 40.0
    asked = request(min_tokens=2, stop_ids=(0, 7), temperature=0.0)
    before, after = (shaped(row, asked, [], drawn, None) for drawn in (1, 2))
    assert sample(before[None], [(asked.sampling, 0)])[0] not in (0, 7)
    assert sample(after[None], [(asked.sampling, 0)]) == [0]


def test_a_plain_request_s_row_is_not_copied():
    row = torch.zeros(VOCAB)
    assert shaped(row, request(), [], 3, None) is row


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.1}, {"frequency_penalty": -1.0}, {"repetition_penalty": 1.1}, {"logit_bias": {1: 1.0}},
        {"min_tokens": 1},
    ],
)  # fmt: skip
def test_what_changes_from_draw_to_draw_is_not_drafted(fields):
    assert request().may_draft
    assert not request(**fields).may_draft
