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


def with_drafter(path: Path):
    base = settings(path, numerics="fp32")
    return load_model(path, config=replace(base, engine=replace(base.engine, draft="acceptance")))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The reference chooses anew at each token of a chain."""
    path = tmp_path_factory.mktemp("glm")
    config = json.loads((GOLDEN / "config.json").read_text("utf-8")) | {"index_share_for_mtp_iteration": False}
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    shutil.copyfile(GOLDEN / "model.safetensors", path / "model.safetensors")
    return with_drafter(path)


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
