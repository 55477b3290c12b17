"""Training rows that are one long conversation: dialogues one after the other, each in sight of all before it.

Without them no training row shows two dialogues in one context, and a conversation is good for 256 tokens: behind them
the loss doubles, and whatever rounds otherwise is told apart a hundred times as much.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from minis.data import Rows

CHATS = ("story", "qa", "math", "codechat", "lang")
SHARE = 0.4  # of a domain's rows; half of them of its own dialogues, half of all chats'
OPENS = 0

Dialogue = tuple[np.ndarray, np.ndarray]  # token ids and weights from the opening of a document to the next user turn's


def dialogues(tokens: np.ndarray, weights: np.ndarray, user: int) -> list[Dialogue]:
    """tokens, weights [R, T] of packed rows -> its dialogues; texts without turns are left out."""
    found: list[Dialogue] = []
    for ids, marks in zip(tokens, weights, strict=True):
        begins = [*np.flatnonzero(ids == OPENS), len(ids)]
        for begin, end in pairwise(begins):
            turns = np.flatnonzero(ids[begin:end] == user)
            if len(turns) > 1:  # the last opens the turn that would follow
                end = begin + turns[-1] + 1
                found.append((ids[begin:end], marks[begin:end]))
    return found


def conversation(
    pools: list[list[Dialogue]], length: int, user: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """-> ids [length], weights [length]. Only the first dialogue keeps what stands before its first turn."""
    ids: list[np.ndarray] = []
    marks: list[np.ndarray] = []
    total = 0
    while total < length:
        pool = pools[rng.integers(len(pools))]
        tokens, weights = pool[rng.integers(len(pool))]
        begin = int(np.flatnonzero(tokens == user)[0]) + 1 if ids else 0
        ids.append(tokens[begin:])
        marks.append(weights[begin:])
        total += len(tokens) - begin
    return np.concatenate(ids)[:length], np.concatenate(marks)[:length]


def join(rows: Rows, user: int, seed: int) -> None:
    """Adds conversations to the rows of every chat domain."""
    rng = np.random.default_rng(seed)
    arrays = {d: (rows.tokens[d].cpu().numpy(), rows.weights[d].cpu().numpy()) for d in CHATS}
    pools = {d: dialogues(*arrays[d], user) for d in CHATS}
    every = [pool for pool in pools.values() if pool]
    for domain in CHATS:
        count = round(len(rows.tokens[domain]) * SHARE / (1 - SHARE))
        own = [pools[domain]] if pools[domain] else every
        made = [conversation(every if n % 2 else own, rows.row, user, rng) for n in range(count if every else 0)]
        if made:
            tokens, weights = (torch.from_numpy(np.stack(part)) for part in zip(*made, strict=True))
            rows.tokens[domain] = _added(rows.tokens[domain], tokens)
            rows.weights[domain] = _added(rows.weights[domain], weights)
            rows.order[domain] = rows.rng.permutation(len(rows.tokens[domain]))


def _added(held: Tensor, more: Tensor) -> Tensor:
    return torch.cat((held, more.to(held)))
