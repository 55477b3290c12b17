"""The drafter against an independent reference: what it proposes after a prompt and after every decode step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from packers.shards import Checkpoint
from tests.models.rig import CPU, GOLDEN, Threads, load_model
from tided.models.base import Draft
from tided.models.deepseek_v41.load import with_drafter
from tided.models.parallel import Group

STEPS = 10


def drafting(group: Group | None = None, **model: Any) -> Any:
    return with_drafter(load_model(group=group, **model), Checkpoint.open(GOLDEN), CPU)


@pytest.fixture(scope="module")
def model() -> Any:
    return drafting(numerics="fp32")


def likeliest(place: int, logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def proposed(model: Any, lane: Any, anchor: int) -> Draft:
    return model.propose([lane], torch.tensor([anchor]), likeliest)


def check(got: Draft, anchor: int, exact: dict[str, Tensor], name: str, tolerance: float = 1e-4) -> None:
    assert [anchor, *got.ids[0].tolist()] == exact[f"{name}.output_ids"].tolist()
    torch.testing.assert_close(got.logits[0], exact[f"{name}.logits"], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.confidence[0], exact[f"{name}.confidence"], rtol=tolerance, atol=tolerance)


def test_drafts_after_a_prompt_and_every_step(model, prompt, inputs, exact, forced_tie):
    lane = model.open_lane(0)
    model.prefill(lane, prompt, "none")
    greedy = inputs["greedy_output_ids"]
    check(proposed(model, lane, greedy[0]), greedy[0], exact, "draft.prefill")
    for step, token in enumerate(inputs["decode_input_ids"]):
        model.decode([lane], torch.tensor([token]))
        if f"draft.{step}.logits" in exact:
            check(proposed(model, lane, greedy[step + 1]), greedy[step + 1], exact, f"draft.{step}", 3e-4)
    model.close_lane(lane)


def test_a_prompt_in_chunks_gives_the_same_drafts(model, prompt, inputs, exact, forced_tie):
    lane, anchor = model.open_lane(0), inputs["greedy_output_ids"][0]
    for chunk in prompt.split(7):
        model.prefill(lane, chunk, "none")
    check(proposed(model, lane, anchor), anchor, exact, "draft.prefill", 3e-4)
    model.close_lane(lane)


def test_a_proposal_leaves_no_trace_and_lanes_do_not_touch_each_other(model, prompt, inputs):
    one, other = model.open_lane(0), model.open_lane(1)
    model.prefill(one, prompt, "none")
    model.prefill(other, prompt[:40], "none")
    before = {name: part.clone() for name, part in one.parts().items()}
    anchors = torch.tensor([inputs["greedy_output_ids"][0], 7])
    both = model.propose([one, other], anchors, likeliest)
    for lane, row in ((one, 0), (other, 1)):
        alone = model.propose([lane], anchors[row : row + 1], likeliest)
        torch.testing.assert_close(alone.logits[0], both.logits[row], rtol=0, atol=1e-3)  # as guesses are computed
        torch.testing.assert_close(alone.confidence[0], both.confidence[row], rtol=0, atol=1e-3)
    assert all(torch.equal(part, before[name]) for name, part in one.parts().items())
    assert one.position == len(prompt)
    model.close_lane(one)
    model.close_lane(other)


def test_the_chosen_token_decides_the_next_place(model, prompt, inputs):
    lane, anchor = model.open_lane(0), inputs["greedy_output_ids"][0]
    model.prefill(lane, prompt, "none")
    plain = proposed(model, lane, anchor)
    other = model.propose([lane], torch.tensor([anchor]), lambda place, logits: logits.argmin(-1))
    assert torch.equal(plain.logits[:, 0], other.logits[:, 0])
    assert not torch.equal(plain.logits[:, 1], other.logits[:, 1])
    model.close_lane(lane)


def test_nobody_s_demand(model, prompt, inputs):
    lane = model.open_lane(0)
    model.prefill(lane, prompt, "none")
    tap = model.blocks[0].moe.bank.tap
    before = tap.counts.clone()
    proposed(model, lane, inputs["greedy_output_ids"][0])
    assert torch.equal(before, tap.counts)
    model.close_lane(lane)


def test_two_ranks_propose_the_same(model, prompt, inputs):
    anchor = inputs["greedy_output_ids"][0]

    def run(group: Group) -> Draft:
        made = drafting(group, numerics="fp32")
        lane = made.open_lane(0)
        made.prefill(lane, prompt, "none")
        return proposed(made, lane, anchor)

    one, two = Threads(2).run(run)
    lane = model.open_lane(0)
    model.prefill(lane, prompt, "none")
    whole = proposed(model, lane, anchor)
    assert torch.equal(one.logits, two.logits)
    assert torch.equal(one.ids, whole.ids)
    torch.testing.assert_close(one.logits, whole.logits, rtol=1e-4, atol=1e-4)
    model.close_lane(lane)


def test_bounded_replay_leaves_the_drafter_the_window_it_needs(prompt, exact):
    made = drafting(numerics="fp32", decoder_replay="bounded")
    lane = made.open_lane(0)
    made.prefill(lane, prompt, "none")
    anchor = int(exact["bounded.draft.output_ids"][0])
    check(proposed(made, lane, anchor), anchor, exact, "bounded.draft")
