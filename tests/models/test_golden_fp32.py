"""Against an independent reference without rounding: every tap and logit to about 1e-4."""

import re

import pytest
import torch
from torch import Tensor

from kernels import hyper
from tests.models.conftest import PROMPT_TOKENS
from tests.models.rig import load_model
from tided.cache.pool import rows_between
from tided.models.deepseek_v41.indexer import Indexer

TOLERANCE = 1e-4
ENGRAM_LAYERS = (1, 4)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def same_sets(got: Tensor, wanted: Tensor) -> None:
    """[T, k] ascending with -1 for none."""
    width = max(got.shape[1], wanted.shape[1])

    def padded(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t.long(), (0, width - t.shape[1]), value=-1).sort(1).values

    torch.testing.assert_close(padded(got), padded(wanted))


def test_prefill_taps(fp32_model, prompt, exact, forced_tie, taps):
    lane = fp32_model.open_lane(0)
    logits = fp32_model.prefill(lane, prompt, "all")
    close(logits, exact["prefill.logits"])
    names = [n for n in exact if re.fullmatch(r"prefill\.(resid|attn_in|attn_out|ffn_in|ffn_out)\.\d+\.last12", n)]
    assert len(names) == 50
    for name in names:
        close(taps[name.removeprefix("prefill.").removesuffix(".last12")][-12:], exact[name])
    for i, layer in enumerate(ENGRAM_LAYERS):
        close(taps[f"engram_gate.{i}"], exact[f"prefill.engram_gate.{layer}"])
    for layer in range(10):
        same_sets(taps[f"router_ids.{layer}"], exact[f"prefill.router_ids.{layer}"])
        weights = taps[f"router_weights.{layer}"].gather(1, taps[f"router_ids.{layer}"].argsort(1))
        expected = exact[f"prefill.router_ids.{layer}"].argsort(1)
        close(weights, exact[f"prefill.router_weights.{layer}"].gather(1, expected))
    for layer in (2, 4, 6, 8):
        same_sets(taps[f"topk.{layer}"], exact[f"prefill.topk.{layer}"])
    fp32_model.close_lane(lane)


def test_prefill_caches(fp32_model, prompt, exact):
    lane = fp32_model.open_lane(0)
    fp32_model.prefill(lane, prompt, "none")
    for layer, ratio in ((2, 2), (4, 2), (6, 1)):
        count = PROMPT_TOKENS // ratio
        close(rows_between(lane, ratio, 0, count, fp32_model.pool.rows[layer]), exact[f"prefill.compress_kv.{layer}"])
        close(rows_between(lane, ratio, 0, count, fp32_model.pool.keys[layer]), exact[f"prefill.index_k.{layer}"])
    fp32_model.close_lane(lane)


def test_decode(fp32_model, prompt, inputs, exact, forced_tie, taps):
    lane = fp32_model.open_lane(0)
    fp32_model.prefill(lane, prompt, "none")
    for step, token in enumerate(inputs["decode_input_ids"]):
        logits = fp32_model.decode([lane], torch.tensor([token]))
        close(logits, exact[f"decode.{step}.logits"])
        close(taps["resid.9"], exact[f"decode.{step}.resid.9"])
        for layer in (2, 4, 6, 8):
            same_sets(taps[f"topk.{layer}"], exact[f"decode.{step}.topk.{layer}"])
    fp32_model.close_lane(lane)


def test_decode_does_not_score_stale_keys(fp32_model, prompt, inputs, exact):
    """A pair that stays open must not make a layer score the keys of another."""
    lane = fp32_model.open_lane(0)
    fp32_model.prefill(lane, prompt, "none")
    differences = []
    for step, token in enumerate(inputs["decode_input_ids"]):
        logits = fp32_model.decode([lane], torch.tensor([token]))
        if step:
            differences.append((logits - exact[f"reference_quirk.decode.{step}.logits"]).abs().max().item())
    assert min(differences) > 0.05
    fp32_model.close_lane(lane)


@pytest.fixture(scope="module")
def bounded_model():
    return load_model(numerics="fp32", decoder_replay="bounded")


@pytest.mark.parametrize("first", [101, 64])
def test_bounded_replay(bounded_model, prompt, inputs, exact, first, forced_tie):
    """Layers behind the last source see the last window only; a chunk before it changes nothing."""
    lane = bounded_model.open_lane(0)
    for chunk in prompt.split([first, PROMPT_TOKENS - first]):
        if len(chunk):
            rows = bounded_model.forward([lane], chunk.view(1, -1), bounded=True)
    close(bounded_model.logits(rows), exact["bounded.logits"])
    for step, token in enumerate(inputs["bounded_decode_input_ids"]):
        close(bounded_model.decode([lane], torch.tensor([token]))[0], exact[f"bounded.decode.{step}.logits"])
    bounded_model.close_lane(lane)


def test_bounded_replay_is_exact_within_a_window(bounded_model, fp32_model, prompt):
    got, wanted = (m.prefill(m.open_lane(0), prompt[:32], "last") for m in (bounded_model, fp32_model))
    assert torch.equal(got, wanted)


def logits_error(model, prompt, exact) -> float:
    lane = model.open_lane(0)
    try:
        return (model.prefill(lane, prompt, "all") - exact["prefill.logits"]).abs().max().item()
    finally:
        model.close_lane(lane)


def test_an_untransposed_comb_is_noticed(fp32_model, prompt, exact, forced_tie, monkeypatch):
    expand = hyper.expand
    monkeypatch.setattr(hyper, "expand", lambda h, y, post, comb: expand(h, y, post, comb.transpose(1, 2)))
    assert logits_error(fp32_model, prompt, exact) > 0.1


def test_another_selection_is_noticed(fp32_model, prompt, exact, monkeypatch):
    monkeypatch.setattr(Indexer, "pick", lambda self, score: (score.topk(16, largest=False).indices, score[:, :16] < 9))
    assert logits_error(fp32_model, prompt, exact) > 0.1
