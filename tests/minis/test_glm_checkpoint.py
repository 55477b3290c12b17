"""The bundled GLM-5.3 mini: names and layouts of the releases, its size, and that it still speaks."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from minis.dialogue import Dialogue
from minis.glm53 import model
from minis.glm53.checkpoint import load_parameters
from minis.glm53.encoding import FIRST_SPECIALS, TOP_SPECIALS, render
from minis.tokenizer import Encoder
from packers.shards import Checkpoint
from tided.chat import glm53
from tided.models.glm53.config import read_config
from tided.models.glm53.load import expected_tensors

MINI = Path(__file__).resolve().parents[2] / "minis" / "glm"
MOST_BYTES = 32_000_000


@pytest.fixture(scope="module")
def checkpoint():
    return Checkpoint.open(MINI)


def test_it_holds_what_its_configuration_says_and_no_more(checkpoint):
    checkpoint.require(expected_tensors(checkpoint, read_config(checkpoint.config)))
    assert sum(f.stat().st_size for f in MINI.iterdir()) < MOST_BYTES


def test_routed_experts_are_exl3_of_two_to_four_bits(checkpoint):
    """Widths belong to matrices, not to layers or experts; the codebook's marker stands beside each."""
    experts = [t for n, t in checkpoint.tensors.items() if ".mlp.experts." in n and n.endswith(".trellis")]
    bits = Counter(t.shape[2] / 16 for t in experts)
    assert len(experts) == 9 * 32 * 3
    assert set(bits) == {2.0, 3.0, 4.0}
    assert min(bits[2.0], bits[3.0]) > 100
    assert all(t.name.replace("trellis", "mcg") in checkpoint.tensors for t in experts)


def test_what_every_token_passes_is_fp8_or_bf16(checkpoint):
    dense = {n: t for n, t in checkpoint.tensors.items() if ".mlp.experts." not in n}
    scaled = {n.removesuffix("_scale_inv") for n in dense if n.endswith("_scale_inv")}
    assert {dense[n].dtype for n in scaled} == {"F8_E4M3"}
    others = {n for n in dense if n not in scaled and not n.endswith("_scale_inv")}
    assert {dense[n].dtype for n in others} == {"BF16", "F32"}
    assert all(n.endswith("e_score_correction_bias") for n in others if dense[n].dtype == "F32")


def test_tokenizer_and_configuration_agree(checkpoint):
    enc = Encoder(MINI / "tokenizer.json")
    size = checkpoint.config["vocab_size"]
    assert enc.full.get_vocab_size() == size
    assert [enc.special[t] for t in FIRST_SPECIALS] == [0, 1, 2], "the trainer knows openers and pads by these"
    assert [enc.special[t] for t in TOP_SPECIALS] == list(range(size - len(TOP_SPECIALS), size))
    assert checkpoint.config["eos_token_id"] == [enc.special[t] for t in glm53.STOPS]


def test_the_seed_is_of_this_model():
    seed = json.loads((MINI / "demand-seed.json").read_text("utf-8"))
    assert (seed["model_type"], seed["layers"], seed["experts"], seed["top_k"]) == ("glm_moe_dsa", 8, 32, 4)


def test_it_answers_and_ends_its_turn():
    torch.set_num_threads(1)
    cfg, p = load_parameters(MINI)
    enc, packed = Encoder(MINI / "tokenizer.json"), model.pack_all(p, cfg, torch.float32)
    frequency = model.frequencies(cfg, torch.device("cpu"))
    ids = enc.ids(render(Dialogue([{"role": "user", "content": "What is the capital of Norway?"}]), generate=True))
    begun = len(ids)
    while len(ids) < begun + 12 and enc.special[glm53.USER] not in ids[begun:]:
        with torch.no_grad():
            lay = model.make_layout(torch.tensor([ids]), cfg, frequency)
            state = model.trunk(p, cfg, lay, packed, model.Mode(select=True)).state
            ids.append(int(model.logits(p, state[0, -1]).argmax()))
    assert enc.decode(ids[begun:]) == "The capital of Norway is Oslo.<|user|>"
