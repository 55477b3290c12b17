"""The trainer of the GLM-5.3 mini: its forward pass against the reference and the engine, its format, its chains."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minis.corpus import codechat, facts, lang, story, sums, tools
from minis.corpus.words import Words
from minis.data import DOMAINS, Rows
from minis.dialogue import PROMPT_WEIGHT, Dialogue
from minis.glm53 import joined, model, mtp
from minis.glm53.checkpoint import dense_tensors, load_parameters, mxfp4_experts, write_checkpoint
from minis.glm53.config import mini_config
from minis.glm53.encoding import FIRST_SPECIALS, TOP_SPECIALS, conversation, render
from minis.glm53.init import fresh
from minis.glm53.quantise import LADDER, Statistics, widths
from minis.optim import frozen, use_muon
from tests.models.rig import load_model, settings
from tided.chat import glm53
from tided.models.glm53.config import read_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "glm53"
golden_only = pytest.mark.skipif(not (GOLDEN / "golden_main.safetensors").exists(), reason="golden vectors missing")
LOGITS = 2e-4
SPECIALS = {token: i for i, token in enumerate(FIRST_SPECIALS + TOP_SPECIALS)}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def forward(cfg, p, tokens, mode):
    lay = model.make_layout(tokens.view(1, -1), cfg, model.frequencies(cfg, tokens.device))
    lay = replace(lay, start=torch.zeros_like(lay.start)) if not bool((lay.start == 0).all()) else lay
    packed = model.pack_all(p, cfg, torch.float32)
    return lay, packed, model.trunk(p, cfg, lay, packed, mode)


@pytest.fixture(scope="module")
def golden():
    return load_parameters(GOLDEN), load_file(GOLDEN / "golden_main.safetensors")


@golden_only
def test_the_trunk_is_the_references(golden):
    (cfg, p), want = golden
    taps = {}
    tokens = want["tokens"].long() + 0
    assert not (tokens == 0).any(), "a zero would open a document"
    with torch.no_grad():
        _, _, out = forward(cfg, p, tokens, model.Mode(select=True, tap=taps.__setitem__))
        logits = model.logits(p, out.state)[0]
    torch.testing.assert_close(logits[136:], want["logits_tail"], rtol=0, atol=LOGITS)
    for layer in range(cfg.num_hidden_layers):
        torch.testing.assert_close(taps[f"resid.{layer}"][0], want[f"layer{layer}.hidden"], rtol=0, atol=5e-5)


@golden_only
def test_the_layer_behind_the_trunk_is_the_references(golden):
    (cfg, p), main = golden
    want = load_file(GOLDEN / "golden_mtp.safetensors")
    tokens = main["tokens"].long()
    with torch.no_grad():
        lay, packed, out = forward(cfg, p, tokens[:200], model.Mode(select=True))
        following = tokens[1:201].view(1, -1)
        drafts, _ = mtp.unrolled(p, cfg, lay, packed, model.Mode(select=True), out.state, following, 1)
    torch.testing.assert_close(
        model.logits(p, drafts[0])[0, -32:], want["hf.prompt.logits_last32"], rtol=0, atol=LOGITS
    )


def tiny_config():
    """The mini with everything small but the shape of its layers."""
    raw = mini_config(96, SPECIALS) | {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64}
    raw |= {"moe_intermediate_size": 64, "n_routed_experts": 8, "num_attention_heads": 2, "q_lora_rank": 32}
    raw |= {"kv_lora_rank": 32, "index_n_heads": 8, "index_head_dim": 32, "index_topk": 24}
    return raw | {"indexer_types": ["full", "full", "full", "shared"]}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A checkpoint of random weights, in the formats that the mini is stored in."""
    path = tmp_path_factory.mktemp("glm")
    raw = tiny_config()
    cfg = read_config(raw)
    p = fresh(cfg, 5)
    p["lm_head.weight"] *= 20
    for layer in model.expert_layers(cfg):
        p[f"{model.block_of(layer)}.mlp.gate.e_score_correction_bias"] = torch.linspace(-0.1, 0.1, cfg.n_routed_experts)
    write_checkpoint(path, dense_tensors(p, cfg) | mxfp4_experts(p), cfg)
    (path / "config.json").write_text(json.dumps(raw), "utf-8")
    return path


TOKENS = torch.randint(3, 96, (70,), generator=torch.Generator().manual_seed(3))


def test_the_engine_computes_what_the_trainer_does(exported):
    cfg, p = load_parameters(exported)
    engine = load_model(exported, numerics="fp32")
    lane = engine.open_lane(0)
    found = engine.prefill(lane, TOKENS, "all")
    with torch.no_grad():
        _, _, out = forward(cfg, p, TOKENS, model.Mode(select=True))
        wanted = model.logits(p, out.state)[0]
    assert float(wanted.std()) > 0.5
    torch.testing.assert_close(found, wanted, rtol=0, atol=LOGITS)


def test_the_engines_chain_is_the_unrolled_layer(exported):
    """Three drafts behind row 60 that happen to be the true tokens; selections of all that is visible."""
    raw = tiny_config() | {"index_topk": 96}
    (exported / "config.json").write_text(json.dumps(raw), "utf-8")
    cfg, p = load_parameters(exported)
    base = settings(exported, numerics="fp32")
    from msgspec.structs import replace as changed

    engine = load_model(exported, config=changed(base, engine=changed(base.engine, draft="3")))
    lane = engine.open_lane(0)
    known = 60
    engine.prefill(lane, TOKENS[:known], "none")
    draft = engine.propose([lane], TOKENS[known : known + 1], lambda place, _: TOKENS[known + 1 + place].view(1))
    with torch.no_grad():
        lay, packed, out = forward(cfg, p, TOKENS, model.Mode())
        following = TOKENS.roll(-1).view(1, -1)
        steps, _ = mtp.unrolled(p, cfg, lay, packed, model.Mode(), out.state, following, 3)
        wanted = torch.stack([model.logits(p, s[0, known - 1 + j]) for j, s in enumerate(steps)])
    assert float(wanted.std()) > 0.5
    torch.testing.assert_close(draft.logits[0], wanted, rtol=0, atol=LOGITS)
    (exported / "config.json").write_text(json.dumps(tiny_config()), "utf-8")


def test_documents_of_a_row_do_not_see_each_other(exported):
    cfg, p = load_parameters(exported)
    parts = [torch.cat((torch.tensor([0]), TOKENS[:30])), torch.cat((torch.tensor([0]), TOKENS[30:]))]
    frequency = model.frequencies(cfg, TOKENS.device)
    packed = model.pack_all(p, cfg, torch.float32)

    def states(tokens):
        lay = model.make_layout(tokens.view(1, -1), cfg, frequency)
        out = model.trunk(p, cfg, lay, packed, model.Mode()).state
        steps, _ = mtp.unrolled(p, cfg, lay, packed, model.Mode(), out, tokens.roll(-1).view(1, -1), 3)
        return torch.cat([out, *(step[:, j:-1] for j, step in enumerate(steps))], 1)[0], out[0], steps

    with torch.no_grad():
        _, both, both_steps = states(torch.cat(parts))
        _, second, second_steps = states(parts[1])
    first = len(parts[0])
    torch.testing.assert_close(both[first:], second, rtol=0, atol=1e-4)
    for j, (one, other) in enumerate(zip(both_steps, second_steps, strict=True)):
        torch.testing.assert_close(one[0, first + j : -1], other[0, j:-1], rtol=0, atol=1e-4)


def test_a_draft_counts_where_its_chain_and_its_token_are_in_one_document():
    state = torch.randn(1, 8, 4, requires_grad=True)
    outputs = [torch.randn(1, 8, 4, requires_grad=True) for _ in range(3)]
    start = torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4]])
    weight = torch.tensor([[1.0, 1, 1, 0, 1, 1, 1, 0]])  # of the token behind each row: none crosses a border
    mtp.training_loss(outputs, state, torch.randn(6, 4), weight, start).backward()
    counted = [[r for r in range(8) if bool(o.grad[0, r].any())] for o in outputs]
    assert counted == [[0, 1, 4, 5], [1, 5], []]
    assert state.grad is None, "the trunk is not taught by its drafter's target"


def test_every_matrix_is_trained():
    p = fresh(read_config(tiny_config()), 1)
    rest = {n for n, w in p.items() if w.ndim > 1 and not use_muon(n, w) and not frozen(n)}
    tails = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "weights_proj.weight")
    assert all(n.endswith(tails) for n in rest)
    assert {n for n in p if frozen(n)} == {n for n in p if n.endswith("e_score_correction_bias")}


@pytest.mark.parametrize("make", [facts, sums, codechat, tools, lang, story])
@pytest.mark.parametrize("thinking", [False, True])
def test_the_model_learns_to_write_all_of_its_turns_and_their_end(make, thinking):
    words = Words(random.Random(5), ["harbor", "lantern", "river", "copper"])
    for _ in range(100):
        d = make.generate(words.rng, words)
        d = replace(d, thinking=d.thinking or thinking)
        segments = render(d)
        prompt = glm53.encode_prompt(conversation(d, False))
        assert "".join(s.text for s in segments[:-1]) == prompt.text
        calls = bool(d.messages[-1].get("tool_calls"))
        assert (segments[-1].text, segments[-1].weight) == (glm53.OBSERVATION if calls else glm53.USER, 1.0)
        text = "".join(f"[{s.text}]" if s.special else s.text for s in segments if s.weight == 1.0)
        for turn in (m for m in d.messages if m["role"] == "assistant"):
            assert turn["content"].strip() in text
        opened = sum(s.text == glm53.THINK and s.special for s in segments)
        closed = [s.weight for s in segments if s.special and s.text == glm53.END_THINK]
        assert closed == [1.0 if d.thinking else PROMPT_WEIGHT] * opened
        assert all(s.weight < 1 for s in segments if s.special and s.text in (glm53.ASSISTANT, glm53.THINK))


def test_the_turn_to_be_written_is_left_open():
    d = Dialogue([{"role": "user", "content": "Hi"}])
    assert [s.text for s in render(d, generate=True)][-3:] == [glm53.ASSISTANT, glm53.THINK, glm53.END_THINK]
    assert [s.text for s in render(replace(d, thinking=True), generate=True)][-1] == glm53.THINK


def test_widths_follow_use_and_keep_the_budget():
    g = torch.Generator().manual_seed(0)
    none = torch.zeros(0)
    found = {layer: Statistics(none, none, torch.rand(32, generator=g) ** 4, none) for layer in (1, 2)}
    budget = 64 * 3 * 65536 * 5 // 16  # 2.5 bits
    chosen = widths(found, 65536, budget)
    spent = sum(sum(bits) for layer in chosen.values() for bits in layer) * 65536 // 8
    assert budget - 3 * 8192 < spent <= budget
    pairs = sorted((float(u), bits) for layer, s in found.items() for u, bits in zip(s.use, chosen[layer], strict=True))
    assert [bits for _, bits in pairs] == sorted(bits for _, bits in pairs), "more use, no fewer bits"
    assert {bits for _, bits in pairs} == set(LADDER)


USER_TURN = 9
PACKED = [[0, 1, 7, 9, 5, 6, 9, 2, 0, 1, 7, 7, 9, 3, 9, 2, 0, 1, 4, 4]]  # two dialogues and a text, padded to even


def test_dialogues_share_one_context_in_some_rows(tmp_path):
    tokens, weights = np.array(PACKED * 30, dtype=np.uint16), np.arange(600).reshape(30, 20).astype(np.uint8)
    parts = {"tokens": tokens, "weights": weights, "test_tokens": tokens, "test_weights": weights}
    np.savez(tmp_path / "rows.npz", **{f"{d}.{kind}": part for d in DOMAINS for kind, part in parts.items()})
    rows = Rows(tmp_path, torch.device("cpu"), 20, 1)
    joined.join(rows, USER_TURN, 3)
    assert {d: len(rows.tokens[d]) for d in DOMAINS} == {d: 50 if d in joined.CHATS else 30 for d in DOMAINS}
    assert len(rows.order["qa"]) == len(rows.weights["qa"]) == 50
    for ids in rows.tokens["qa"][30:].tolist():
        assert ids[:3] == [0, 1, 7]
        assert not {0, 1, 2, 4, 7} & set(ids[5:])  # one opening, no padding, no text
        assert [9, 9] not in [ids[i : i + 2] for i in range(19)]
    found = joined.dialogues(tokens[:1].astype(int), np.arange(20).reshape(1, 20), USER_TURN)
    ids, marks = joined.conversation([found], 12, USER_TURN, np.random.default_rng(0))
    assert all(PACKED[0][mark] == token for token, mark in zip(ids, marks, strict=True)), "weights go with their tokens"
