"""Attention, its rotations and its selections, against the plain formula."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import latent_attention
from kernels.compressor import pool_groups
from kernels.indexer import best, candidate_blocks, index_scores, limit_to_blocks_
from kernels.numerics import FP32, NATIVE
from kernels.rope import Yarn, frequencies, rotate_, rotation


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_attention_is_a_softmax_with_a_sink():
    q, rows, sink = randn(2, 3, 8), randn(2, 5, 8, seed=1), randn(3, seed=2)
    valid = torch.tensor([[True] * 5, [True, False, True, True, False]])
    got = latent_attention(q, rows, valid, sink, 0.5, FP32.probability)
    for t in range(2):
        for h in range(3):
            kept = rows[t][valid[t]]
            logits = torch.cat([kept @ q[t, h] * 0.5, sink[h : h + 1]])
            torch.testing.assert_close(got[t, h], torch.softmax(logits, 0)[:-1] @ kept)


def test_masked_rows_count_for_nothing():
    q, rows, sink = randn(1, 3, 8), randn(1, 5, 8, seed=1), randn(3, seed=2)
    valid = torch.tensor([[True, True, False, True, True]])
    got = latent_attention(q, rows, valid, sink, 0.5, FP32.probability)
    rows[0, 2] = 1e6
    assert torch.equal(latent_attention(q, rows, valid, sink, 0.5, FP32.probability), got)


def test_native_rounds_probabilities_not_their_sum():
    q, sink = torch.zeros(1, 1, 2), torch.full((1,), -math.inf)
    q[0, 0, 0] = 1
    rows = torch.tensor([[[0.0, 1.0], [-0.3, 2.0]]])
    p = torch.tensor(math.exp(-0.3))
    expected = (1 + 2 * p.bfloat16().float()) / (1 + p)
    got = latent_attention(q, rows, None, sink, 1.0, NATIVE.probability)
    torch.testing.assert_close(got[0, 0, 1], expected)


def test_plain_frequencies_and_the_rotation():
    freqs = frequencies(8, 10000.0, None)
    torch.testing.assert_close(freqs, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    x = randn(3, 2, 10)
    turned = rotate_(x.clone(), rotation(torch.tensor([0, 7, 300]), freqs))
    assert torch.equal(turned[..., :2], x[..., :2])
    assert torch.equal(turned[0], x[0])
    for i, f in enumerate([1.0, 0.1, 0.01, 0.001]):
        a, b = x[1, 0, 2 + 2 * i], x[1, 0, 3 + 2 * i]
        c, s = math.cos(7 * f), math.sin(7 * f)
        torch.testing.assert_close(turned[1, 0, 2 + 2 * i : 4 + 2 * i], torch.stack([a * c - b * s, a * s + b * c]))


def test_released_yarn_ramp():
    """Dimensions below 15 turn as they did, those from 25 on sixteen times slower."""
    plain, scaled = frequencies(64, 160000.0, None), frequencies(64, 160000.0, Yarn(16, 32, 1, 65536))
    ratio = scaled / plain
    assert torch.equal(ratio[:16], torch.ones(16))
    torch.testing.assert_close(ratio[25:], torch.full((7,), 1 / 16))
    torch.testing.assert_close(ratio[20], torch.tensor(0.5 + 0.5 / 16))


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_the_conjugate_rotates_back(rows):
    x = randn(rows, 3, 12)
    turn = rotation(torch.arange(rows) * 11, frequencies(8, 10000.0, None))
    torch.testing.assert_close(rotate_(rotate_(x.clone(), turn), turn.conj()), x)


def test_pooling_weighs_per_channel():
    rows, gates = randn(2, 2, 4), randn(2, 2, 4, seed=1)
    got = pool_groups(rows, gates)
    for g in range(2):
        for c in range(4):
            w = torch.sigmoid(gates[g, 0, c] - gates[g, 1, c])
            torch.testing.assert_close(got[g, c], w * rows[g, 0, c] + (1 - w) * rows[g, 1, c])


def test_index_scores():
    query, weight, keys = randn(4, 3, 8), randn(4, 3, seed=1), randn(6, 8, seed=2)
    expected = torch.einsum("th,thn->tn", weight, torch.relu(torch.einsum("thd,nd->thn", query, keys)))
    torch.testing.assert_close(index_scores(query, weight, keys), expected)


@given(st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=12), st.data())
@settings(deadline=None)
def test_the_best_entries_with_ties_to_the_lower_index(scores, data):
    count = data.draw(st.integers(1, len(scores)))
    indices, visible = best(torch.tensor([scores]), count)
    expected = sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])
    assert indices[0].tolist() == expected
    assert visible[0].tolist() == [scores[i] > -math.inf for i in expected]


def test_candidate_blocks():
    """Of blocks of two, the best by their best entry; the newest visible entry's always; never one that is not seen."""
    score = torch.tensor([[5.0, 0, 9, 1, 7, 7, 2, -math.inf, -math.inf]])
    assert candidate_blocks(score, torch.tensor([7]), 2, 2).tolist() == [[1, 3]]
    assert candidate_blocks(score, torch.tensor([7]), 5, 2).tolist() == [[0, 1, 2, 3, 3]]


def test_scores_outside_the_kept_blocks():
    score = torch.arange(5.0).repeat(2, 1)
    limit_to_blocks_(score, torch.tensor([[0, 2], [1, 1]], dtype=torch.int32), 2)
    inf = math.inf
    assert score.tolist() == [[0, 1, -inf, -inf, 4], [-inf, -inf, 2, 3, -inf]]
