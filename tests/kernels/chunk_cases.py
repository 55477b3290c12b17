"""Triton's forms of a prompt chunk's operations against their references: run by `test_chunk_triton.py` in the
interpreter, and on a GPU. Outputs are poisoned; errors are relative, in the Euclidean norm.

python tests/kernels/chunk_cases.py cpu|cuda [name of a case]"""

import sys

import torch

from kernels import attention_chunk_triton, hyper, hyper_chunk_triton, hyper_triton, linear_chunk_triton
from kernels.attention import latent_attention
from kernels.linear_triton import Ending
from kernels.norm import rms_norm
from kernels.rope import frequencies, rotate_, rotation
from kernels.swiglu import clamped_swiglu
from tests.kernels.decode_cases import (
    LARGE,
    draw,
    fp8,
    half,
    moved,
    n,
    parts_of,
    poison,
    randn,
    stored,
    there,
    within,
)  # fmt: skip


def case_products() -> None:
    for outs, width, rows in [(96, 160, 37), (70, 96, 17)] + ([(5120, 4096, 600), (1792, 5120, 100)] if LARGE else []):
        weight, x = fp8(outs, width), n.activation(stored(rows, width))
        poison()
        assert torch.equal(linear_chunk_triton.dense(moved(weight)).float().cpu(), weight.dense(torch.float32))
        wanted = (x.double() @ weight.dense(torch.float64).t()).float()
        within(
            f"product {outs}x{width}, {rows} rows", linear_chunk_triton.product(half(x), moved(weight)), wanted, 1e-5
        )
        plain, y = stored(outs, width), stored(rows, width)
        within("bf16", linear_chunk_triton.product(half(y), half(plain)), y @ plain.t(), 1e-5)


def case_groups() -> None:
    for groups, outs, width, rows in [(2, 32, 128, 19)] + ([(4, 1024, 4096, 300)] if LARGE else []):
        weight, x = fp8(groups * outs, width), stored(rows, groups, width)
        dense = weight.dense(torch.float64).view(groups, outs, width)
        exact = torch.einsum("tgk,gnk->tgn", x.double(), dense).flatten(1).float()
        poison()
        got = linear_chunk_triton.grouped(half(x).view(rows, -1), moved(weight), groups)
        within(f"groups {groups}x{outs}x{width}", got.transpose(0, 1).flatten(1), exact, 1e-5)
        poison()
        ended = linear_chunk_triton.ended(got, Ending.ACTIVATION)
        own = got.cpu().transpose(0, 1).flatten(1).contiguous()
        assert torch.equal(ended.float().cpu(), n.activation(n.store(own))), "another rounding"


def case_swiglu() -> None:
    for half_width, rows, limit in [(96, 19, 2.0), (1056, 3, 10.0)] + ([(1152, 500, 10.0)] if LARGE else []):
        x = randn(1, rows, 2 * half_width) * 3
        poison()
        got = linear_chunk_triton.ended(there(x), Ending.SWIGLU, limit)
        wanted = n.activation(n.store(clamped_swiglu(n.store(x[0]), limit)))
        within(f"swiglu of {half_width}", got, wanted, 2e-2)


def case_hyper() -> None:
    for rows, width, hidden in [(70, 4, 96), (3, 4, 160), (20, 2, 64)] + ([(300, 4, 5120)] if LARGE else []):
        gates = width * (2 + width)
        streams, output = stored(rows, width, hidden), randn(rows, hidden)
        fn, scale, base = randn(gates, width * hidden) / hidden**0.5, torch.ones(gates) * 0.3, randn(gates) / 4
        norm, pre = 1 + randn(hidden) / 8, torch.rand(rows, width, generator=draw)
        first = hyper.mix(streams, fn, scale, base, 20, 1e-6)
        new = n.store(hyper.expand(streams, n.store(output), first.post, first.comb))
        second = hyper.mix(new, fn, scale, base, 20, 1e-6)
        x = n.store(rms_norm(n.store(hyper.collapse(new, pre)), norm, 1e-20))
        by = hyper_triton.Mixer(there(fn), there(scale), there(base), 20, 1e-6, there(norm), 1e-20)
        poison()
        held, partial = hyper_chunk_triton.spread(half(streams), None, None, by.fn)
        mixed = hyper_triton.finish(partial, held, there(pre), by)
        within(f"post, {rows} rows of {hidden}", mixed.post, first.post, 1e-5)
        within("comb", mixed.comb, first.comb, 1e-5)
        poison()
        held, partial = hyper_chunk_triton.spread(held, there(output), mixed, by.fn)
        within("streams", held, new, 1e-3)
        mixed = hyper_triton.finish(partial, held, there(pre), by)
        within("pre", mixed.pre, second.pre, 2e-4)
        within("input", mixed.x, x, 2e-3)


def case_attention() -> None:
    shapes = [(8, 64, 16, 32, 0, 40, 70, 1), (3, 96, 16, 32, 40, 0, 37, 2), (4, 64, 16, 64, 24, 5, 9, 1)]
    large = [(32, 512, 64, 128, 512, 2000, 70, 1), (64, 512, 64, 128, 512, 100, 9, 2)]
    for heads, width, rope, window, selected, start, rows, ratio in shapes + (large if LARGE else []):
        floor = start + 3 if start == 5 else 0
        near = stored(window - 1 + rows, width)
        query, pool = randn(rows, heads, width) * 2, stored(900, width)
        positions = torch.arange(start, start + rows)
        places = torch.full((rows, max(1, selected)), -1, dtype=torch.int32)
        for i, position in enumerate(positions.tolist()):
            many = min((position + 1) // ratio, selected)
            places[i, :many] = torch.randperm(900, generator=draw)[:many].to(torch.int32)
        sink, turn = randn(heads), rotation(positions, frequencies(rope, 10000.0, None))
        turned, wanted = n.store(rotate_(n.store(query), turn)), []
        for i in range(rows):
            reach = positions[i] - window + 1 + torch.arange(window)
            seen = torch.cat([near[i : i + window][reach >= floor], pool[places[i][places[i] >= 0].long()]])
            wanted.append(latent_attention(turned[i : i + 1], seen[None], None, sink, width**-0.5, n.probability))
        exact = n.store(rotate_(n.store(torch.cat(wanted)), turn.conj()))
        which = (half(pool), there(places)) if selected else (None, None)
        given = near.clone()
        given[: max(0, floor - start + window - 1)] = 1e4  # rows that do not exist
        poison()
        got = attention_chunk_triton.attend(
            there(query), *parts_of(turn), half(given), start, floor, *which, ratio, there(sink), width**-0.5
        )
        within(f"{heads} heads of {width}, {window} + {selected} rows from {start}", got, exact, 6e-3)
        alone = attention_chunk_triton.attend(
            there(query[3:4]), *(part[3:4] for part in parts_of(turn)), half(given[3 : 3 + window]), start + 3, floor,
            which[0], None if which[1] is None else which[1][3:4], ratio, there(sink), width**-0.5,
        )  # fmt: skip
        assert torch.equal(alone[0], got[3]), "a row depends on its company"


CASES = {name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")}

if __name__ == "__main__":
    for name in sys.argv[2:] or CASES:
        print(name)
        CASES[name]()
    print("ok")
