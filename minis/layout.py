"""What follows from token ids alone (positions, masks, Engram rows), and how a forward pass rounds and selects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minis.config import Config
from minis.engram import Hasher
from minis.numerics import rope_on, rope_table

Params = dict[str, Tensor]


@dataclass
class Mode:
    """What the forward pass rounds and how it selects; the default is exact fp32 arithmetic."""

    dtype: torch.dtype = torch.float32
    round_kv: bool = False
    round_input: bool = False
    select: bool = False  # hard top-k of compressed rows; training sees every visible row
    sparse: bool = True  # run only the chosen experts (processor) or all of them (GPU)
    flex: bool = False
    resident: Tensor | None = None  # [layers, E] bool: experts that may be chosen
    forced: dict[int, Tensor] = field(default_factory=dict)  # source layer -> [B, T, S] selection, for tests
    tap: Callable[[str, Tensor], None] | None = None


@dataclass
class Layout:
    """Everything that follows from the token ids alone."""

    tokens: Tensor  # [B, T] int64
    start: Tensor  # [B, T] int64: where this position's document begins in the row
    position: Tensor  # [B, T] int64 inside the document
    rope: dict[bool, tuple[Tensor, Tensor]]  # compressed layer? -> cos, sin [B, T, R/2]
    masks: dict[int, Any]  # ratio -> [B, T, T + S] bool, or a BlockMask
    engram: list[Tensor]  # per Engram layer [B, T, columns]


def document_starts(tokens: Tensor, bos: int = 0) -> Tensor:
    """tokens [B, T] -> start [B, T]: every BOS opens a document."""
    at = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return torch.where(tokens == bos, at, 0).cummax(1).values


def mask_rule(start: Tensor, length: int, ratio: int, window: int) -> Callable[..., Tensor]:
    """Rule (b, h, query, row) -> visible, over [window rows | compressed rows]; start [B, T]."""

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        first = start[b, q]
        near = (k < length) & (k <= q) & (q - k < window) & (k >= first)
        if ratio == 0:
            return near
        s = (k - length) * ratio
        return near | ((k >= length) & (s + ratio - 1 <= q) & (s >= first))

    return rule


def dense_mask(start: Tensor, ratio: int, window: int) -> Tensor:
    """[B, T, T + S] bool."""
    b, t = start.shape
    size = t + (t // ratio if ratio else 0)
    dev = start.device
    rule = mask_rule(start, t, ratio, window)
    ib = torch.arange(b, device=dev).view(-1, 1, 1)
    iq = torch.arange(t, device=dev).view(1, -1, 1)
    ik = torch.arange(size, device=dev).view(1, 1, -1)
    return rule(ib, ib, iq, ik).expand(b, t, size)


def make_layout(tokens: Tensor, cfg: Config, hasher: Hasher, flex: Callable[..., Any] | None = None) -> Layout:
    """tokens [B, T]; `flex` builds a block mask from a rule, otherwise masks are dense."""
    b, t = tokens.shape
    start = document_starts(tokens)
    position = torch.arange(t, device=tokens.device) - start
    rope = {c: rope_table(rope_on(cfg, c, tokens.device), position) for c in (False, True)}
    masks: dict[int, Any] = {}
    for ratio in sorted(set(cfg.ratios[: cfg.layers])):
        if flex is None:
            masks[ratio] = dense_mask(start, ratio, cfg.window)
        else:
            size = t + (t // ratio if ratio else 0)
            masks[ratio] = flex(mask_rule(start, t, ratio, cfg.window), b, t, size)
    return Layout(tokens, start, position, rope, masks, hasher.ids(tokens, position))
