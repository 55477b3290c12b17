"""GLM-5.3 against an independent reference without rounding."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.rig import Threads, load_model
from tided.cache.pool import rows_between
from tided.models.glm53.attention import Attention
from tided.models.glm53.block import Block
from tided.models.glm53.indexer import Indexer
from tided.models.glm53.mlp import Moe

GOLDEN = Path(__file__).parents[1] / "golden" / "glm53"
PROMPT, DECODED = 200, 212
LOGITS = 2e-4
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "golden_main.safetensors")


@pytest.fixture(scope="module")
def model():
    return load_model(GOLDEN, numerics="fp32")


def serve(model, tokens: Tensor, chunk: int = PROMPT) -> Tensor:
    """Prompt in chunks, twelve single tokens, then five rows at once -> logits [217, V]."""
    lane = model.open_lane(0)
    parts = [model.prefill(lane, tokens[i : min(i + chunk, PROMPT)], "all") for i in range(0, PROMPT, chunk)]
    parts += [model.decode([lane], tokens[i : i + 1]) for i in range(PROMPT, DECODED)]
    parts.append(model.decode([lane], tokens[DECODED:], [5]))
    model.keep(lane, 5)
    model.close_lane(lane)
    return torch.cat(parts)


@pytest.mark.parametrize("chunk", [PROMPT, 64, 33, 7])
def test_logits(model, golden, chunk):
    logits = serve(model, golden["tokens"].long(), chunk)
    torch.testing.assert_close(logits[136:], golden["logits_tail"], rtol=0, atol=LOGITS)
    assert torch.equal(logits.argmax(1), golden["argmax_all"].long())


@pytest.fixture
def taps(monkeypatch) -> dict[str, list[Tensor]]:
    """What the parts of a model saw and gave, call by call."""
    seen: dict[str, list[Tensor]] = {}

    def watch(owner, name, keep):
        real = getattr(owner, name)

        def patched(self, *given):
            result = real(self, *given)
            for key, value in keep(self, result, given).items():
                seen.setdefault(key, []).append(value)
            return result

        monkeypatch.setattr(owner, name, patched)

    def routed(self, result, given):
        at = f"layer{self.layer + 2}.router"
        return {f"{at}_ids": result.ids, f"{at}_weights": result.weights}

    def picked(self, result, given):
        entries, valid = result
        wide = torch.full((len(entries), self.top_k), -1)
        wide[:, : entries.shape[1]] = entries.masked_fill(~valid, -1).flip(1)
        return {f"layer{self.layer}.index_topk": wide.sort(1, descending=True).values}

    watch(Block, "forward", lambda self, result, given: {f"layer{self.layer}.hidden": result})
    watch(Attention, "forward", lambda self, result, given: {f"layer{self.layer}.attn_out": result})
    watch(Moe, "forward", lambda self, result, given: {f"layer{self.layer + 2}.mlp_out": result})
    watch(Moe, "route", routed)
    watch(Indexer, "pick", picked)
    return seen


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


def test_parts(model, golden, taps):
    serve(model, golden["tokens"].long())
    found = {name: torch.cat(parts) for name, parts in taps.items()}
    for layer in range(6):
        close(found[f"layer{layer}.hidden"], golden[f"layer{layer}.hidden"])
        close(found[f"layer{layer}.attn_out"][136:], golden[f"layer{layer}.attn_out_tail"])
    for layer in range(2, 6):
        close(found[f"layer{layer}.mlp_out"][136:], golden[f"layer{layer}.mlp_out_tail"])
        ids, wanted = found[f"layer{layer}.router_ids"], golden[f"layer{layer}.router_ids"].long()
        assert torch.equal(ids.sort(1).values, wanted.sort(1).values)
        weights = found[f"layer{layer}.router_weights"].gather(1, ids.argsort(1))
        close(weights, golden[f"layer{layer}.router_weights"].gather(1, wanted.argsort(1)))
    for layer in (0, 1, 4):
        assert torch.equal(found[f"layer{layer}.index_topk"], golden[f"layer{layer}.index_topk_sorted"].long())


def test_a_span_of_one_row_has_no_mask(model, golden, monkeypatch):
    """Which costs a wait for the device in every layer; of a row that chooses, all of its choice counts."""
    seen: set[tuple[bool, bool, bool]] = set()
    real = Attention._attend

    def watch(self, span, query):
        seen.add((span.count == 1, span.end > model.blocks[0].attention.indexer.top_k, span.selection.valid is None))
        return real(self, span, query)

    monkeypatch.setattr(Attention, "_attend", watch)
    lane = model.open_lane(0)
    for part in golden["tokens"].long()[:202].split([1, 199, 1, 1]):
        model.prefill(lane, part, "none")
    model.decode([lane], golden["tokens"].long()[202:203])
    assert seen == {(True, False, True), (False, True, False), (True, True, True)}


def test_what_a_context_keeps(model, golden):
    """The reference holds rotated pairs apart: first halves, then second halves."""

    def apart(pairs: Tensor) -> Tensor:
        return torch.cat([pairs[:, 0::2], pairs[:, 1::2]], 1)

    lane = model.open_lane(0)
    model.prefill(lane, golden["tokens"].long(), "none")
    for layer in range(6):
        rows = rows_between(lane, 1, 0, 217, model.pool.rows[layer])
        close(rows[:, :64], golden[f"layer{layer}.cache_latent"])
        close(apart(rows[:, 64:]), golden[f"layer{layer}.cache_rope_key"])
    for layer in (0, 1, 4):
        keys = rows_between(lane, 1, 0, 217, model.pool.keys[layer])
        close(torch.cat([apart(keys[:, :16]), keys[:, 16:]], 1), golden[f"layer{layer}.cache_index_key"])
    assert sorted(model.pool.keys) == [0, 1, 4], "layers that share a choice hold no keys"
    model.close_lane(lane)


def test_the_index_scores(model, golden):
    """Of rows 176 on, each as it was computed."""
    tokens, found = golden["tokens"].long(), {0: [], 1: [], 4: []}
    pick = Indexer.pick
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Indexer, "pick", lambda self, score: (found[self.layer].append(score), pick(self, score))[1])
        lane = model.open_lane(0)
        model.prefill(lane, tokens, "none")
        model.close_lane(lane)
    for layer, scores in found.items():
        got, wanted = torch.cat(scores)[176:], golden[f"layer{layer}.index_scores_rows176up"]
        seen = wanted > -torch.inf
        close(got[seen], wanted[seen])


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_the_same(golden, ranks):
    tokens = golden["tokens"].long()
    found = Threads(ranks).run(lambda group: serve(load_model(GOLDEN, group, numerics="fp32"), tokens))
    for logits in found:
        assert torch.equal(logits, found[0])
        torch.testing.assert_close(logits[136:], golden["logits_tail"], rtol=0, atol=LOGITS)
