"""One rank of two of a model of DeepSeek-V4.1-Flash's shapes, with random weights, in a device's memory: for benches.

Weights have the size that keeps activations near one; experts are random codes. Nothing is read from a disk: Engram
rows are the same random bytes for every token."""

import zlib
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from kernels.linear import Fp8Matrix
from kernels.numerics import NATIVE
from kernels.record import ExpertRecord
from tests.models.random_checkpoint import released_config
from tided.cache.pool import Pool
from tided.experts.bank import ExpertBank
from tided.experts.tables import DemandTap, RoutingTables
from tided.models.deepseek_v41 import load
from tided.models.deepseek_v41.captured import DecodeSteps
from tided.models.deepseek_v41.config import Config, TextConfig, read_config
from tided.models.deepseek_v41.engram import Engram, Engrams
from tided.models.deepseek_v41.hashing import layer_hashing
from tided.models.deepseek_v41.model import DeepseekV41
from tided.models.deepseek_v41.names import expected_tensors
from tided.models.deepseek_v41.step import Rotations
from tided.models.deepseek_v41.weights import ALL
from tided.models.parallel import Group

CUDA = torch.device("cuda")


class OneOfTwo:
    """A rank whose peer gives what it gives itself: the shapes of two ranks without a second device."""

    rank, ranks = 0, 2

    def sum(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor) -> Tensor:
        return part.unsqueeze(0)

    def concat(self, part: Tensor) -> Tensor:
        return torch.cat([part, part], -1)

    def check(self) -> None:
        pass


@dataclass(frozen=True)
class RandomWeights:
    """`tided.models.deepseek_v41.weights.Weights` without a checkpoint. What every rank holds whole is the same on
    all."""

    inventory: dict[str, Any]
    group: Group
    prefix: str = ""
    device: torch.device = CUDA
    packed: bool = True

    def under(self, prefix: str) -> "RandomWeights":
        return replace(self, prefix=f"{self.prefix}{prefix}.")

    def cut(self, length: int) -> slice:
        return slice(0, length // self.group.ranks)

    def _shape(self, name: str, rows: slice, columns: slice = ALL) -> tuple[int, ...]:
        shape = self.inventory[self.prefix + name].shape
        cut = [len(range(*part.indices(n))) for part, n in zip((rows, columns), shape, strict=False)]
        return (*cut, *shape[2:])

    def _randn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        name = self.prefix + name
        of_rank = 0 if shape == tuple(self.inventory[name].shape) else 1 + self.group.rank
        draw = torch.Generator(device=CUDA).manual_seed(zlib.crc32(name.encode()) + of_rank)
        return torch.randn(shape, device=CUDA, generator=draw)

    def plain(self, name: str, rows: slice = ALL) -> Tensor:
        shape = self._shape(name, rows)
        values = self._randn(name, shape)
        if len(shape) == 1:
            near = 1.0 if name.endswith(("norm.weight", "scale")) else 0.0
            return near + 0.1 * values
        return values * shape[1] ** -0.5

    def matrix(self, name: str, rows: slice = ALL) -> Tensor:
        return self.plain(name, rows).to(torch.bfloat16)

    def fp8(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Fp8Matrix:
        n, k = self._shape(f"{name}.weight", rows, columns)
        codes = self._randn(f"{name}.weight", (n, k)).to(torch.float8_e4m3fn).view(torch.uint8)
        byte = 127 - round(np.log2(k) / 2)
        return Fp8Matrix(codes, torch.full((-(-n // 32), -(-k // 32)), byte, dtype=torch.uint8, device=CUDA))


class Rows:
    """Stands for a table and for what was asked of it."""

    def __init__(self, columns: int, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self._raw = np.random.default_rng(1).integers(100, 120, (16, columns, row_bytes), dtype=np.uint8)
        self._count = 0

    def ask(self, rows: Any) -> "Rows":
        self._count = len(rows)
        return self

    def raw(self) -> Any:
        return np.resize(self._raw, (self._count, *self._raw.shape[1:]))

    def put(self, out: Any) -> None:
        out[:] = self._raw[: self._count]

    def remember(self) -> None:
        pass

    def take(self, device: torch.device) -> Tensor:
        return torch.randn(self._count, self._raw.shape[1] * 256, device=device)


def text_config(layers: int) -> TextConfig:
    """The released one, or its first layers."""
    config = released_config()
    t = config["text_config"]
    if layers < 40:
        t["compress_ratios"] = [*t["compress_ratios"][:layers], 0, 0, 0]
        t["num_hidden_layers"] = layers
        for key in ("kv_source_layer_ids", "index_source_layer_ids"):
            t[key] = [layer for layer in t[key] if layer < layers]
        if layers <= 20:
            raise SystemExit("at least 21 layers: the candidate pool is layer 20's")
        t["dspark_target_layer_ids"] = [0, 1, 2]
    return msgspec.convert(config, Config).text_config if layers < 40 else read_config(config).text_config


def bank_of(t: TextConfig, resident: int, lanes: int) -> ExpertBank:
    """`resident` experts of random codes, as many of each layer."""
    record = ExpertRecord(t.hidden_size, t.moe_intermediate_size, 2)
    slots = torch.empty(resident, record.slot_bytes, dtype=torch.uint8, device=CUDA)
    slots.view(torch.int64).random_()
    low = 121 - 6  # near 1 / sqrt(5120), with the mean square of e2m1 codes
    for part in record.parts[3:]:
        slots[:, part.offset : part.offset + part.nbytes].random_(low, low + 3)
    tables = RoutingTables(t.num_hidden_layers, t.n_routed_experts, CUDA)
    tap = DemandTap(lanes, t.num_hidden_layers, t.n_routed_experts, CUDA)
    each = resident // t.num_hidden_layers
    draw = np.random.default_rng(2)
    pairs = [(n, e) for n in range(t.num_hidden_layers) for e in draw.permutation(t.n_routed_experts)[:each].tolist()]
    tables.change({pair: slot for slot, pair in enumerate(pairs)})
    return ExpertBank(record, slots, tables, tap)


def real_shapes(
    layers: int, resident: int, pool_tokens: int, lanes: int = 16, group: Group | None = None
) -> DeepseekV41:
    """`group` None: a rank without a second device."""
    t, group = text_config(layers), group or OneOfTwo()
    torch.manual_seed(1)  # the same on every rank
    config = msgspec.convert(released_config(), Config)
    inventory = expected_tensors(replace_text(config, t))
    weights, rotations = RandomWeights(inventory, group), Rotations(t, CUDA)
    pool = Pool(load._layout(t, NATIVE), pool_tokens, CUDA)
    for held in (*pool.rows.values(), *pool.keys.values()):
        held.normal_()
    bank = bank_of(t, resident, lanes)
    hashing = layer_hashing(t)
    engrams = {}
    for layer in [layer for layer in hashing if layer < layers]:
        part = weights.under(f"layers.{layer}.engram")
        columns = hashing[layer].primes.size
        table: Any = Rows(columns, t.engram_head_dim * 33 // 32)
        weight = part.plain("q_weight") * part.plain("k_weight")
        engrams[layer] = Engram(layer, hashing[layer], table, part.fp8("wkv"), weight, NATIVE)
    vocabulary = np.arange(t.vocab_size, dtype=np.int64) % t.engram_compressed_vocab_size
    any_weights: Any = weights
    return DeepseekV41(
        load.shape_of(config),
        pool_tokens,
        embed=torch.randn(t.vocab_size, t.hidden_size // 2, device=CUDA, dtype=torch.bfloat16),
        blocks=tuple(load._load_block(any_weights, t, n, pool, rotations, bank, NATIVE) for n in range(layers)),
        norm=weights.plain("norm.weight"),
        eps=t.rms_norm_eps,
        head=weights.matrix("head.weight", rows=weights.cut(t.vocab_size)),
        engrams=Engrams(engrams, vocabulary, t.engram_max_ngram_size, 2),
        rotations=rotations,
        pool=pool,
        context_shape=load._context_shape(t, 2, NATIVE),
        last_kv_source=t.last_kv_source,
        replay="full",
        group=group,
        numerics=NATIVE,
        steps=DecodeSteps(),
    )


def replace_text(config: Config, t: TextConfig) -> Config:
    return msgspec.structs.replace(config, text_config=t)
