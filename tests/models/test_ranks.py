"""The tensor-parallel split: any number of ranks computes what one does."""

from pathlib import Path

import pytest
import torch

from packers.shards import Checkpoint
from tests.models.random_checkpoint import golden_config, write_checkpoint
from tests.models.rig import GOLDEN, Threads, load_model
from tided.errors import ConfigError
from tided.models.families import family_of


def answers(path, ids, group=None, **model):
    """Prompt logits, then three decode rows."""
    loaded = load_model(path, group, **model)
    lane = loaded.open_lane(0)
    prefilled = loaded.prefill(lane, ids, "all")
    return torch.cat([prefilled, *[loaded.decode([lane], torch.tensor([token])) for token in (7, 8, 9)]])


def ranks_agree_with_one(path, ids, ranks):
    alone = answers(path, ids, numerics="fp32")
    each = Threads(ranks).run(lambda group: answers(path, ids, group, numerics="fp32"))
    for other in each[1:]:
        assert torch.equal(each[0], other)
    torch.testing.assert_close(each[0], alone, rtol=1e-4, atol=1e-4)


def test_two_ranks_on_the_golden_model(prompt, exact):
    ranks_agree_with_one(GOLDEN, prompt, 2)


def test_four_ranks(tmp_path, prompt):
    ranks_agree_with_one(write_checkpoint(tmp_path, golden_config(moe_intermediate_size=128)), prompt[:60], 4)


def test_two_ranks_with_native_rounding_hold_the_same_bits(prompt):
    """Ranks must agree to the bit with each other: routers and selections are computed on each."""
    first, second = Threads(2).run(lambda group: answers(GOLDEN, prompt, group))
    assert torch.equal(first, second)


def test_ranks_that_cannot_share_an_expert_are_refused():
    config = golden_config()
    with pytest.raises(ConfigError, match=r"64 cannot be cut over 4 ranks.*multiple of 32"):
        family_of(config).expert_record(Checkpoint(Path(), config, ()), 4)


def test_ranks_that_cannot_share_the_model_are_refused(tmp_path):
    config = golden_config(moe_intermediate_size=96)
    path = write_checkpoint(tmp_path, config)

    def load(group):
        return load_model(path, group)

    with pytest.raises(ConfigError, match=r"3 ranks cannot share num_attention_heads 8.*o_groups 4.*vocab_size 512"):
        Threads(3).run(load)
