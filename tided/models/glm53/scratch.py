"""What a prefill chunk takes in passing, from the configuration alone."""

from tided.models.glm53.config import Config
from tided.settings import Settings

STREAM_COPIES = 4
ROWS = 1 << 25  # gathered rows of attention at a time, and index scores: see `attention._ROW_ELEMENTS`
# What lives beside a layer's widest moment, and what an allocator holds in pieces that fit nothing; no GPU has told.
MARGIN = {"cuda": 1.5, "cpu": 7.0}


def passing_bytes(c: Config, settings: Settings) -> int:
    """Of each row: streams; absorbed queries and outputs, of all heads where contexts are shared over the ranks; what
    its experts and the dense layers make; the places that the index selects. Of the chunk: rows that are gathered at a
    time, one weight expanded, and logits of one row."""
    ranks, tokens = settings.parallel.ranks, settings.model.prefill_chunk_tokens
    heads = c.num_attention_heads // (1 if settings.cache.split else ranks)
    latent = c.kv_lora_rank + c.qk_rope_head_dim
    attention = heads * (latent + c.kv_lora_rank) * 4
    made = max(c.num_experts_per_tok * (3 * c.moe_intermediate_size // ranks + c.hidden_size), 3 * c.intermediate_size)
    row = STREAM_COPIES * c.hidden_size * 4 + attention + made * 4 + c.index_topk * 12
    gathered = 3 * 4 * ROWS if settings.engine.device == "cuda" else 3 * 4 * (ROWS >> 3)
    weight = 4 * max(c.hidden_size * c.intermediate_size // ranks, heads * latent * c.q_lora_rank)
    return int(MARGIN[settings.engine.device] * tokens * row) + gathered + weight + 4 * c.vocab_size
