"""A small machine that carries out what kernels tell a GPU in its own instructions, on arrays of words."""

import re
from collections.abc import Callable

import numpy as np

Words = np.ndarray  # uint64, each below 2^32
MASK = np.uint64(0xFFFFFFFF)


def word(number: int, like: Words) -> Words:
    return np.full_like(like, number)


def halves(words: Words) -> np.ndarray:
    """[.., 2] float64: the lower first."""
    return words.astype(np.uint32).view(np.float16).reshape(*words.shape, 2).astype(np.float64)


def of_halves(values: np.ndarray) -> Words:
    return values.astype(np.float16).view(np.uint32)[..., 0].astype(np.uint64)


def brains(words: Words) -> np.ndarray:
    """[.., 2] float64 of bf16: the lower first."""
    both = np.stack([words << np.uint64(16) & MASK, words & np.uint64(0xFFFF0000)], -1)
    return both.astype(np.uint32).view(np.float32).astype(np.float64)


def of_brains(values: np.ndarray) -> Words:
    """Of values that bf16 holds."""
    words = values.astype(np.float32).view(np.uint32)
    assert not (words & 0xFFFF).any(), "bf16 would round it"
    return (words[..., 0] >> 16 | words[..., 1]).astype(np.uint64)


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
    "fma.rn.bf16x2": lambda a, b, c: of_brains(brains(a) * brains(b) + brains(c)),
    "and.b32": lambda a, b: a & b,
    "shr.b32": lambda a, by: a >> by,
    "shl.b32": lambda a, by: a << by & MASK,
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
