"""The layer behind the trunk: predicts a token further than the trunk did, and is unrolled on its own output.

Row r takes the token at r + 1 and a state of r. In the first step that is the trunk's and all rows are one causal
pass. In step j it is the layer's own of row r - 1 from step j - 1; the row then attends to what an engine has there:
rows up to r - j + 1 that were computed from true states, and the chain's own rows behind them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minis.glm53 import layers as G
from minis.glm53.model import Layout, Mode, Packed, Params, added, attention, block_of, mlp, normed
from minis.layers import linear, region
from minis.probe import IndexProbe
from tided.models.glm53.config import Config

DECAY = 0.85  # weight of a further step


def unrolled(
    p: Params,
    cfg: Config,
    lay: Layout,
    packed: Packed,
    mode: Mode,
    state: Tensor,
    following: Tensor,
    steps: int,
    probe: IndexProbe | None = None,
) -> tuple[list[Tensor], Tensor]:
    """state [B, T, D] of the trunk, following [B, T]: the token behind each row -> normed states [B, T, D] of every
    step, and scores of the experts that the first chose [N, E]. Rows of step j mean something from the j-th of a
    document on."""
    layer = cfg.num_hidden_layers
    at, eps = block_of(layer), cfg.rms_norm_eps
    token = normed(
        F.embedding(following, p["model.embed_tokens.weight"].detach()).to(mode.dtype), p[f"{at}.enorm.weight"], eps
    )
    outputs: list[Tensor] = []
    keys: list[Tensor] = []
    values: list[Tensor] = []
    picked: Tensor | None = None
    for step in range(steps):
        before = state if step == 0 else outputs[-1].roll(1, 1)
        x = linear(torch.cat((token, normed(before, p[f"{at}.hnorm.weight"], eps)), -1), p[f"{at}.eh_proj.weight"])
        y = normed(x, p[f"{at}.input_layernorm.weight"], eps)
        if step == 0:
            y, chosen, rows = attention(p, layer, y, lay, cfg, mode, None, probe)
            seen = lay.visible if chosen is None else chosen
            keys, values = [rows.k], [rows.v]
        else:
            y = _ahead(p, layer, y, lay, cfg, keys, values, seen)
        x = x + y
        y = normed(x, p[f"{at}.post_attention_layernorm.weight"], eps)
        y, scores = mlp(p, layer, y.flatten(0, 1), packed, cfg, mode)
        picked = scores if step == 0 else picked
        outputs.append(normed(x + y.view_as(x), p[f"{at}.shared_head.norm.weight"], eps))
    assert picked is not None, "this layer has experts"
    return outputs, picked


def _ahead(
    p: Params, layer: int, x: Tensor, lay: Layout, cfg: Config, keys: list[Tensor], values: list[Tensor], seen: Tensor
) -> Tensor:
    """A further step: x [B, T, D] normed -> [B, T, D]; appends its rows to `keys` and `values`. `seen` [B, T, T]: what
    the first step's rows attended to."""
    a = f"{block_of(layer)}.self_attn"
    names = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    weights = [p[f"{a}.{name}.weight"] for name in names]
    _, q, k, v = G.attention_in(x, *weights, lay.cos, lay.sin, cfg.num_attention_heads, cfg.qk_nope_head_dim)
    keys.append(k)
    values.append(v)
    step = len(keys) - 1
    t = x.shape[1]
    at = torch.arange(t, device=x.device)
    back = at.unsqueeze(1) - at  # [T, T]: how far a row lies behind
    first = seen.roll(step, 1) & (back >= step) & (at >= lay.start.unsqueeze(-1))
    chain = [((back == step - j) & (at >= lay.start.unsqueeze(-1))) for j in range(1, step + 1)]
    mask = torch.cat((first, *chain), -1)
    return linear(G.attend(q, torch.cat(keys, 2), torch.cat(values, 2), added(mask, q.dtype)), p[f"{a}.o_proj.weight"])


@region
def draft_loss(draft: Tensor, state: Tensor, head: Tensor, weight: Tensor) -> Tensor:
    """draft [B, T, D]: states that speak of the token after next; state [B, T, D]: the trunk's, weight [B, T]: of the
    next token -> scalar, cross-entropy against the trunk's own distribution one row further."""
    w = head.detach().to(draft.dtype)
    soft = F.linear(state.detach().roll(-1, 1), w).float().softmax(-1)
    log_q = F.linear(draft, w).float().log_softmax(-1)
    counted = weight.roll(-1, 1)
    counted = torch.cat((counted[:, :-1], torch.zeros_like(counted[:, :1])), 1)
    return (-(soft * log_q).sum(-1) * counted).sum() / (counted.sum() + 1)


def training_loss(outputs: list[Tensor], state: Tensor, head: Tensor, weight: Tensor, start: Tensor) -> Tensor:
    """Mean over the steps. `start` [B, T]: a draft counts where its chain and what it speaks of lie in one document."""
    at = torch.arange(start.shape[1], device=start.device)
    within = (start.roll(-1, 1) == start).float()  # the next token, and by its weight the one after it
    total = torch.zeros((), device=head.device)
    scale = 0.0
    for step, output in enumerate(outputs):
        far = within * (at - start >= step).float()
        counted = weight * (F.pad(far[:, :-1], (1, 0)) > 0)
        total = total + DECAY**step * draft_loss(output, state, head, counted)
        scale += DECAY**step
    return total / scale
