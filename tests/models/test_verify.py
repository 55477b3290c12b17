"""Several rows of a lane in one step have the bits of as many steps, and rows taken back leave no trace (C5)."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.rows import ROWS
from tests.models.rig import GLM, GOLDEN, drafting_model
from tided.cache.context import Context
from tided.cache.pool import PAGE_TOKENS, physical_rows
from tided.models.runs import runs

WINDOW, WRONG = 32, 400


FAMILIES = pytest.mark.parametrize("path", [GOLDEN, GLM], ids=["deepseek", "glm"], scope="module")


@pytest.fixture(scope="module", params=["native", "fp32"])
def model(request, path) -> Any:
    return drafting_model(path, request.param)


@pytest.fixture(scope="module")
def native(path) -> Any:
    return drafting_model(path, "native")


def opened(model, prompts) -> list[Context]:
    lanes = [model.open_lane(i) for i in range(len(prompts))]
    for lane, ids in zip(lanes, prompts, strict=True):
        model.prefill(lane, ids, "none")
    return lanes


def closed(model, lanes) -> None:
    for lane in lanes:
        model.close_lane(lane)


def held(model, lane) -> dict[str, torch.Tensor]:
    """Everything that a later token can depend on."""
    found = dict(lane.parts()) | {"position": torch.tensor(lane.position), "pages": torch.tensor(len(lane.pages))}
    for source, rows in model.pool.rows.items():
        drafts = source == len(model.blocks)  # that layer's newest row waits for the next token
        ratio = 1 if drafts else getattr(model.blocks[source].attention, "ratio", 1)
        places = physical_rows(lane, ratio, torch.arange((lane.position - drafts) // ratio))
        found[f"rows.{source}"] = rows[places]
        if source in model.pool.keys:
            found[f"keys.{source}"] = model.pool.keys[source][places]
    return found


def same(one, other) -> list[str]:
    return [name for name in one.keys() | other.keys() if name not in one or not torch.equal(one[name], other[name])]


def one_by_one(model, lane, tokens) -> torch.Tensor:
    return torch.cat([model.decode([lane], torch.tensor([token])) for token in tokens])


@FAMILIES
@pytest.mark.parametrize("length", [3, WINDOW - 2, WINDOW, 60, 101, PAGE_TOKENS - 3])
def test_a_block_has_the_bits_of_its_steps(model, prompt, length):
    ids, block = prompt.repeat(2)[:length], [17, 300, 5, 5, 411, 90]
    (lane,) = opened(model, [ids])
    rows = model.decode([lane], torch.tensor(block), [6])
    model.keep(lane, 6)
    together = held(model, lane)
    closed(model, [lane])
    (lane,) = opened(model, [ids])
    assert torch.equal(one_by_one(model, lane, block), rows)
    assert same(held(model, lane), together) == []
    closed(model, [lane])


@FAMILIES
def test_lanes_of_different_width_do_not_touch_each_other(model, prompt):
    """A row, five and six in one step; more rows than are computed one by one are cut between lanes."""
    prompts, blocks = [prompt[:40], prompt, prompt[:3], prompt[20:90]], [[9], [8, 7, 6, 5, 4], [1] * 6, [2, 3, 4, 5]]
    lanes = opened(model, prompts)
    rows = model.decode(
        lanes, torch.tensor([token for block in blocks for token in block]), [len(block) for block in blocks]
    )
    after = []
    for lane, block in zip(lanes, blocks, strict=True):
        model.keep(lane, len(block))
        after.append(held(model, lane))
    closed(model, lanes)
    assert len(rows) == ROWS
    for i, (ids, block) in enumerate(zip(prompts, blocks, strict=True)):
        lane = model.open_lane(i)
        model.prefill(lane, ids, "none")
        first = sum(map(len, blocks[:i]))
        assert torch.equal(one_by_one(model, lane, block), rows[first : first + len(block)]), i
        assert same(held(model, lane), after[i]) == [], i
        model.close_lane(lane)


def test_runs_are_cut_between_lanes():
    assert list(runs([1] * 18)) == [slice(0, 16), slice(16, 18)]
    assert list(runs([6, 6, 6, 1])) == [slice(0, 2), slice(2, 4)]
    assert list(runs([6])) == [slice(0, 1)]


@FAMILIES
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.sampled_from([2, 5, WINDOW - 3, WINDOW + 1, 64, 101, PAGE_TOKENS - 4, PAGE_TOKENS - 1]),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5),
)
def test_whatever_is_accepted_the_lane_is_that_of_an_undrafted_run(native, prompt, length, steps):
    """`steps`: tokens drafted, and how many of them are right; the others are taken back."""
    truth = [int(token) for token in prompt.repeat(2)[length : length + 64]]
    ids = prompt.repeat(2)[:length]
    drafted, plain = opened(native, [ids, ids])
    done = 0
    for width, right in steps:
        right = min(width, right)
        block = [*truth[done : done + 1 + right], *[WRONG + i for i in range(width - right)]]
        rows = native.decode([drafted], torch.tensor(block), [len(block)])
        native.keep(drafted, 1 + right)
        assert torch.equal(rows[: 1 + right], one_by_one(native, plain, block[: 1 + right]))
        done += 1 + right
        assert same(held(native, plain), held(native, drafted)) == []
    anchors = torch.tensor([7])
    proposed = [
        native.propose([lane], anchors, lambda _, logits: logits.argmax(-1)).logits.clone() for lane in (drafted, plain)
    ]
    assert torch.equal(*proposed)
    native.check([drafted, plain])
    closed(native, [drafted, plain])


@FAMILIES
def test_pages_of_rejected_rows_go_back(native, prompt):
    (lane,) = opened(native, [prompt.repeat(2)[: PAGE_TOKENS - 1]])
    free = native.pool.free_tokens
    native.decode([lane], torch.tensor([5, 6, 7]), [3])
    assert native.pool.free_tokens == free - PAGE_TOKENS
    native.keep(lane, 1)
    assert native.pool.free_tokens == free
    native.check([lane])
    closed(native, [lane])
