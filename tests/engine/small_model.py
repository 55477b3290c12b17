"""Models of four layers of experts with random weights, one of each family, in pages of 16 tokens: a step takes
milliseconds, and a prompt of a few dozen tokens crosses pages, windows and chunks."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

import tided.cache.pool
import tided.engine.build
import tided.models.deepseek_v41.load
import tided.models.glm53.load
import tided.models.paged
from tests.bundled import DEEPSEEK, GLM, Mini
from tests.models.random_checkpoint import golden_config, write_checkpoint
from tided.engine.build import OpenedModel, open_model
from tided.engine.offline import settings_of
from tided.settings import Cache, Engine, Experts, Parallel, Tide

PAGE, CHUNK, WINDOW, CONTEXT = 16, 8, 8, 112
IDS = 400  # tokens of prompts: below the special ones


@dataclass(frozen=True)
class Small:
    """`experts` of each layer, `few` of all: more than a token wants."""

    path: Path
    layers: int
    experts: int
    top_k: int
    few: int

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [(layer, expert) for layer in range(self.layers) for expert in range(self.experts)]


def small_of(mini: Mini, folder: Path) -> Small:
    if mini is GLM:  # its random model is small enough
        return Small(mini.random.path, layers=4, experts=16, top_k=4, few=mini.random.some)
    assert mini is DEEPSEEK
    return Small(_write_deepseek(folder / "checkpoint"), **DEEPSEEK_SIZES, few=15)


DEEPSEEK_SIZES = {"layers": 4, "experts": 6, "top_k": 2}


def _write_deepseek(path: Path) -> Path:
    """A window layer with Engram before it, a source of every second token, one of every token and a reader of it."""
    config = golden_config(
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=DEEPSEEK_SIZES["layers"],
        num_attention_heads=2,
        o_groups=2,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=32,
        o_lora_rank=32,
        sliding_window=WINDOW,
        compress_ratios=[0, 2, 1, 1, 0],
        kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2],
        index_n_heads=2,
        index_head_dim=32,
        index_topk=8,
        candidate_source_layer_id=2,
        candidate_topk_blocks=4,
        n_routed_experts=DEEPSEEK_SIZES["experts"],
        num_experts_per_tok=DEEPSEEK_SIZES["top_k"],
        engram_layer_ids=[1],
        engram_num_embeddings=[1362],
        engram_head_dim=32,
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=[2, 3],
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
    )
    return write_checkpoint(path, config, seed=1)


def small_pages(patch: pytest.MonkeyPatch) -> None:
    for module in (
        tided.cache.pool,
        tided.engine.build,
        tided.models.deepseek_v41.load,
        tided.models.glm53.load,
        tided.models.paged,
    ):
        patch.setattr(module, "PAGE_TOKENS", PAGE)


def small_model(
    small: Small, *, ranks: int = 1, lanes: int = 3, resident: int = 0, draft: str = "off", **cache
) -> OpenedModel:
    """`resident` 0: all. Prompts need not wait for answers: what meets in the pool does not depend on a clock."""
    settings = settings_of(small.path)
    room = {"context_tokens": CONTEXT, "pool_tokens": 4 * CONTEXT}
    return open_model(
        replace(
            settings,
            model=replace(settings.model, numerics="native", prefill_chunk_tokens=CHUNK),
            experts=Experts(resident=resident or len(small.pairs), spare_slots=2),
            tide=Tide(sync_slots=3),
            cache=Cache(**(room | cache)),
            engine=Engine(lanes=lanes, queue=8, guard_every_steps=4, draft=draft, prefill_share=0.99),
            parallel=Parallel(ranks=ranks),
        )
    )
