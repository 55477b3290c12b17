"""What a GPU is told to do with a trellis's words, without one: its instructions, read by a small machine, and the
layout that Triton gives the tensors."""

import re
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.instructions import listing, loop
from kernels import exl3_triton
from kernels.exl3 import table
from kernels.exl3_lanes_triton import beyond, decoding, end_of, group_of, product
from kernels.exl3_record import CODEBOOKS, widths
from tests.kernels.instructions import Words, carried_out, halves

KINDS = [(half, book) for book, name in enumerate(CODEBOOKS) for half in widths(name)]


@pytest.mark.parametrize(("half", "book"), KINDS)
def test_the_instructions_give_each_registers_number(half: int, book: int):
    draw = np.random.default_rng(half * 3 + book)
    group = group_of(half)
    last, before = (draw.integers(0, 1 << 32, 4096, dtype=np.uint64) for _ in range(2))
    bits = group * half // 2
    ends = (draw.integers(0, 256 // group, 4096) + 1) * bits - 1
    skip = (31 - (ends & 31)).astype(np.uint64)
    none: list[Words] = [None] * group  # type: ignore[list-item]
    found = carried_out(decoding(half, book), [*none, last, before, skip, skip + np.uint64(beyond(half))])
    numbers = table(CODEBOOKS[book], torch.device("cpu")).numpy()
    for weight in range(group):
        by = skip + np.uint64(end_of(half, weight))
        span = np.where(by == 0, last, (last >> by) | (before << (np.uint64(32) - by))) if int(by.max()) < 32 else None
        wide = [int(b) << 32 | int(a) for a, b in zip(last, before, strict=True)]
        states = np.array([one >> int(n) & 0xFFFF for one, n in zip(wide, by, strict=True)])
        assert span is None or np.array_equal(states, (span & np.uint64(0xFFFF)).astype(states.dtype))
        got = halves(found[f"${weight}"])
        assert np.array_equal(got[:, 0], numbers[states])
        assert np.isfinite(got[:, 1]).all(), "what is multiplied by zero must be a number"


def compiled(half_bits: int) -> Any:
    """Of gate and up, with mcg, for sm_90."""
    shape = exl3_triton.DECODE
    constants = {"DOWN_SIDE": False, "MASK": 1 << (32 + half_bits), "BLOCKS": 1, "ASM": True, "SPLITS": 4, **shape}
    types = {"slots": "*u8", "table": "*i32", "x": "*i32", "parts": "*fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in product.arg_names}
    whole = {
        (at,): [["tt.divisibility", 16]]
        for at, (name, kind) in enumerate(signature.items())
        if kind != "constexpr" and name not in ("items", "count")
    }
    source = ASTSource(fn=product, signature=signature, constexprs=constants, attrs=whole)
    options = {"num_warps": shape["WARPS"]}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def test_all_tensors_have_a_value_a_lane_and_nothing_goes_through_shared_memory():
    """A weight takes at most six and a half operations of a lane, all that a step does counted: see docs/results.md."""
    made, shape = compiled(6), exl3_triton.DECODE
    layouts = re.findall(r"^#\S+ = (#ttg.*)$", made.asm["ttgir"], re.M)
    assert layouts == [
        f"#ttg.blocked<{{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [{shape['WARPS']}], order = [0]}}>"
    ]
    assert "convert_layout" not in made.asm["ttgir"]
    assert made.metadata.shared == 0
    weights = 8 * shape["DOWN"] * shape["ACROSS"]  # of a lane
    assert loop(listing(made.asm["cubin"])).total() <= 6.5 * weights
