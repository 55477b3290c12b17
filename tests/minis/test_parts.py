"""Generators, encoding, packing, rounding and the Sinkhorn gradient."""

import json
import random
import re

import numpy as np
import pytest
import torch

from minis.check import expected_call
from minis.checkpoint import dequantise, quantise_fp8, quantise_mxfp4, quantise_rows
from minis.corpus import codechat, facts, lang, story, sums, tools
from minis.corpus.words import Words
from minis.dialogue import Dialogue
from minis.encoding import ASSISTANT, EOS, render
from minis.layers import enable_compile, region
from minis.numerics import qdq8, qdq_mxfp4, round_e2m1
from minis.prepare import ROW, pack
from minis.sinkhorn import sinkhorn


@pytest.fixture
def words():
    return Words(random.Random(5), ["harbor", "lantern", "river", "copper"])


def _text(d, **kw):
    return "".join(s.text for s in render(d, **kw))


@pytest.mark.parametrize("make", [facts, sums, codechat, tools, lang, story])
def test_every_dialogue_ends_with_a_weighted_end_of_turn(make, words):
    for _ in range(200):
        segments = render(make.generate(words.rng, words))
        assert segments[-1].text == EOS
        assert segments[-1].weight == 1.0
        assert sum(s.text == ASSISTANT for s in segments) == sum(s.text == EOS for s in segments)


def test_written_out_sums_are_right(words):
    for _ in range(500):
        a, b = words.rng.randint(0, 999), words.rng.randint(0, 999)
        steps = sums.add_steps(a, b)
        assert steps.endswith(f"So {a} + {b} = {a + b}.")
        digits = "".join(re.findall(r"write (\d)", steps)[::-1])
        carry = "1" if "Write the carry" in steps else ""
        assert int(carry + digits) == a + b


def test_tool_calls_copy_values_of_the_question(words):
    seen = 0
    for _ in range(300):
        d = tools.generate(words.rng, words)
        offered = {t["function"]["name"] for t in d.tools}
        for before, m in zip(d.messages, d.messages[1:], strict=False):
            for call in m.get("tool_calls", []):
                assert call["function"]["name"] in offered
                for value in json.loads(call["function"]["arguments"]).values():
                    assert isinstance(value, bool) or str(value) in before["content"]
                    seen += 1
    assert seen > 200


def test_the_expected_call_is_what_the_encoder_writes():
    args = {"path": "notes.txt", "limit": 5, "on": True}
    d = Dialogue(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [tools.call("f", args)]}]
    )
    assert _text(d).endswith(expected_call("f", args) + EOS)


def test_packing_keeps_documents_whole_and_even():
    rng = random.Random(1)
    docs = []
    for _ in range(60):
        n = rng.randint(20, 300)
        ids = np.array([0, *range(10, 9 + n)], dtype=np.uint16)
        docs.append((ids, np.ones(n, dtype=np.float32)))
    tokens, marks = pack(docs, [0], False, rng)
    assert tokens.shape[1] == ROW
    starts = [(r, c) for r, c in zip(*np.nonzero(tokens == 0), strict=True)]
    assert len(starts) == len(docs)
    assert all(c % 2 == 0 for _, c in starts)
    assert int((marks == 255).sum()) == sum(len(i) for i, _ in docs)


def test_stored_formats_round_trip():
    g = torch.Generator().manual_seed(0)
    w = torch.randn(64, 96, generator=g)
    packed, scale = quantise_mxfp4(w)
    assert packed.dtype == torch.int8
    assert packed.shape == (64, 48)
    torch.testing.assert_close(dequantise(packed, scale), qdq_mxfp4(w), atol=0, rtol=0)
    q, s = quantise_fp8(w)
    assert s.shape == (2, 3)
    assert float((dequantise(q, s) - w).abs().max()) < 0.2
    rows, s = quantise_rows(w)
    torch.testing.assert_close(dequantise(rows, s), qdq8(w), atol=0.02, rtol=0.07)
    assert packed[0, 0].item() & 15 == _code(
        dequantise(packed, scale)[0, 0] / torch.exp2(scale.view(torch.uint8)[0, 0].float() - 127)
    )


def _code(value):
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return magnitudes.index(abs(float(value))) | (8 if value < 0 else 0)


def test_e2m1_ties_go_to_the_even_code():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0, -0.75])
    assert round_e2m1(x).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -1.0]


def test_sinkhorn_gradient():
    x = torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(3), requires_grad=True)
    y = sinkhorn(x, 20, 1e-6)
    z = x.softmax(-1) + 1e-6
    for k in range(39):
        z = z / (z.sum(1 if k % 2 == 0 else 2, keepdim=True) + 1e-6)
    torch.testing.assert_close(y, z)
    g = torch.randn_like(y)
    torch.testing.assert_close(*(torch.autograd.grad(v, x, g)[0] for v in (y, z)), atol=1e-5, rtol=1e-4)


def test_a_region_is_compiled_once_and_not_before_it_is_asked_for(monkeypatch):
    """What imports the model alone does not import a compiler, which takes seconds."""
    asked = []
    monkeypatch.setattr(torch, "compile", lambda fn, **options: asked.append((fn, options)) or (lambda x: fn(x) + 100))
    double = region(lambda x: 2 * x)
    assert (double(1), asked) == (2, [])
    enable_compile(True)
    try:
        assert [double(1), double(2)] == [102, 104]
    finally:
        enable_compile(False)
    assert [options for _, options in asked] == [{"dynamic": False}]
    assert double(1) == 2
