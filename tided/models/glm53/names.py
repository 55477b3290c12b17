"""Every tensor of a GLM-5.3 checkpoint. Names are the same in all releases; how a linear layer is stored is not, and
is told by the leaves that are there (`weights.layout_of`)."""

from collections.abc import Callable
from typing import NamedTuple

from packers.joined import Part
from packers.shards import TensorSpec
from tided.models.glm53.config import Config

PLAIN = ("BF16", "F16", "F32")
Inventory = dict[str, TensorSpec]
Linears = dict[str, tuple[int, int]]  # [out, in]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # w1, w3, w2 of a record
ABSORBED = "kv_b_proj"  # multiplied by its halves, head by head: kept as a matrix
CUT_BY_ROWS = ("q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "lm_head")  # over the ranks
CUT_BY_COLUMNS = ("o_proj", "down_proj")  # the others are on every rank


class Cut(NamedTuple):
    """Into how many parts a linear layer's outputs and inputs are cut."""

    rows: int = 1
    columns: int = 1

    def of(self, rows: int, columns: int) -> tuple[int, int]:
        return rows // self.rows, columns // self.columns


def cut_of(linear: str, ranks: int) -> Cut:
    """Of a linear layer by its name."""
    return Cut(ranks if linear.endswith(CUT_BY_ROWS) else 1, ranks if linear.endswith(CUT_BY_COLUMNS) else 1)


def block(layer: int) -> str:
    return f"model.layers.{layer}"


def expert(layer: int, number: int) -> str:
    """`layer` counts all layers of the file."""
    return f"{block(layer)}.mlp.experts.{number}"


def part_of(c: Config) -> Callable[[str], Part]:
    """Which part of the model a tensor is of, by its name."""
    behind = tuple(f"{block(c.num_hidden_layers + i)}." for i in range(max(1, c.num_nextn_predict_layers)))

    def part(name: str) -> Part:
        if ".mlp.experts." in name:
            return "draft experts" if name.startswith(behind) else "experts"
        return "draft" if name.startswith(behind) else "dense"

    return part


def plain_tensors(c: Config) -> Inventory:
    """What is no linear layer, and never quantised."""
    d = c.hidden_size
    found = {"model.embed_tokens.weight": _float(c.vocab_size, d), "model.norm.weight": _float(d)}
    for layer in range(c.num_hidden_layers + c.num_nextn_predict_layers):
        found |= _plain_of_layer(c, layer)
    return found


def _plain_of_layer(c: Config, layer: int) -> Inventory:
    at, d = block(layer), c.hidden_size
    found = {
        f"{at}.input_layernorm.weight": _float(d),
        f"{at}.post_attention_layernorm.weight": _float(d),
        f"{at}.self_attn.q_a_layernorm.weight": _float(c.q_lora_rank),
        f"{at}.self_attn.kv_a_layernorm.weight": _float(c.kv_lora_rank),
    }
    if c.selects(layer):
        found[f"{at}.self_attn.indexer.k_norm.weight"] = _float(c.index_head_dim)
        found[f"{at}.self_attn.indexer.k_norm.bias"] = _float(c.index_head_dim)
    if not c.is_dense(layer):
        found[f"{at}.mlp.gate.e_score_correction_bias"] = TensorSpec("F32", (c.n_routed_experts,))
    if layer >= c.num_hidden_layers:
        found |= {f"{at}.{name}.weight": _float(d) for name in ("enorm", "hnorm", "shared_head.norm")}
    return found


def linears(c: Config) -> Linears:
    """All linear layers, those of routed experts excepted: a release may have quantised any of them."""
    d = c.hidden_size
    found: Linears = {"lm_head": (c.vocab_size, d)}
    for layer in range(c.num_hidden_layers + c.num_nextn_predict_layers):
        found |= _attention(c, layer)
        mlp = f"{block(layer)}.mlp"
        if c.is_dense(layer):
            found |= mlp_of(mlp, d, c.intermediate_size)
        else:
            found |= {f"{mlp}.gate": (c.n_routed_experts, d)}
            found |= mlp_of(f"{mlp}.shared_experts", d, c.moe_intermediate_size)
        if layer >= c.num_hidden_layers:
            found[f"{block(layer)}.eh_proj"] = (d, 2 * d)
    return found


def _attention(c: Config, layer: int) -> Linears:
    at, d, heads = f"{block(layer)}.self_attn", c.hidden_size, c.num_attention_heads
    found = {
        f"{at}.q_a_proj": (c.q_lora_rank, d),
        f"{at}.q_b_proj": (heads * c.query_dim, c.q_lora_rank),
        f"{at}.kv_a_proj_with_mqa": (c.row_dim, d),
        f"{at}.kv_b_proj": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        f"{at}.o_proj": (d, heads * c.v_head_dim),
    }
    if c.selects(layer):
        found[f"{at}.indexer.wq_b"] = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        found[f"{at}.indexer.wk"] = (c.index_head_dim, d)
        found[f"{at}.indexer.weights_proj"] = (c.index_n_heads, d)
    return found


def mlp_of(at: str, hidden: int, inner: int) -> Linears:
    return {
        f"{at}.gate_proj": (inner, hidden),
        f"{at}.up_proj": (inner, hidden),
        f"{at}.down_proj": (hidden, inner),
    }


def experts_of(c: Config, layer: int) -> Linears:
    """All linears of the routed experts of a layer with experts."""
    found: Linears = {}
    for number in range(c.n_routed_experts):
        found |= mlp_of(expert(layer, number), c.hidden_size, c.moe_intermediate_size)
    return found


def routed_expert_names(first: int, leaves: tuple[str, ...]) -> Callable[[int, int], tuple[str, ...]]:
    """(layer behind `first`, expert) -> all gate, up, down of a leaf, leaf by leaf; without leaves the three alone."""
    ends = [f".{leaf}" for leaf in leaves] or [""]
    return lambda layer, number: tuple(
        f"{expert(first + layer, number)}.{part}{end}" for end in ends for part in PROJECTIONS
    )


def _float(*shape: int) -> TensorSpec:
    return TensorSpec(PLAIN, shape)
