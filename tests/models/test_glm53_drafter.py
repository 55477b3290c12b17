"""GLM-5.3's drafter against an independent reference: states after the last norm, embedding half first."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from tests.models.rig import load_model, settings
from tests.models.test_glm53_golden import GOLDEN, LOGITS, PROMPT


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "golden_mtp.safetensors")


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return load_file(GOLDEN / "golden_main.safetensors")["tokens"].long()


def with_drafter(path: Path, draft: str = "acceptance"):
    base = settings(path, numerics="fp32")
    return load_model(path, config=replace(base, engine=replace(base.engine, draft=draft)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The reference chooses anew at each token of a chain."""
    path = tmp_path_factory.mktemp("glm")
    config = json.loads((GOLDEN / "config.json").read_text("utf-8")) | {"index_share_for_mtp_iteration": False}
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    shutil.copyfile(GOLDEN / "model.safetensors", path / "model.safetensors")
    return with_drafter(path, "5")


def first_logits(model, lane, anchor: Tensor) -> Tensor:
    return model.propose([lane], anchor.view(1), lambda place, logits: logits.argmax(1)).logits[0, 0]


def test_every_token_that_follows_a_known_one(model, golden, tokens):
    """Steps 200 to 211, one at a time, each with the trunk's own state."""
    lane = model.open_lane(0)
    model.prefill(lane, tokens[:PROMPT], "none")
    model.decode([lane], tokens[PROMPT : PROMPT + 1])
    for i, wanted in enumerate(golden["hf.decode.logits"]):
        after = tokens[PROMPT + 1 + i]
        torch.testing.assert_close(first_logits(model, lane, after), wanted, rtol=0, atol=LOGITS)
        model.decode([lane], after.view(1))
    model.close_lane(lane)


@pytest.mark.parametrize("chunk", [PROMPT, 64, 7])
def test_a_chain(model, golden, tokens, chunk):
    lane = model.open_lane(0)
    for i in range(0, PROMPT, chunk):
        model.prefill(lane, tokens[i : min(i + chunk, PROMPT)], "none")
    draft = model.propose([lane], tokens[PROMPT : PROMPT + 1], lambda place, logits: logits.argmax(1))
    assert torch.equal(draft.ids[0, :4], golden["hf.draft_post.tokens"].long())
    torch.testing.assert_close(draft.logits[0, :4], golden["hf.draft_post.logits"], rtol=0, atol=LOGITS)
    model.close_lane(lane)


@pytest.fixture(scope="module")
def sharing():
    """As released: what the first token of a chain chose serves the later ones."""
    return with_drafter(GOLDEN)


def greedy(_: int, logits: Tensor) -> Tensor:
    return logits.argmax(1)


def test_the_size_of_a_chain_is_what_is_asked_for():
    model = with_drafter(GOLDEN, "2")
    lane = model.open_lane(0)
    model.prefill(lane, torch.arange(20), "none")
    assert model.draft_tokens == model.propose([lane], torch.tensor([3]), greedy).ids.shape[1] == 2


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_after_a_block_the_states_are_those_of_what_stayed(sharing, tokens, kept):
    """Four rows at once of which some stay, and as many one by one: the same proposal to the bit."""
    block, lanes = tokens[PROMPT : PROMPT + 4], [sharing.open_lane(index) for index in range(2)]
    for lane in lanes:
        sharing.prefill(lane, tokens[:PROMPT], "none")
    sharing.decode([lanes[0]], block, [4])
    sharing.keep(lanes[0], kept)
    for token in block[:kept]:
        sharing.decode([lanes[1]], token.view(1))
    after = tokens[PROMPT + kept : PROMPT + kept + 1]
    drafted = sharing.propose([lanes[0]], after, greedy)
    together, sure = drafted.logits.clone(), drafted.confidence.clone()
    single = sharing.propose([lanes[1]], after, greedy)
    assert torch.equal(together, single.logits)
    assert torch.equal(sure, single.confidence)
    for lane in lanes:
        sharing.close_lane(lane)


def test_a_chain_attends_to_the_first_choice_and_to_itself(sharing, tokens, monkeypatch):
    """Past what an index can choose: every later token sees the rows that the first one chose, and all before it."""
    drafter, seen = sharing.drafter, []
    real = type(drafter.block.attention).over
    lane = sharing.open_lane(0)
    sharing.prefill(lane, tokens[:PROMPT], "none")

    def watch(self, query, rows, valid):
        if self.layer == drafter.block.layer:
            seen.append(rows[0].clone())
        return real(self, query, rows, valid)

    monkeypatch.setattr(type(drafter.block.attention), "over", watch)
    sharing.propose([lane], tokens[PROMPT : PROMPT + 1], greedy)
    first, second, third, *_ = seen
    top_k = drafter.block.attention.indexer.top_k
    assert PROMPT > top_k >= len(first) - 1
    old = first[:-1]  # the cache's; behind them the chain's own
    assert torch.equal(second[: len(old)], old)
    assert torch.equal(third[: len(second)], second)
    assert [len(rows) - len(old) for rows in seen] == [1, 2, 3, 4, 5, 6, 7]
    assert not torch.equal(second[-1], second[-2])
    sharing.close_lane(lane)


def test_confidence_is_the_logit_of_each_token_by_itself(sharing, tokens):
    lane = sharing.open_lane(0)
    sharing.prefill(lane, tokens[:PROMPT], "none")
    draft = sharing.propose([lane], tokens[PROMPT : PROMPT + 1], greedy)
    wanted = torch.softmax(draft.logits, -1).gather(2, draft.ids.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(torch.sigmoid(draft.confidence), wanted, rtol=1e-4, atol=1e-6)
    sharing.close_lane(lane)


@pytest.mark.parametrize("places", [1, 3])
def test_a_chain_is_no_longer_than_is_asked_for(sharing, tokens, places):
    """And the tokens of a short one are the first of a long one."""
    lane = sharing.open_lane(0)
    sharing.prefill(lane, tokens[:PROMPT], "none")
    anchor = tokens[PROMPT : PROMPT + 1]
    short, whole = sharing.propose([lane], anchor, greedy, places), sharing.propose([lane], anchor, greedy)
    assert (short.ids.shape[1], whole.ids.shape[1]) == (places, 7)
    assert torch.equal(short.ids, whole.ids[:, :places])
    sharing.close_lane(lane)
