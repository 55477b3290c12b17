"""What a GPU is told to do with a trellis's words, without one: its instructions, read by a small machine here, and the
layout that Triton gives the tensors."""

import re
from collections.abc import Callable
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

Words = np.ndarray  # uint64, each below 2^32
MASK = np.uint64(0xFFFFFFFF)
KINDS = [(half, book) for book, name in enumerate(CODEBOOKS) for half in widths(name)]


def word(number: int, like: Words) -> Words:
    return np.full_like(like, number)


def halves(words: Words) -> np.ndarray:
    """[.., 2] float64: the lower first."""
    return words.astype(np.uint32).view(np.float16).reshape(*words.shape, 2).astype(np.float64)


def of_halves(values: np.ndarray) -> Words:
    return values.astype(np.float16).view(np.uint32)[..., 0].astype(np.uint64)


def permuted(a: Words, b: Words, selector: Words) -> Words:
    byte = [(a >> np.uint64(8 * n)) & np.uint64(0xFF) for n in range(4)]
    byte += [(b >> np.uint64(8 * n)) & np.uint64(0xFF) for n in range(4)]
    picks = [int(selector.flat[0]) >> (4 * n) & 7 for n in range(4)]
    return sum(byte[pick] << np.uint64(8 * n) for n, pick in enumerate(picks))  # type: ignore[return-value]


def logic(a: Words, b: Words, c: Words, which: Words) -> Words:
    result = np.zeros_like(a)
    for row in range(8):
        if int(which.flat[0]) >> row & 1:
            terms = [x if row >> (2 - n) & 1 else x ^ MASK for n, x in enumerate((a, b, c))]
            result |= terms[0] & terms[1] & terms[2]
    return result


def bytes_added(a: Words, b: Words, c: Words) -> Words:
    return c + sum(
        ((a >> np.uint64(8 * n)) & np.uint64(255)) * ((b >> np.uint64(8 * n)) & np.uint64(255)) for n in range(4)
    )


MEANS: dict[str, Callable[..., Words]] = {
    "shf.r.wrap.b32": lambda low, high, by: ((high << np.uint64(32) | low) >> (by & np.uint64(31))) & MASK,
    "mul.lo.u32": lambda a, b: (a * b) & MASK,
    "mad.lo.u32": lambda a, b, c: (a * b + c) & MASK,
    "prmt.b32": permuted,
    "lop3.b32": logic,
    "dp4a.u32.u32": bytes_added,
    "add.rn.f16x2": lambda a, b: of_halves(halves(a) + halves(b)),
    "fma.rn.f16x2": lambda a, b, c: of_halves(halves(a) * halves(b) + halves(c)),
    "mov.b32": lambda a: a,
}  # fmt: skip


def carried_out(text: str, operands: list[Words]) -> dict[str, Words]:
    """Every register and output after the instructions."""
    at = {f"${n}": value for n, value in enumerate(operands) if value is not None}
    like = operands[-1]

    def value(name: str) -> Words:
        pair = re.fullmatch(r"\{(\w+), (\w+)\}", name)
        if pair:
            return at[pair[1]] | at[pair[2]] << np.uint64(16)
        return at[name] if name in at else word(int(name, 0), like)

    for line in re.findall(r"[^;{}]*(?:\{[^;{}]*\}[^;{}]*)*;", text.strip()[1:-1]):
        name, rest = line.strip(" \n;").split(maxsplit=1)
        if name == ".reg":
            continue
        out, *inputs = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        found = MEANS[name](*map(value, inputs))
        parts = re.fullmatch(r"\{(\w+), (\w+)\}", out)
        if parts:
            at[parts[1]], at[parts[2]] = found & np.uint64(0xFFFF), found >> np.uint64(16)
        else:
            at[out] = found
    return at


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
