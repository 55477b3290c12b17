"""C5 on the trained minis: one rank, two and four compute the same model, whole and with two thirds of the experts."""

import json

import pytest

from tests.e2e.conftest import ROOT
from tided.chat.deepseek_v41 import encode_prompt
from tided.chat.messages import Conversation, Message
from tided.chat.tokenizer import Tokenizer
from tided.engine import offline

MINI = ROOT / "minis/deepseek"
SAMPLES = json.loads((MINI / "samples.json").read_text())["samples"]
pytestmark = pytest.mark.xdist_group("ranks")


def sample(index):
    """The ids of a prompt and of its recorded greedy answer, and where the answer begins."""
    chosen = SAMPLES[index]
    messages = tuple(Message(role=m["role"], parts=(m["content"],)) for m in chosen["messages"])
    prompt = Tokenizer.open(MINI).encode(
        encode_prompt(Conversation(messages=messages, thinking=chosen["thinking"])).segments
    )
    return prompt + chosen["answer_ids"], len(prompt)


@pytest.fixture(scope="module")
def run(model):
    ids, kept = model.ids("Tell me about Japan.") + model.ids("How many legs does a spider have?"), {}

    def logits(ranks, resident, numerics):
        key = (ranks, resident, numerics)
        if key not in kept:
            given = {"ranks": ranks, "resident": resident, "numerics": numerics}
            kept[key] = offline.logits(model.path, ids, chunk=16, decode=4, **given)
        return kept[key]

    return logits


@pytest.mark.parametrize("kept", ["experts", "some"])
def test_ranks_agree(model, run, kept):
    """In fp32 nothing but the order of sums differs."""
    resident = getattr(model, kept)
    alone = run(1, resident, "fp32")
    for ranks in model.ranks:
        assert (run(ranks, resident, "fp32") - alone).abs().max() < 2e-3 * alone.std()


def test_ranks_agree_in_native_numerics(model, run):
    """Rounding turns a last bit into a step now and then; the choice of the next token stays."""
    alone, pair = run(1, model.experts, "native"), run(2, model.experts, "native")
    assert (pair - alone).square().mean().sqrt() < 0.1 * alone.std()
    assert (pair.argmax(-1) == alone.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("index", range(4))
def test_the_engine_gives_the_answers_recorded_at_training(index):
    """The checkpoint's samples come from another forward pass, the one that trained it."""
    ids, start = sample(index)
    logits = offline.logits(MINI, ids, ranks=1, resident=480, numerics="native", chunk=64)
    said = logits[start - 1 : -1].argmax(-1).tolist()
    agreed = sum(a == b for a, b in zip(said, ids[start:], strict=True))
    assert agreed >= 0.9 * len(said)
