"""What lanes and steps take beside weights and pages, from the configuration alone."""

from kernels.numerics import Numerics
from tided.models.deepseek_v41.config import TextConfig
from tided.settings import Settings

STREAM_COPIES = 3  # before a layer, behind it, and what a mix makes of them
SCORES = 2 << 26  # index scores at a time, and what their selection makes of them; see `chunk.SCORES`
# What lives beside a layer's widest moment, and what an allocator holds in pieces that fit nothing. On an H200 a chunk
# of 2,048 rows took 1.8 GB where this says 2.3; the references, which a CPU runs, make more copies.
MARGIN = {"cuda": 1.5, "cpu": 7.0}


def lane_bytes(t: TextConfig, settings: Settings, numerics: Numerics) -> int:
    """Window rings, the drafter's among them; a step's rows lie beside them until it is over."""
    layers = t.num_hidden_layers + (t.num_nextn_predict_layers if settings.engine.draft != "off" else 0)
    return 2 * layers * t.sliding_window * t.head_dim * numerics.cache.itemsize


def passing_bytes(t: TextConfig, settings: Settings) -> int:
    """Of each row: streams in fp32; queries, outputs and their roundings of the rank's heads; what its experts make;
    the places that the index selects. Of the chunk: index scores, as many at a time as there are or fit, one weight
    expanded, and logits of one row."""
    ranks, tokens, context = settings.parallel.ranks, settings.model.prefill_chunk_tokens, settings.cache.context_tokens
    width, picks = t.hidden_size, t.num_experts_per_tok
    streams = STREAM_COPIES * t.hc_mult * width * 4
    attention = t.num_attention_heads // ranks * t.head_dim * (4 + 4 + 2)
    experts = picks * (3 * t.moe_intermediate_size // ranks + width) * 4
    index = t.index_topk * 12 + context // t.candidate_block_size
    scores = 4 * min(SCORES, 2 * tokens * context)
    queries, expert = t.q_lora_rank * t.num_attention_heads * t.head_dim, 3 * width * t.moe_intermediate_size
    weight = 4 * max(queries, expert) // ranks
    return (
        int(MARGIN[settings.engine.device] * tokens * (streams + attention + experts + index))
        + scores
        + weight
        + 4 * t.vocab_size
    )
