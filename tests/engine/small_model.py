"""A model of four layers with random weights, in pages of 16 tokens: a step takes milliseconds, and a prompt of a few
dozen tokens crosses pages, windows and chunks."""

from pathlib import Path

import pytest
from msgspec.structs import replace

import tided.cache.pool
import tided.engine.build
import tided.models.deepseek_v41.load
import tided.models.glm53.load
import tided.models.paged
from tests.models.random_checkpoint import golden_config, write_checkpoint
from tided.engine.build import OpenedModel, open_model
from tided.engine.offline import settings_of
from tided.settings import Cache, Engine, Experts, Parallel, Tide

LAYERS, EXPERTS, TOP_K = 4, 6, 2
PAGE, CHUNK, WINDOW, CONTEXT = 16, 8, 8, 112
IDS = 400  # tokens of prompts: below the special ones


def write_small(path: Path) -> Path:
    """A window layer with Engram before it, a source of every second token, one of every token and a reader of it."""
    config = golden_config(
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
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
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
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
    path: Path, *, ranks: int = 1, lanes: int = 3, resident: int = LAYERS * EXPERTS, draft: str = "off", **cache
) -> OpenedModel:
    """Prompts need not wait for answers: what meets in the pool does not depend on a clock."""
    settings = settings_of(path)
    room = {"context_tokens": CONTEXT, "pool_tokens": 4 * CONTEXT}
    return open_model(
        replace(
            settings,
            model=replace(settings.model, numerics="native", prefill_chunk_tokens=CHUNK),
            experts=Experts(resident=resident, spare_slots=2),
            tide=Tide(sync_slots=3),
            cache=Cache(**(room | cache)),
            engine=Engine(lanes=lanes, queue=8, guard_every_steps=4, draft=draft, prefill_share=0.99),
            parallel=Parallel(ranks=ranks),
        )
    )
