"""A decode row has the same bits alone and beside other lanes (contract C5)."""

import pytest
import torch

from kernels.rows import ROWS
from tests.models.random_checkpoint import golden_config, write_checkpoint
from tests.models.rig import load_model, settings
from tided.errors import UnavailableError


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """Sizes that are no multiple of what vector units take at once, and a wider hidden dimension."""
    config = golden_config(hidden_size=224, hc_mult=3, num_attention_heads=4, n_routed_experts=9, num_experts_per_tok=4)
    path = write_checkpoint(tmp_path_factory.mktemp("wide"), config)
    return load_model(path, config=settings(path, pool_tokens=8192))


def decoded(model, lanes, tokens):
    return torch.stack([model.decode(lanes, row) for row in tokens])


@pytest.mark.parametrize("name", ["native_model", "fp32_model", "wide_model"])
def test_company_changes_no_bit(request, prompt, name):
    model = request.getfixturevalue(name)
    prompts = [prompt[:3], prompt[:40], prompt[5:98], prompt[:33], prompt[60:]]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 500, (4, len(prompts)), generator=generator)

    def opened(which):
        lanes = [model.open_lane(i) for i in which]
        for lane, i in zip(lanes, which, strict=True):
            model.prefill(lane, prompts[i], "none")
        return lanes

    def closed(lanes):
        for lane in lanes:
            model.close_lane(lane)

    together = opened(range(5))
    rows = decoded(model, together, tokens)
    closed(together)
    for which in ([0], [1], [2], [3], [4], [3, 1], [4, 0, 2]):
        lanes = opened(which)
        assert torch.equal(decoded(model, lanes, tokens[:, which]), rows[:, which]), which
        closed(lanes)


def test_more_lanes_than_rows(wide_model, prompt):
    lanes = [wide_model.open_lane(i) for i in range(ROWS + 3)]
    tokens = torch.arange(3, 3 + len(lanes))
    together = wide_model.decode(lanes, tokens)
    for i in (0, ROWS - 1, ROWS, ROWS + 2):
        wide_model.close_lane(lanes[i])
        alone = wide_model.open_lane(i)
        assert torch.equal(wide_model.decode([alone], tokens[i : i + 1])[0], together[i])
        wide_model.close_lane(alone)


def test_a_pool_too_small_for_all_lanes_moves_none():
    """Also when the lanes do not fit one run of rows."""
    model = load_model(config=settings(pool_tokens=128 * (ROWS + 2)))
    lanes = [model.open_lane(i) for i in range(ROWS + 2)]
    model.prefill(lanes[-1], torch.arange(128) % 500, "none")
    with pytest.raises(UnavailableError):
        model.decode(lanes, torch.full((ROWS + 2,), 5))
    assert [lane.position for lane in lanes] == [0] * (ROWS + 1) + [128]
