"""Block-sparse attention for training on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

_attend = torch.compile(flex_attention, dynamic=False)
_build = torch.compile(create_block_mask, dynamic=False)


def block_mask(rule: Callable[..., Tensor], batch: int, queries: int, rows: int) -> Any:
    return _build(rule, batch, None, queries, rows, device="cuda")


def attend_flex(q: Tensor, rows: Tensor, mask: Any, sink: Tensor) -> Tensor:
    """q [B, T, H, d], rows [B, S, d] -> [B, T, H, d]; the sink joins the denominator through the log-sum-exp."""
    kv = rows.unsqueeze(1)
    out, lse = _attend(
        q.transpose(1, 2), kv, kv, block_mask=mask, scale=q.shape[-1] ** -0.5, enable_gqa=True, return_lse=True
    )
    keep = torch.sigmoid(lse - sink.float().view(1, -1, 1))
    return (out * keep.unsqueeze(-1).to(out.dtype)).transpose(1, 2)
