import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kernels import engram
from tests.models.rig import GOLDEN, load_model
from tided.models.deepseek_v41.attention import Attention
from tided.models.deepseek_v41.block import Block
from tided.models.deepseek_v41.indexer import Indexer
from tided.models.deepseek_v41.moe import Moe

torch.set_num_threads(1)
TIED_ROW, TIED_LAYER, PROMPT_TOKENS = 22, 6, 101


@pytest.fixture(scope="session")
def inputs() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GOLDEN / "inputs.json").read_text("utf-8"))
    return loaded


@pytest.fixture(scope="session")
def prompt(inputs: dict[str, Any]) -> Tensor:
    return torch.tensor(inputs["prompt_ids"])


@pytest.fixture(scope="session")
def exact() -> dict[str, Tensor]:
    """Expected values without any rounding."""
    return load_file(GOLDEN / "expected_fp32.safetensors")


@pytest.fixture(scope="session")
def rounded() -> dict[str, Tensor]:
    """Expected values with the native rounding, as fp32."""
    loaded = load_file(GOLDEN / "expected.safetensors")
    return {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in loaded.items()}


@pytest.fixture(scope="session")
def fp32_model() -> Any:
    return load_model(numerics="fp32")


@pytest.fixture(scope="session")
def native_model() -> Any:
    return load_model(numerics="native")


@pytest.fixture
def forced_tie(monkeypatch: pytest.MonkeyPatch, exact: dict[str, Tensor]) -> None:
    """One prompt row has entries of equal score at the top-k border; the expected values took these."""
    pick = Indexer.pick

    def forced(self: Indexer, score: Tensor) -> tuple[Tensor, Tensor]:
        entries, valid = pick(self, score)
        if self.layer == TIED_LAYER and len(score) == PROMPT_TOKENS:
            wanted = exact[f"prefill.topk.{TIED_LAYER}"][TIED_ROW]
            entries[TIED_ROW], valid[TIED_ROW] = wanted.clamp_min(0), wanted >= 0
        return entries, valid

    monkeypatch.setattr(Indexer, "pick", forced)


Taps = dict[str, Tensor]


@pytest.fixture
def taps(monkeypatch: pytest.MonkeyPatch) -> Taps:
    """What the parts of a model saw and gave in the last pass, under the golden files' names."""
    seen: Taps = {}
    block, attention, moe = Block.forward, Attention.forward, Moe.forward
    route, pick, gate = Moe.route, Indexer.pick, engram.gate

    def see_block(self, step, streams, pre):
        seen[f"resid.{self.layer}"], seen[f"pre_mix.{self.layer}"] = result = block(self, step, streams, pre)
        return result

    def see_attention(self, step, x):
        result = attention(self, step, x)
        seen[f"attn_in.{self.layer}"], seen[f"attn_out.{self.layer}"] = x, self.numerics.store(result)
        return result

    def see_moe(self, step, x):
        result = moe(self, step, x)
        seen[f"ffn_in.{self.layer}"], seen[f"ffn_out.{self.layer}"] = x, self.numerics.store(result)
        return result

    def see_route(self, x, bias):
        result = route(self, x, bias)
        seen[f"router_ids.{self.layer}"], seen[f"router_weights.{self.layer}"] = result.ids, result.weights
        return result

    def see_pick(self, score):
        entries, valid = pick(self, score)
        seen[f"topk.{self.layer}"] = entries.masked_fill(~valid, -1)
        return entries, valid

    def see_gate(streams, keys, weight):
        result = gate(streams, keys, weight)
        seen[f"engram_gate.{sum(name.startswith('engram_gate') for name in seen)}"] = result
        return result

    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (Block, "forward", see_block),
        (Attention, "forward", see_attention),
        (Moe, "forward", see_moe),
        (Moe, "route", see_route),
        (Indexer, "pick", see_pick),
        (engram, "gate", see_gate),
    ]
    for owner, name, patched in patches:
        monkeypatch.setattr(owner, name, patched)
    return seen
