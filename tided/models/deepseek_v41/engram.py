"""Engram layers: what the last few tokens are, looked up by hash and added to the streams through a gate."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import engram
from kernels.linear import Matrix, fp8_linear
from kernels.numerics import Numerics
from packers.shards import Checkpoint
from tided.cache.context import After, Context
from tided.models.deepseek_v41.config import TextConfig
from tided.models.deepseek_v41.engram_rows import READ_TIMEOUT_S, READERS, Asked, Table
from tided.models.deepseek_v41.hashing import Hashing, layer_hashing
from tided.models.deepseek_v41.step import Pass
from tided.models.deepseek_v41.weights import Weights

Ints = NDArray[np.int64]
DEAD = -1  # in place of a compressed id: an image's token, which no n-gram reaches over


@dataclass(frozen=True)
class Engram:
    """One layer's part."""

    layer: int
    hashing: Hashing
    table: Table
    wkv: Matrix  # [(streams + 1) * D, columns * dim]
    weight: Tensor  # [streams, D], query weight times key weight
    numerics: Numerics

    def mix(self, streams: Tensor, asked: Asked, step: Pass) -> Tensor:
        """streams [T, S, D] of the pass's rows -> the same shape; nothing is added to those of images."""
        n, (_, width, hidden) = self.numerics, streams.shape
        looked_up = asked.take(streams.device)[step.skipped :]
        projected = n.store(fp8_linear(looked_up, self.wkv, n.activation)).view(-1, width + 1, hidden)
        mixed = n.store(engram.mix(streams, projected[:, :width], projected[:, width], self.weight))
        return mixed if step.pictured is None else torch.where(step.pictured[:, None, None], streams, mixed)


class Engrams:
    """All Engram layers: token ids in, rows asked for before the first layer runs."""

    def __init__(self, layers: dict[int, Engram], vocabulary: Ints, ngram: int, pad_id: int) -> None:
        """vocabulary [V]: compressed id of each token id; `pad_id`, one of them, stands for what is not there."""
        self.layers, self._vocabulary, self._ngram, self._pad_id = layers, vocabulary, ngram, pad_id

    def ask(self, step: Pass, token_ids: Ints) -> dict[int, Asked]:
        """token_ids [T] of a pass: begins the reads of all layers and moves the lanes' tails on."""
        history = self.begin(step, token_ids)
        return {layer: self.ask_for(layer, history) for layer in self.layers}

    def ask_for(self, layer: int, history: Ints) -> Asked:
        """history [T, N] of `begin`: begins one layer's reads."""
        part = self.layers[layer]
        return part.table.ask(part.hashing.rows_of(history))

    def begin(self, step: Pass, token_ids: Ints) -> Ints:
        """token_ids [T] of a pass -> what each is looked up by: [T, N] compressed ids, the newest first. Moves the
        lanes' tails on."""
        compressed, spans = self._vocabulary[token_ids], step.spans
        if step.pictured is not None:
            compressed[step.pictured.cpu().numpy()] = DEAD
        histories = []
        for span in spans:
            histories.append(_histories(span.lane, compressed[span.rows], self._ngram))
            if span.lane.undo is not None:
                span.after = After({}, span.lane.tail)
                span.lane.undo.after.append(span.after)
        return _living(np.concatenate(histories), self._pad_id)


def _histories(lane: Context, ids: Ints, ngram: int) -> Ints:
    """ids [count] of one lane -> [count, ngram]: each id and those before it, the newest first."""
    known = np.concatenate([lane.tail, ids])
    lane.tail = known[len(known) - len(lane.tail) :]
    if len(ids) == 1:
        return known[None, : -ngram - 1 : -1]
    newest_first = np.arange(ngram - 1, -1, -1)
    histories: Ints = known[np.arange(len(ids))[:, None] + newest_first]
    return histories


def _living(history: Ints, pad_id: int) -> Ints:
    """history [T, N], the newest first -> a dead token, and all that lies behind it, as if it were not there."""
    return np.where(np.logical_or.accumulate(history == DEAD, axis=1), pad_id, history)


def _readers() -> ThreadPoolExecutor:
    """All its threads run already: where memory has run out a thread may fail to begin, and a step that starts it waits
    for it without end."""
    pool, together = ThreadPoolExecutor(READERS, thread_name_prefix="engram"), threading.Barrier(READERS + 1)
    for _ in range(READERS):
        pool.submit(together.wait, READ_TIMEOUT_S)
    together.wait(READ_TIMEOUT_S)
    return pool


def load_engrams(
    checkpoint: Checkpoint, weights: Weights, t: TextConfig, vocabulary: Ints, cache_bytes: int, numerics: Numerics
) -> Engrams:
    """`weights` at the root. The cache's bytes are shared evenly by the layers."""
    readers, layers = _readers(), {}
    for layer, hashing in layer_hashing(t).items():
        part = weights.under(f"layers.{layer}.engram")
        table = Table(checkpoint, f"{part.prefix}embed", cache_bytes // len(t.engram_layer_ids), readers)
        weight = part.plain("q_weight") * part.plain("k_weight")
        layers[layer] = Engram(layer, hashing, table, part.fp8("wkv"), weight, numerics)
    return Engrams(layers, vocabulary, t.engram_max_ngram_size, int(vocabulary[t.engram_pad_token_id]))
