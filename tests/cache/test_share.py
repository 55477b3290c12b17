"""A context that ranks share: every token is one rank's, and found again where it lies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tided.cache.share import ALONE, Share


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 700))
def test_every_token_is_one_ranks(ranks, tokens):
    shares = [Share(rank, ranks) for rank in range(ranks)]
    positions = torch.arange(tokens)
    assert sum(share.owns(positions).int() for share in shares).tolist() == [1] * tokens
    for share in shares:
        own = positions[share.owns(positions)]
        assert share.count(tokens) == len(own) <= share.most(tokens)
        assert share.numbers(own).tolist() == list(range(len(own)))
        assert torch.equal(share.positions(share.numbers(own)), own)
    assert max(share.count(tokens) for share in shares) == shares[0].most(tokens)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_rank_alone_has_all(tokens):
    positions = torch.arange(tokens)
    assert (ALONE.count(tokens), ALONE.owns(positions).tolist()) == (tokens, [True] * tokens)
