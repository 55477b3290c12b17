"""The differentiable forward pass of the minis against the golden vectors of the real architecture."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from minis import attention, drafter, layout, model
from minis.checkpoint import load_dequantised
from minis.config import load
from minis.engram import Hasher, compressed_map

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "deepseek-v41"
pytestmark = pytest.mark.skipif(not (GOLDEN / "expected_fp32.safetensors").exists(), reason="golden vectors missing")


@pytest.fixture(scope="module")
def golden():
    torch.set_num_threads(1)
    cfg = load(GOLDEN / "config.json")
    p = load_dequantised(GOLDEN)
    tok = Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))
    table = compressed_map(
        cfg.vocab, lambda i: tok.decode([i], skip_special_tokens=False), lambda i: tok.id_to_token(i) or ""
    )
    assert int(table.max()) + 1 == cfg.engram_compressed
    hasher = Hasher.build(cfg, table)
    want = load_file(GOLDEN / "expected_fp32.safetensors")
    inputs = json.loads((GOLDEN / "inputs.json").read_text("utf-8"))
    return cfg, p, hasher, want, inputs


def _run(golden, ids):
    cfg, p, hasher, want, _ = golden
    lay = layout.make_layout(torch.tensor([ids]), cfg, hasher)
    t = len(ids)
    # Row 22 of layer 6 has entries of equal score at the border; take the golden side of the tie.
    scores = {}
    packed = model.pack_all(p, cfg, torch.float32, torch.tensor(0.0))
    picked = want["prefill.topk.6"][22]
    original = attention.select_rows

    def tied(s, visible, k):
        result = original(s, visible, k)
        if s.shape[1] == t and s.shape[2] == t and not scores:
            scores["done"] = True
            result[0, 22] = False
            result[0, 22, picked[picked >= 0].long()] = True
        return result

    taps = {}
    mode = layout.Mode(select=True, tap=taps.__setitem__)

    class Patch:
        def __enter__(self):
            attention.select_rows = tied

        def __exit__(self, *_):
            attention.select_rows = original

    with Patch(), torch.no_grad():
        out = model.trunk(p, cfg, lay, packed, mode)
    return lay, packed, mode, out, taps


def test_engram_rows_are_exact(golden):
    cfg, _, hasher, _, inputs = golden
    want = load_file(GOLDEN / "expected.safetensors")["prefill.engram_ids"]
    tokens = torch.tensor([inputs["prompt_ids"]])
    got = hasher.ids(tokens, torch.arange(tokens.shape[1]).unsqueeze(0))
    assert torch.equal(torch.stack(got, 2)[0], want.long())
    assert [int(m.sum()) for m in hasher.moduli] == json.loads((GOLDEN / "config.json").read_text("utf-8"))[
        "text_config"
    ]["engram_num_embeddings"]
    assert cfg.engram_columns == want.shape[-1]


def test_prefill_and_draft(golden):
    cfg, p, _, want, inputs = golden
    lay, packed, mode, out, taps = _run(golden, inputs["prompt_ids"])
    for name, value in taps.items():
        key = f"prefill.{name}.last12"
        if key in want:
            torch.testing.assert_close(value[-12:], want[key], atol=1e-3, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
        elif f"prefill.{name}" in want:
            torch.testing.assert_close(value, want[f"prefill.{name}"], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(out.taps[0, -12:], want["prefill.main_hidden.last12"], atol=1e-3, rtol=1e-3)
    logits = model.logits(p, out.x, cfg)[0]
    torch.testing.assert_close(logits, want["prefill.logits"], atol=1e-3, rtol=1e-3)
    anchor = torch.tensor([[inputs["greedy_output_ids"][0]]])
    at = torch.tensor([[len(inputs["prompt_ids"]) - 1]])
    with torch.no_grad():
        d = drafter.draft(p, cfg, lay, packed, mode, out.taps, at, anchor)
        ids, drafted, conf = drafter.greedy(p, d, anchor)
    assert ids[0, 0].tolist() == want["draft.prefill.output_ids"][1:].tolist()
    torch.testing.assert_close(drafted[0, 0], want["draft.prefill.logits"], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(d.hidden[0, 0], want["draft.prefill.hidden"], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(conf[0, 0], want["draft.prefill.confidence"], atol=1e-3, rtol=1e-3)


def test_prefill_equals_decode(golden):
    """A prefill of prompt and decoded tokens gives the golden single-step logits."""
    cfg, p, _, want, inputs = golden
    ids = inputs["prompt_ids"] + inputs["decode_input_ids"]
    _, _, _, out, _ = _run(golden, ids)
    logits = model.logits(p, out.x, cfg)[0, len(inputs["prompt_ids"]) :]
    expected = torch.cat([want[f"decode.{s}.logits"] for s in range(10)])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


def test_dense_experts_equal_sparse_ones(golden):
    cfg, p, hasher, _, inputs = golden
    lay = layout.make_layout(torch.tensor([inputs["prompt_ids"][:32]]), cfg, hasher)
    packed = model.pack_all(p, cfg, torch.float32, torch.tensor(0.0))
    with torch.no_grad():
        a = model.trunk(p, cfg, lay, packed, layout.Mode(sparse=True)).x
        b = model.trunk(p, cfg, lay, packed, layout.Mode(sparse=False)).x
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_documents_of_one_row_do_not_see_each_other(golden):
    cfg, p, hasher, _, inputs = golden
    first, second = inputs["prompt_ids"][:20], [0, *inputs["prompt_ids"][30:51]]
    packed = model.pack_all(p, cfg, torch.float32, torch.tensor(0.0))
    with torch.no_grad():
        lay = layout.make_layout(torch.tensor([first + second]), cfg, hasher)
        both = model.trunk(p, cfg, lay, packed, layout.Mode()).x[0, 20:]
        lay = layout.make_layout(torch.tensor([second]), cfg, hasher)
        alone = model.trunk(p, cfg, lay, packed, layout.Mode()).x[0]
    torch.testing.assert_close(both, alone, atol=1e-4, rtol=1e-4)
