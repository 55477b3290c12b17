"""How a prompt is cut into chunks, and whether a token is prefilled or decoded, does not change the answer."""

from itertools import zip_longest

import pytest
import torch

from kernels.indexer import index_scores
from tided.models.deepseek_v41 import attention, indexer


def logits_by(model, prompt, chunk):
    lane = model.open_lane(0)
    parts = [model.prefill(lane, part, "all") for part in prompt.split(chunk)]
    model.close_lane(lane)
    return torch.cat(parts)


@pytest.fixture(scope="module")
def whole(fp32_model, prompt):
    return logits_by(fp32_model, prompt, len(prompt))


@pytest.mark.parametrize("chunk", [1, 7, 32, 64])
def test_chunks_equal_one_chunk(fp32_model, prompt, whole, chunk):
    torch.testing.assert_close(logits_by(fp32_model, prompt, chunk), whole, rtol=1e-4, atol=1e-4)


def test_decode_equals_prefill(fp32_model, prompt, whole):
    lane = fp32_model.open_lane(0)
    fp32_model.prefill(lane, prompt[:40], "none")
    rows = torch.cat([fp32_model.decode([lane], token.view(1)) for token in prompt[40:]])
    torch.testing.assert_close(rows, whole[40:], rtol=1e-4, atol=1e-4)
    fp32_model.close_lane(lane)


def test_the_last_logits_are_those_of_all(fp32_model, prompt, whole):
    lane = fp32_model.open_lane(0)
    last = fp32_model.prefill(lane, prompt, "last")
    torch.testing.assert_close(last, whole[-1:], rtol=1e-5, atol=1e-5)
    fp32_model.close_lane(lane)


def test_chunks_with_native_rounding(native_model, prompt):
    """Rounding amplifies the last bit, so rows may drift; a lost window row or remainder would change them all."""
    one, many = logits_by(native_model, prompt, 101), logits_by(native_model, prompt, 13)
    assert (one.argmax(1) == many.argmax(1)).float().mean() > 0.75
    torch.testing.assert_close(one[:13], many[:13], rtol=0.05, atol=0.5)


def test_a_long_context_over_many_pages(fp32_model, prompt):
    """Several pages, a pool that prunes: chunks of 96 against one."""
    ids = prompt.repeat(4)[:400]
    one, many = logits_by(fp32_model, ids, 400), logits_by(fp32_model, ids, 96)
    assert ((one - many).abs().amax(1) < 1e-3).float().mean() > 0.95


@pytest.mark.parametrize("chunk", [1, 400])
def test_keys_are_scored_a_block_at_a_time(monkeypatch, fp32_model, prompt, chunk):
    ids, sizes = prompt.repeat(4)[:400], []

    def seen(query, weight, keys):
        sizes.append(len(keys))
        return index_scores(query, weight, keys)

    def computed():
        lane = fp32_model.open_lane(0)
        fp32_model.prefill(lane, ids[:-chunk], "none") if chunk < len(ids) else None
        logits = fp32_model.prefill(lane, ids[-chunk:], "all")
        fp32_model.close_lane(lane)
        return logits

    one = computed()
    monkeypatch.setattr(indexer, "_KEYS", 128)
    monkeypatch.setattr(indexer, "index_scores", seen)
    torch.testing.assert_close(computed(), one, rtol=1e-4, atol=1e-4)
    assert {128, 200 - 128, 400 - 3 * 128} <= set(sizes)
    assert max(sizes) == 128


def test_logits_may_be_changed_in_place(fp32_model, prompt):
    """Sampling divides and masks them where they lie."""
    lane = fp32_model.open_lane(0)
    assert not fp32_model.prefill(lane, prompt[:5], "last").is_inference()
    assert not fp32_model.decode([lane], prompt[:1]).is_inference()
    fp32_model.close_lane(lane)


def test_queries_scored_a_few_at_a_time(fp32_model, prompt, whole, monkeypatch):
    monkeypatch.setattr(indexer, "_SCORE_ELEMENTS", 5000)
    monkeypatch.setattr(attention, "_ROW_ELEMENTS", 20000)
    torch.testing.assert_close(logits_by(fp32_model, prompt, len(prompt)), whole, rtol=1e-4, atol=1e-4)


def test_lanes_do_not_touch_each_other(native_model, prompt):
    """Chunks of two lanes in turn, over pages that interleave: the same bits as one lane after the other."""

    def start(lane, ids):
        return [(lane, part) for part in ids.split(24)]

    def answers(order):
        rows = {}
        for lane, part in order:
            rows[lane.index] = native_model.prefill(lane, part, "last")
        return rows

    prompts = (prompt.repeat(2)[:190], prompt.flip(0).repeat(2)[:170])
    alone = {}
    for i, ids in enumerate(prompts):
        lane = native_model.open_lane(i)
        alone |= answers(start(lane, ids))
        native_model.close_lane(lane)
    lanes = [native_model.open_lane(i) for i in range(2)]
    first, second = (start(lane, ids) for lane, ids in zip(lanes, prompts, strict=True))
    turns = [turn for pair in zip_longest(first, second) for turn in pair if turn is not None]
    together = answers(turns)
    assert all(torch.equal(together[i], alone[i]) for i in range(2))
    for lane in lanes:
        native_model.close_lane(lane)
