"""Attention over rows that ranks hold parts of: joined, it is attention over all of them."""

import pytest
import torch

from kernels.attention import latent_attention
from kernels.indexer import best, merged
from kernels.numerics import FP32
from kernels.partial_attention import gathered_parts, joined, partial_attention

LATENT, WIDTH, SCALE = 8, 12, 0.3
EXACT = FP32.probability


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(q, rows, valid=None):
    return latent_attention(q, rows, valid, torch.full((q.shape[1],), -torch.inf), SCALE, EXACT)[..., :LATENT]


def part(q, rows, valid=None):
    return partial_attention(q, rows, valid, SCALE, LATENT, EXACT)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_parts_joined_are_the_whole(ranks):
    q, rows = randn(3, 2, WIDTH), randn(3, 11, WIDTH, seed=1) * 5
    parts = torch.stack([part(q, rows[:, rank::ranks]) for rank in range(ranks)], 1)
    torch.testing.assert_close(joined(parts), whole(q, rows), rtol=1e-5, atol=1e-5)


def test_parts_of_one_rank_are_a_part_again():
    q, rows, valid = randn(3, 2, WIDTH), randn(3, 11, WIDTH, seed=1) * 5, torch.arange(11).expand(3, -1) < 0
    for seen in (None, valid):  # an empty part adds nothing to the other
        parts = torch.stack([part(q, rows[:, :7], None if seen is None else seen[:, :7]), part(q, rows[:, 7:])], 1)
        wanted = part(q, rows if seen is None else rows[:, 7:])
        torch.testing.assert_close(gathered_parts(parts), wanted, rtol=1e-5, atol=1e-5)


def test_a_rank_without_any_row_adds_nothing():
    q, rows = randn(2, 3, WIDTH), randn(2, 4, WIDTH, seed=1)
    nothing = part(q, rows[:, :0])
    hidden = part(q, rows, torch.zeros(2, 4, dtype=torch.bool))
    for empty in (nothing, hidden):
        assert torch.equal(joined(torch.stack([part(q, rows), empty], 1)), joined(part(q, rows).unsqueeze(1)))
        assert torch.equal(joined(torch.stack([empty, part(q, rows)], 1)), joined(part(q, rows).unsqueeze(1)))


def test_rows_that_a_query_does_not_see_count_for_nothing():
    q, rows = randn(2, 3, WIDTH), randn(2, 6, WIDTH, seed=1)
    valid = torch.tensor([[True, False, True, False, False, True], [False, False, False, True, True, True]])
    parts = torch.stack([part(q, rows[:, rank::2], valid[:, rank::2]) for rank in range(2)], 1)
    torch.testing.assert_close(joined(parts), whole(q, rows, valid), rtol=1e-5, atol=1e-5)


def test_scores_that_no_exponential_holds():
    q, rows = randn(1, 2, WIDTH) * 100, randn(1, 8, WIDTH, seed=1) * 100
    parts = torch.stack([part(q, rows[:, :3]), part(q, rows[:, 3:])], 1)
    torch.testing.assert_close(joined(parts), whole(q, rows), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_best_of_the_best_are_the_best(ranks):
    """Ties included, also across ranks, and queries that see fewer than are chosen."""
    score = torch.randint(0, 4, (50, 40), generator=torch.Generator().manual_seed(2)).float()
    score[torch.arange(40) > 3 * torch.arange(50).unsqueeze(1)] = -torch.inf
    found = []
    for rank in range(ranks):
        own = torch.arange(40)[rank::ranks]
        numbers, visible = best(score[:, own], min(9, len(own)))
        found.append((score[:, own].gather(1, numbers).masked_fill(~visible, -torch.inf), own[numbers]))
    scores, positions = merged(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)), 9)
    wanted, visible = best(score, 9)
    assert torch.equal(scores > -torch.inf, visible)
    assert torch.equal(positions[visible], wanted[visible])
