"""Routed experts in EXL3 as a checkpoint stores them: which tensors a matrix has, found by their headers alone.

A matrix P [K inputs, N outputs] is `P.trellis` I16 [K / 16, N / 16, 16 * bits], `P.suh` F16 [K] and `P.svh` F16 [N] (in
old files `P.su` I16 [K / 16] and `P.sv` I16 [N / 16], their signs alone) and at most one of `P.mcg` and `P.mul1`, whose
presence names the codebook. Widths are those of the trellis: no configuration is believed.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kernels.exl3_record import BLOCK, TILE, Codebook, widths
from packers.headers import TensorInfo, shown
from packers.shards import Checkpoint
from tided.errors import DataError, TensorError

MARKERS: tuple[Codebook, ...] = ("mcg", "mul1")
SIGNS_A_WORD = 16
WORD_VALUES = 8  # of a trellis a tile: so many for each half bit
RANK_SLICED = re.compile(r"\.experts\.\d+\.\w+\.rank\d+(\.|$)")
LEAF = re.compile(r"\.experts\.\d+\.\w+\.(?P<leaf>[^.]+)$")
KNOWN = {"trellis", "suh", "svh", "su", "sv", *MARKERS}
OTHERS = {"weight", "weight_packed", "weight_scale", "weight_scale_inv", "bias"}  # of layers that are stored otherwise
PERMUTED = re.compile(r"perm", re.IGNORECASE)


@dataclass(frozen=True)
class StoredMatrix:
    """`inputs` and `outputs` scales: fp16, or packed signs (`signs`) of 16 values a word."""

    half_bits: int
    codebook: Codebook
    trellis: TensorInfo
    inputs: TensorInfo
    outputs: TensorInfo


def is_signs(scales: TensorInfo) -> bool:
    return scales.dtype == "I16"


def matrix_of(checkpoint: Checkpoint, name: str, inputs: int, outputs: int) -> StoredMatrix:
    """Raises TensorError, naming the tensor and where it lies, for anything but an EXL3 matrix of this shape."""
    trellis = _tensor(checkpoint, f"{name}.trellis")
    shape = trellis.shape
    if len(shape) != 3 or trellis.dtype != "I16":
        raise _wrong(trellis, f"a trellis is I16 [{inputs // TILE}, {outputs // TILE}, 16 * bits]")
    if inputs % BLOCK or outputs % BLOCK or shape[:2] != (inputs // TILE, outputs // TILE):
        raise _wrong(trellis, f"a matrix of {inputs} inputs and {outputs} outputs needs [{inputs / TILE:g}, ..]")
    codebook = _codebook(checkpoint, name)
    half_bits, rest = divmod(shape[2], WORD_VALUES)
    if rest or half_bits not in widths(codebook):
        raise _wrong(trellis, f"{shape[2] / 16:g} bits a weight do not exist with the codebook {codebook}")
    if f"{name}.bias" in checkpoint.tensors:
        raise TensorError(f"{name}.bias: routed experts with a bias are not served", where=str(checkpoint.path))
    scales = (_scales(checkpoint, name, leaf, length) for leaf, length in (("su", inputs), ("sv", outputs)))
    return StoredMatrix(half_bits, codebook, trellis, *scales)


def _scales(checkpoint: Checkpoint, name: str, leaf: str, length: int) -> TensorInfo:
    signs = checkpoint.tensors.get(f"{name}.{leaf}")
    if signs is not None and f"{name}.{leaf}h" not in checkpoint.tensors:
        if signs.dtype != "I16" or signs.shape != (length // SIGNS_A_WORD,):
            raise _wrong(signs, f"signs of {length} values are I16 [{length // SIGNS_A_WORD}]")
        return signs
    scales = _tensor(checkpoint, f"{name}.{leaf}h")
    if scales.dtype != "F16" or scales.shape != (length,):
        raise _wrong(scales, f"scales of {length} values are F16 [{length}]")
    return scales


def _codebook(checkpoint: Checkpoint, name: str) -> Codebook:
    found = [marker for marker in MARKERS if f"{name}.{marker}" in checkpoint.tensors]
    if len(found) > 1:
        raise TensorError(f"{name} has two markers of a codebook, mcg and mul1", where=str(checkpoint.path))
    for marker in found:
        info = checkpoint.tensors[f"{name}.{marker}"]
        if math.prod(info.shape) > 1:
            raise _wrong(info, "a marker has one value at most")
    return found[0] if found else "3inst"


def _tensor(checkpoint: Checkpoint, name: str) -> TensorInfo:
    info = checkpoint.tensors.get(name)
    if info is None:
        raise TensorError(f"tensor {shown(name)} is missing", where=str(checkpoint.path))
    return info


def _wrong(info: TensorInfo, needed: str) -> TensorError:
    what = f"tensor {shown(info.name)} is {info.dtype} {list(info.shape)}: {needed}"
    return TensorError(what, where=f"{info.path}:{info.offset}")


def refuse_exports(checkpoint: Checkpoint) -> None:
    """Raises DataError for exports whose experts are not the matrices that the model was quantised to: cut for a number
    of ranks already, each piece perhaps with scales of its own, or with their inner channels in another order."""
    names = checkpoint.tensors
    for what, found in (
        ("a rank-sliced export: its experts were cut for some number of ranks", filter(RANK_SLICED.search, names)),
        ("a permuted export: the inner channels of its experts are in another order", _permuted(checkpoint)),
        ("an export of another kind: its experts have tensors that are not EXL3's", _unknown(names)),
    ):
        first = next(iter(found), None)
        if first is not None:
            raise DataError(
                f"is {what} ({shown(first)})",
                where=str(checkpoint.path),
                hint="use the EXL3 checkpoint that it was made of, as exllamav3's converter writes it",
            )


def _permuted(checkpoint: Checkpoint) -> Iterable[str]:
    yield from (name for name in checkpoint.tensors if ".experts." in name and PERMUTED.search(_leaf(name)))
    quantised = checkpoint.config.get("quantization_config")
    if isinstance(quantised, dict):
        yield from _keys(quantised, "quantization_config")


def _keys(found: Mapping[str, Any], at: str) -> Iterable[str]:
    for key, value in found.items():
        here = f"{at}.{key}"
        if isinstance(value, dict):
            yield from _keys(value, here)
        elif PERMUTED.search(key) and value not in (False, None, "none", 0, ""):
            yield here


def _unknown(names: Iterable[str]) -> Iterable[str]:
    return (name for name in names if (found := LEAF.search(name)) and found["leaf"] not in KNOWN | OTHERS)


def _leaf(name: str) -> str:
    return name.rpartition(".experts.")[2]
