"""Triton's forms of a decode step's operations against their references: run by `test_decode_triton.py` in the
interpreter, and on a GPU. Outputs are poisoned; errors are relative, in the Euclidean norm.

python tests/kernels/decode_cases.py cpu|cuda [name of a case]"""

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from kernels import (
    attention_triton,
    compressor_triton,
    demand_triton,
    engram,
    engram_triton,
    hyper,
    hyper_triton,
    indexer_triton,
    latents_triton,
    linear_triton,
    router,
    router_triton,
    sampling_triton,
)
from kernels.attention import latent_attention
from kernels.compressor import pool_groups
from kernels.formats import fp8_rows
from kernels.indexer import best, candidate_blocks, index_scores, limit_to_blocks_
from kernels.linear import Fp8Matrix, grouped_linear
from kernels.linear_triton import Ending
from kernels.norm import rms_norm
from kernels.numerics import NATIVE
from kernels.rope import frequencies, rotate_, rotation
from kernels.rows import matmul
from kernels.swiglu import clamped_swiglu
from tided.engine import sampling
from tided.engine.types import Sampling
from tided.experts.tables import DemandTap, Together

n = NATIVE
DEVICE = torch.device(sys.argv[1] if sys.argv[0].endswith("_cases.py") else "cpu")
LARGE = DEVICE.type == "cuda"
draw = torch.Generator().manual_seed(7)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw)


def stored(*shape: int) -> Tensor:
    """fp32 that bf16 holds."""
    return n.store(randn(*shape))


def half(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(DEVICE)


def there(x: Tensor) -> Tensor:
    return x.to(DEVICE)


def poison() -> None:
    """What the next allocations get is full of numbers that no sum survives."""
    if LARGE:
        torch.cuda.synchronize()
        blocks = [torch.full((1 << size,), float("nan"), device=DEVICE) for size in range(8, 23) for _ in range(2)]
        del blocks


def error(got: Tensor, wanted: Tensor) -> float:
    got = got.float().cpu()
    assert torch.isfinite(got).all(), "an output was not written"
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-20))


def within(what: str, got: Tensor, wanted: Tensor, most: float) -> None:
    found = error(got, wanted)
    print(f"  {what}: {found:.1e}")
    assert found <= most, f"{what}: {found:.2e}, at most {most:.0e}"


def same_rows(compute: Callable[[int, int], Tensor], rows: int, what: str) -> None:
    """compute(first, last) of some rows: each has the bits that it has alone."""
    together = compute(0, rows)
    for row in range(rows):
        assert torch.equal(compute(row, row + 1)[0], together[row]), f"{what}: a row depends on its company"


def fp8(outs: int, width: int) -> Fp8Matrix:
    """Codes without NaN; scales that keep results near one."""
    codes = torch.randint(0, 256, (outs, width), dtype=torch.uint8, generator=draw)
    codes[(codes & 0x7F) == 0x7F] = 0
    scale = torch.randint(113, 119, (-(-outs // 32), -(-width // 32)), dtype=torch.uint8, generator=draw)
    return Fp8Matrix(codes, scale)


def moved(weight: Fp8Matrix) -> Fp8Matrix:
    return Fp8Matrix(there(weight.codes), there(weight.scale))


def case_linear() -> None:
    shapes = [(96, 160, 3), (64, 128, 1), (32, 256, 11)]
    if LARGE:
        shapes += [(16384, 1280, 6), (5120, 4096, 16), (1792, 5120, 1)]
    for outs, width, rows in shapes:
        weight, x = fp8(outs, width), n.activation(stored(rows, width))
        exact = x.double() @ weight.dense(torch.float64).t()
        exact32, given, on = exact.float(), half(x), moved(weight)
        poison()
        within(f"fp8 {outs}x{width}, {rows} rows", linear_triton.linear(given, on, Ending.SUM), exact32, 1e-5)
        within("in parts", linear_triton.linear(given, on, Ending.PARTS, split=2).sum(0), exact32, 1e-5)
        plain, y = stored(outs, width) / 8, stored(rows, width)
        within("bf16", linear_triton.linear(half(y), half(plain), Ending.SUM), matmul(y, plain), 1e-5)
        for split in (1, 2, None):
            stored_, activation = n.store(exact32), n.activation(n.store(exact32))
            poison()
            within("stored", linear_triton.linear(given, on, Ending.STORED, split=split), stored_, 2e-3)
            within("activation", linear_triton.linear(given, on, Ending.ACTIVATION, split=split), activation, 2e-2)
            before = randn(rows, outs)
            added = linear_triton.linear(given, on, Ending.ADDED, out=there(before.clone()), split=split)
            within("added", added, before + exact32, 1e-5)
            if LARGE or rows <= 8:  # numpy multiplies as it pleases
                alone = lambda a, b, x=given, w=on, s=split: linear_triton.linear(x[a:b], w, Ending.SUM, split=s)  # noqa: E731
                same_rows(alone, rows, "linear")
    weight, x = moved(fp8(64, 640)), half(n.activation(stored(2, 640)))
    total = torch.zeros(2, 64, device=DEVICE)
    for part in linear_triton.linear(x, weight, Ending.PARTS, split=5):
        total += part
    assert torch.equal(total, linear_triton.linear(x, weight, Ending.SUM, split=5)), "parts are added in another order"
    assert not linear_triton._arrived(DEVICE).any(), "a launch left its count"


def case_small_codes() -> None:
    """Codes below 2^-6 alone, which as bf16 x 2^-120 are subnormal."""
    for outs, width, rows in [(32, 256, 2)] + ([(4096, 4096, 6)] if LARGE else []):
        codes = torch.randint(0, 8, (outs, width), dtype=torch.uint8, generator=draw)
        codes |= torch.randint(0, 2, (outs, width), dtype=torch.uint8, generator=draw) << 7
        weight = Fp8Matrix(codes, torch.full((outs // 32, width // 32), 127, dtype=torch.uint8))
        x = n.activation(stored(rows, width))
        exact = (x.double() @ weight.dense(torch.float64).t()).float()
        poison()
        within(f"small codes {outs}x{width}", linear_triton.linear(half(x), moved(weight), Ending.SUM), exact, 1e-5)


def case_swiglu() -> None:
    for outs, width, rows, limit in [(64, 96, 3, 2.0), (128, 416, 2, 2.0)] + ([(2304, 5120, 6, 10.0)] if LARGE else []):
        weight, x = fp8(outs, width), n.activation(stored(rows, width))
        product = n.store((x.double() @ weight.dense(torch.float64).t()).float())
        wanted = n.activation(n.store(clamped_swiglu(product, limit)))
        poison()
        for split in (1, 3, None):
            got = linear_triton.linear(half(x), moved(weight), Ending.SWIGLU, limit=limit, split=split)
            within(f"swiglu {outs}x{width}", got, wanted, 2e-2)


def case_grouped() -> None:
    for groups, outs, width, rows in [(2, 32, 128, 3)] + ([(4, 1024, 4096, 6)] if LARGE else []):
        weight, x = fp8(groups * outs, width), stored(rows, groups, width)
        dense = weight.dense(torch.float64).view(groups, outs, width)
        wanted = n.activation(n.store(grouped_linear(x.double(), dense).float()))
        poison()
        got = linear_triton.linear(half(x).view(rows, -1), moved(weight), Ending.ACTIVATION, groups=groups)
        within(f"groups {groups}x{outs}x{width}", got, wanted, 2e-2)


def case_hyper() -> None:
    for rows, width, hidden in [(3, 4, 160), (1, 4, 128)] + ([(6, 4, 5120)] if LARGE else []):
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
        held, partial = hyper_triton.spread(half(streams), None, None, by.fn)
        mixed = hyper_triton.finish(partial, held, there(pre), by)
        within(f"post, {rows} rows of {hidden}", mixed.post, first.post, 1e-5)
        within("comb", mixed.comb, first.comb, 1e-5)
        apart = hyper_triton.spread(held, there(split(output)), mixed, None)[0]
        within("streams of two ranks", apart, new, 1e-3)
        held, partial = hyper_triton.spread(held, there(output)[None], mixed, by.fn)
        within("streams", held, new, 1e-3)
        mixed = hyper_triton.finish(partial, held, there(pre), by)
        within("pre", mixed.pre, second.pre, 2e-4)
        within("input", mixed.x, x, 2e-3)
        within("rounded input", mixed.rounded, n.activation(x), 2e-2)
        last = hyper_triton.collapse(held, there(pre), by.norm, 1e-20)
        assert torch.equal(last[0], mixed.x)
        assert torch.equal(last[1], mixed.rounded)
        plain = hyper_triton.collapse(held, there(pre), None, 1e-20)
        within("collapse", plain[0], n.store(hyper.collapse(new, pre)), 2e-3)


class Lanes:
    """Rows of a pass: (lane, position) of each, in order; what lanes own lies in one tensor a kind, a place a lane."""

    def __init__(self, rows: list[tuple[int, int]], pages: Tensor | None = None, **owned: Tensor) -> None:
        """`pages` [lanes, n] int64; owned: windows, recent [lanes, ..]."""
        self.rows, self.kinds = rows, owned
        self.owned = {kind: there(value) for kind, value in owned.items()}
        self.pages = there(torch.zeros(8, 1, dtype=torch.int64) if pages is None else pages)
        firsts: dict[int, tuple[int, int]] = {}
        for i, (lane, position) in enumerate(rows):
            firsts.setdefault(lane, (i, position))
        fields = [
            [0, at, lane, *(self.address(kind, lane) for kind in ("windows", "pages", "recent")), *firsts[lane]]
            for lane, at in rows
        ]
        self.meta = there(torch.tensor(fields, dtype=torch.int64))

    def address(self, kind: str, lane: int) -> int:
        of = self.pages if kind == "pages" else self.owned.get(kind)
        return 0 if of is None else of[lane].data_ptr()

    @property
    def positions(self) -> Tensor:
        return torch.tensor([position for _, position in self.rows])

    def turn(self, rope: int, ratio: int = 1) -> Tensor:
        return rotation(self.positions // ratio * ratio, frequencies(rope, 10000.0, None))


def parts_of(turn: Tensor) -> tuple[Tensor, Tensor]:
    return there(turn.real.contiguous()), there(turn.imag.contiguous())


def split(whole: Tensor, count: int = 2) -> Tensor:
    """[..] -> [count, ..], parts of the sum."""
    first = torch.randn(whole.shape, generator=draw)
    return torch.stack([first, whole - first]) if count == 2 else whole[None]


def case_latents() -> None:
    for rank, width, rope in [(64, 64, 16)] + ([(1280, 512, 64)] if LARGE else []):
        lanes = Lanes([(0, 7), (0, 8), (2, 100_003)], windows=torch.zeros(3, 2, 32, width, dtype=torch.bfloat16))
        raw, q_norm, kv_norm = randn(3, rank + width), 1 + randn(rank) / 8, 1 + randn(width) / 8
        turn = lanes.turn(rope)
        wanted = n.activation(n.store(rms_norm(n.store(raw[:, :rank]), q_norm, 1e-20)))
        row = n.store(rms_norm(n.store(raw[:, rank:]), kv_norm, 1e-20))
        row = n.window(n.store(rotate_(row, turn)))
        held = torch.full((2, 3, width), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        for layer in range(2):
            query = latents_triton.latents(
                there(raw[None]), there(q_norm), there(kv_norm), *parts_of(turn), 1e-20, held[layer]
            )
        within(f"query latent of {rank}", query, wanted, 2e-2)
        alone = latents_triton.normed(there(raw[None, :, :rank].contiguous()), there(q_norm), 1e-20)
        assert torch.equal(alone, query)
        other = torch.full((3, width), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        parts = there(raw[None, :, rank:].contiguous())
        latents_triton.window_row(parts, there(kv_norm), *parts_of(turn), 1e-20, other)
        assert torch.equal(other, held[0])
        within(f"window row of {width}", held[1], row, 2e-2)
        latents_triton.keep_rows(lanes.meta, held, 32)
        rings = lanes.owned["windows"].cpu()
        for i, (lane, position) in enumerate(lanes.rows):
            assert torch.equal(rings[lane, :, position % 32], held[:, i].cpu()), "a row is not in its ring"
        assert int((rings != 0).any(-1).sum()) == 6, "a row is where none belongs"


def case_attention() -> None:
    shapes = [(8, 64, 16, 32, 0), (8, 64, 16, 64, 40), (4, 96, 16, 32, 5)]
    for heads, width, rope, window, selected in shapes + ([(32, 512, 64, 128, 512)] if LARGE else []):
        rows = [(0, 3), (1, 5 * window + 3), (1, 5 * window + 4), (1, 5 * window + 5), (2, window - 1)]
        rings, layer = stored(3, 2, window, width), 1
        lanes = Lanes(rows, windows=rings.bfloat16())
        query, held, pool = stored(5, heads, width), stored(5, width), stored(300, width)
        places = torch.stack([torch.randperm(300, generator=draw)[:selected] for _ in rows]).to(torch.int32)
        places[0, selected // 2 :] = -1
        sink, turn, wanted = randn(heads), lanes.turn(rope), []
        for i, (lane, position) in enumerate(rows):
            ring = rings[lane, layer].clone()
            for j in range(i + 1):
                if rows[j][0] == lane:
                    ring[rows[j][1] % window] = held[j]
            seen = torch.cat([ring[: position + 1], pool[places[i][places[i] >= 0].long()]])
            turned = n.store(rotate_(query[i : i + 1].clone(), turn[i : i + 1]))
            out = latent_attention(turned, seen[None], None, sink, width**-0.5, n.probability)
            wanted.append(n.store(rotate_(n.store(out), turn[i : i + 1].conj())))
        given = (half(query), *parts_of(turn), lanes.meta, half(held), layer, window)
        which = (half(pool), there(places)) if selected else (None, None)
        poison()
        got = attention_triton.attend(*given, *which, there(sink), width**-0.5)
        within(f"{heads} heads of {width}, {window} + {selected} rows", got, torch.cat(wanted), 5e-3)


def case_router() -> None:
    for experts, top_k, rows in [(8, 3, 5), (48, 4, 3), (384, 6, 6)]:
        z, bias = randn(rows, experts) * 4, randn(experts) / 4
        z[0] = -30.0 - torch.rand(experts, generator=draw)  # scores that keep few bits beside one
        z[1, 1], z[1, 2], bias[1], bias[2] = 30.0, 30.0, 0.5, 0.5  # equals: the lower first
        routable = torch.rand(experts, generator=draw) < 0.7
        routable[:top_k] = True
        score = torch.sqrt(torch.nn.functional.softplus(z))
        wanted = router.route(score, bias, routable, top_k, 1.5)
        slot_of = torch.where(routable, torch.arange(experts) + 100, -1).to(torch.int32)
        out = router_triton.room(rows, top_k, device=DEVICE)
        router_triton.route(there(split(z, 1)), there(bias), there(routable), there(slot_of), top_k, 1.5, out)
        first = out.wanted[1].tolist()
        assert first.index(1) < first.index(2), "of equals, not the lower first"
        swapped = wanted.wanted.clone()  # the reference leaves the order of equals to the device
        swapped[1] = torch.tensor(first) if set(first) == set(swapped[1].tolist()) else -1
        assert torch.equal(out.wanted.cpu(), swapped), "another wish"
        assert torch.equal(out.slots.sort(1).values.cpu(), slot_of[wanted.ids].sort(1).values), "another choice"
        assert torch.equal(out.missed.cpu(), ~routable[out.wanted.cpu()]), "another miss"
        within(f"{experts} experts: weights", out.weights, wanted.weights, 1e-6)
        within("wanted scores", out.wanted_scores, wanted.wanted_scores, 1e-6)
        within("wanted weights", out.wanted_weights, wanted.wanted_weights, 1e-6)


def case_compressor() -> None:
    for width, key, rope, ratio in [(64, 64, 16, 2), (64, 32, 16, 1)] + ([(512, 128, 64, 2)] if LARGE else []):
        size, tokens = 128 // ratio, compressor_triton.RECENT_TOKENS
        rows = [(0, 6), (0, 7), (1, 4), (2, 33), (2, 34), (2, 35), (3, 130)]
        recent = randn(4, 2, tokens, 2, width)
        pages = torch.tensor([[3, 0], [5, 0], [1, 0], [4, 2]])
        lanes = Lanes(rows, pages, recent=recent)
        raw, wk = randn(len(rows), width * min(ratio, 2)), randn(key, width) / width**0.5
        norm, k_norm = 1 + randn(width) / 8, 1 + randn(key) / 8
        latents, places, keys, held = [], [], [], []
        for i, (lane, position) in enumerate(rows):
            group = [
                next(
                    (raw[j] for j, row in enumerate(rows) if row == (lane, at)), recent[lane, 1, at % tokens].flatten()
                )
                for at in range(position - ratio + 1, position + 1)
            ]
            together = torch.stack([token[: 2 * width] for token in group])
            pooled = together if ratio == 1 else pool_groups(together[None, :, :width], together[None, :, width:])
            latents.append(n.store(rms_norm(n.store(pooled), norm, 1e-20)))
            if (position + 1) % ratio == 0:
                turn, number = lanes.turn(rope, ratio)[i : i + 1], position // ratio
                places.append(int(pages[lane, number // size]) * size + number % size)
                made = n.store(rms_norm(n.store(latents[-1] @ wk.t()), k_norm, 1e-20))
                keys.append(n.index(n.store(rotate_(made, turn))))
                held.append(n.latent(n.store(rotate_(latents[-1].clone(), turn))))
        page_rows, page_keys = (torch.zeros(6 * size, columns, dtype=torch.bfloat16) for columns in (width, key))
        page_rows, page_keys = there(page_rows), there(page_keys)
        poison()
        got = compressor_triton.pool(there(split(raw)), lanes.meta, there(norm), 1e-20, 1, ratio)
        within(f"latents of {width}, ratio {ratio}", got, torch.cat(latents), 2e-3)
        made = (torch.cat(latents) @ wk.t())[None]
        compressor_triton.append(
            there(made), lanes.meta, got, there(k_norm), *parts_of(lanes.turn(rope, ratio)), 1e-20, page_rows,
            page_keys, size, ratio,
        )  # fmt: skip
        within("rows", page_rows[places], torch.cat(held), 5e-2)
        within("keys", page_keys[places], torch.cat(keys), 5e-2)
        written = (page_rows != 0).any(-1).cpu()
        assert written.sum() == len(places), "a row is where none belongs"
        if ratio > 1:
            kept = lanes.owned["recent"].cpu()
            for i, (lane, position) in enumerate(rows):
                torch.testing.assert_close(kept[lane, 1, position % tokens].flatten(), raw[i], rtol=0, atol=1e-6)


def case_indexer() -> None:
    shapes = [(4, 64, 16, 2, 16, None), (8, 64, 16, 1, 16, (6, 4)), (3, 64, 16, 1, 30, (48, 3))]
    for heads, dim, rope, ratio, count, pool in shapes + ([(32, 128, 64, 1, 512, (2048, 8))] if LARGE else []):
        most = 40_000 if LARGE and count == 512 else 300
        rows = [(0, most * ratio - 1), (1, 5), (2, count * ratio - 1), (3, 150 * ratio + 1), (3, 150 * ratio + 2)]
        size = 128 // ratio
        pages = torch.stack([torch.randperm(most // size + 1, generator=draw) for _ in range(4)])
        lanes = Lanes(rows, pages)
        raw, weight_raw, held = randn(5, heads * dim), randn(5, heads), n.index(stored((most // size + 1) * size, dim))
        turn, visible = lanes.turn(rope), (lanes.positions + 1) // ratio
        query = n.index(n.store(rotate_(n.store(raw).view(5, heads, dim), turn)))
        weight = n.store(weight_raw) * (dim**-0.5 * heads**-0.5)
        got = indexer_triton.query(there(split(raw, 1)), *parts_of(turn), heads)
        within(f"query of {heads} x {dim}", got, query, 3e-2)
        blocks, block_size = pool or (0, 1)
        bound = blocks * block_size if pool else indexer_triton.UNLIMITED
        least = min(count, bound)
        score = torch.full((5, most), float("nan"), device=DEVICE)
        on = {"ratio": ratio, "page_size": size}
        given = (half(query), there(split(weight_raw, 1)), lanes.meta, half(held))
        indexer_triton.scores(*given, score, None, block_size=block_size, least=least, bound=bound, **on)
        numbers = [torch.arange(int(v)) for v in visible]
        at = [pages[lane, one // size] * size + one % size for (lane, _), one in zip(rows, numbers, strict=True)]
        exact = [index_scores(query[i : i + 1], weight[i : i + 1], held[at[i]]) for i in range(5)]
        # Selections are compared on the kernel's own scores: at the border a last bit decides.
        for i, v in enumerate(visible.tolist()):
            if v > least:
                within(f"scores of {v} entries", score[i, :v], exact[i][0], 1e-5)
                exact[i] = score[i, :v].cpu()[None]
        places = torch.full((5, count), -7, dtype=torch.int32, device=DEVICE)
        indexer_triton.select(score, lanes.meta, places, least=least, **on)
        check_places(places, [best(one, min(count, one.shape[1])) for one in exact], at)
        if pool:
            kept = torch.full((5, -(-most // block_size)), 7, dtype=torch.uint8, device=DEVICE)
            scratch = torch.empty(kept.shape, device=DEVICE)
            indexer_triton.keep_blocks(
                score, lanes.meta, scratch, kept, ratio=ratio, blocks=blocks, block_size=block_size
            )
            for i, v in enumerate(visible.tolist()):
                if v > bound:
                    wanted = candidate_blocks(exact[i], visible[i : i + 1], blocks, block_size)
                    length = -(-v // block_size)
                    mask = torch.zeros(1, length, dtype=torch.uint8).scatter_(1, wanted.long(), 1)
                    assert torch.equal(kept[i, :length].cpu(), mask[0]), "another candidate pool"
                    limit_to_blocks_(exact[i], wanted, block_size)
            indexer_triton.scores(*given, score, kept, block_size=block_size, least=least, bound=bound, **on)
            indexer_triton.select(score, lanes.meta, places, least=least, **on)
            check_places(places, [best(one, min(count, one.shape[1])) for one in exact], at)


def check_places(places: Tensor, chosen: list[tuple[Tensor, Tensor]], at: list[Tensor]) -> None:
    for i, (numbers, valid) in enumerate(chosen):
        wanted = at[i][numbers[0][valid[0]]].tolist()
        got = places[i].tolist()
        assert got == [*wanted, *[-1] * (len(got) - len(wanted))], f"row {i} selects others"


def case_ties() -> None:
    """Many equal scores, and both zeros: the lower entries are taken."""
    for most, count in [(70, 16), (3000, 512)]:
        pages = torch.arange(40)[None].repeat(4, 1)
        lanes = Lanes([(0, most - 1), (1, most - 1), (2, most - 1)], pages)
        score = torch.randint(-2, 3, (3, most), generator=draw).float() * 0.5
        score[1] = torch.where(torch.rand(most, generator=draw) < 0.5, 0.0, -0.0)
        score[2, 5:] = -torch.inf
        places = torch.full((3, count), -7, dtype=torch.int32, device=DEVICE)
        indexer_triton.select(there(score), lanes.meta, places, ratio=1, page_size=128, least=0)
        check_places(places, [best(score[i : i + 1], count) for i in range(3)], [torch.arange(most)] * 3)


def case_engram() -> None:
    for columns, dim, rows, width, hidden in [(4, 32, 3, 4, 96)] + ([(24, 256, 6, 4, 5120)] if LARGE else []):
        raw = torch.randint(0, 256, (rows, columns, dim + dim // 32), dtype=torch.uint8, generator=draw)
        raw[..., :dim][(raw[..., :dim] & 0x7F) == 0x7F] = 0
        raw[..., dim:] = torch.randint(110, 125, (rows, columns, dim // 32), dtype=torch.uint8, generator=draw)
        weights = raw[..., :dim].contiguous().view(torch.float8_e4m3fn)
        looked_up = fp8_rows(weights, raw[..., dim:].contiguous()).flatten(1)
        got = engram_triton.activation(there(raw))
        assert torch.equal(got.float().cpu(), n.activation(looked_up)), "another activation"
        streams, projected, weight = (
            stored(rows, width, hidden),
            stored(rows, (width + 1) * hidden),
            randn(width, hidden),
        )
        keys, value = projected.view(rows, width + 1, hidden)[:, :width], projected.view(rows, -1, hidden)[:, width]
        wanted = n.store(engram.mix(streams, keys, value, weight))
        held = half(streams)
        engram_triton.mix_(held, half(projected), there(weight))
        within(f"streams of {hidden}", held, wanted, 1e-3)


def case_likeliest() -> None:
    for rows, width in [(1, 5), (3, 5000), (2, 33_000)] + ([(6, 129_280)] if LARGE else []):
        logits = torch.randint(-9, 9, (rows, width), generator=draw).float()  # many equals
        logits[-1] = -3.0
        wanted = torch.where(logits == logits.amax(1, keepdim=True), torch.arange(width), width).amin(1)
        for _ in range(2):
            assert torch.equal(sampling_triton.likeliest(there(logits)).cpu(), wanted), f"{rows} rows of {width}"
        for strange in (float("nan"), float("inf"), float("-inf")):
            logits[-1, width // 2] = strange
            got = sampling_triton.likeliest(there(logits)).cpu()
            assert torch.equal(got, torch.cat([wanted[:-1], torch.tensor([-1])])), f"{strange} among {width}"


LAWS = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.95},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.8},
    {"temperature": 8.0, "top_k": 30, "top_p": 0.7},  # of all tokens 0.7 would be hundreds
    {"min_p": 0.1},
    {"top_p": 0.0},
    {"top_p": 1e-12, "top_k": 10**9},
    {"temperature": 1e-300},
    {"temperature": math.inf, "top_p": 0.5},
    {"min_p": 7.0},
    {"top_k": 1},
]


def check_bounds(logits: Tensor, laws: list[dict[str, float]]) -> None:
    """The least weight that top-k and top-p leave is the CPU's: one draw would hardly tell."""
    some = [row for row, law in enumerate(laws) if law.get("temperature", 1.0) > 0 and {"top_k", "top_p"} & law.keys()]
    held, own = there(logits[some].clone()), [Sampling(**laws[row]) for row in some]
    law = there(sampling.laws([(one, 0) for one in own]))
    found = sampling_triton.bounds_of(held, law, sampling_triton.likeliest_and_peaks(held)[1], True, True).cpu()
    for one, row, (by_count, by_share) in zip(own, logits[some], found[:, :, 0].tolist(), strict=True):
        weights = row.double().sub_(row.max()).div_(one.temperature).exp_()
        counts = [(by_count, 0 < one.top_k < len(row)), (by_share, one.top_p < 1)]
        bits = [order - (1 << 31) for order, bounds in counts if bounds]
        values = torch.tensor([word if word >= 0 else word ^ 0x7FFFFFFF for word in bits], dtype=torch.int32)
        own_weights = values.view(torch.float32).double().sub_(row.max()).div_(one.temperature).exp_().tolist()
        wanted = sampling.least_weight(weights, one)
        assert abs(max([one.min_p, *own_weights]) - wanted) <= 1e-12 * wanted, f"{one}: {own_weights}, not {wanted}"


def case_draw() -> None:
    """The token of every law is the one that the CPU draws, whoever is beside it."""
    for width, spread in [(5, 2.0), (300, 0.0), (1500, 4.0)] + [(129_280, by) for by in (0.0, 0.01, 1.0, 4.0)] * LARGE:
        logits = (torch.randn(len(LAWS), width, generator=draw) * spread).round(decimals=2)  # many equals, both zeros
        own = [(Sampling(**law, seed=seed), 17) for seed, law in enumerate(LAWS)]
        wanted = sampling.sample(logits, own)
        for some in ([*range(len(own))], [3, 0]):
            law = there(sampling.laws([own[row] for row in some]))
            top_k, top_p = sampling.bounds_of([own[row] for row in some])
            held = there(logits[some].clone())
            got = sampling_triton.draw(held, law, top_k, top_p).tolist()
            assert got == [wanted[row] for row in some], f"of {width}, {spread}: {got}, not {wanted}"
        check_bounds(logits, LAWS)
        if width in (5, 129_280):
            for strange in (float("nan"), float("inf"), float("-inf")):
                logits[3, width // 2] = strange
                law = there(sampling.laws(own[:4]))
                got = sampling_triton.draw(there(logits[:4].clone()), law, True, True).tolist()
                assert got == [*wanted[:3], -1], f"{strange} among {width}: {got}"


def spare(book: DemandTap) -> list[Tensor]:
    return [part.clone() for part in (book._counts, book._mass, book.uses, book._totals)]


def case_demand() -> None:
    """Against what the books of `tided.experts.tables` do on a CPU."""
    shapes = [(3, 8, 3, 5, 0.3), (2, 48, 4, 1, 0.0)]
    for layers, experts, top_k, rows, light in shapes + ([(40, 384, 6, 16, 0.1)] if LARGE else []):
        books = [DemandTap(4, layers + 1, experts, torch.device(at), light) for at in ("cpu", DEVICE)]
        for read in (False, True):
            wanted = torch.rand(layers, rows, experts, generator=draw).topk(top_k).indices
            missed = torch.rand(wanted.shape, generator=draw) < 0.5
            late = missed & (torch.rand(wanted.shape, generator=draw) < 0.5) if read else None
            weights = torch.softmax(randn(layers, rows, top_k), -1)
            numbers = torch.randperm(layers + 1, generator=draw)[:layers]
            lanes = torch.stack([torch.arange(rows) % 3, torch.full((rows,), 1 << 40)], 1)[:, 0]  # a column, as in use
            parts = (numbers, lanes, wanted, weights * 2, weights, missed, late)
            books[0].record_step(Together(*parts))
            moved_parts = [part if part is None else there(part) for part in parts]
            if LARGE:
                books[1].record_step(Together(*moved_parts))
            else:  # the books would choose the CPU's way
                own = books[1]
                demand_triton.add_demand(*moved_parts, own._counts, own._mass, own.uses, own._totals, light)
            copies = demand_triton.add_demand(*moved_parts, *spare(books[1]), light)
            assert torch.equal(copies[0].cpu(), wanted)
            assert torch.equal(copies[1].cpu(), weights)
        for name in ("counts", "mass", "totals", "uses"):
            within(f"{name}, {layers} layers", getattr(books[1], name), getattr(books[0], name).float(), 1e-6)


def case_some_demand() -> None:
    """Of the rows that are told alone, whatever the others wanted; by a graph on a GPU."""
    layers, experts, top_k, rows = (40, 384, 6, 16) if LARGE else (3, 8, 3, 5)
    books = [DemandTap(4, layers + 1, experts, torch.device(at), 0.1) for at in ("cpu", DEVICE)]
    numbers, lanes = torch.randperm(layers + 1, generator=draw)[:layers], torch.arange(rows) % 3
    parts = [torch.zeros(layers, rows, top_k, dtype=of) for of in (torch.int64, *[torch.float32] * 2, torch.bool)]
    held = Together(there(numbers), there(lanes), *map(there, parts), None)
    standing, places = books[1].standing(held), [torch.zeros(3, *part.shape) for part in (parts[0], parts[2])]
    kept = there(places[0].long()), there(places[1])
    if standing is not None:
        assert not any(bool(part.any()) for part in spare(books[1])), "made, and it left a trace"
    for turn, some in enumerate([range(rows), [0, 2, 3], [4], []]):
        wanted, weights = torch.rand(layers, rows, experts, generator=draw).topk(top_k).indices, randn(*parts[0].shape)
        weights = torch.softmax(weights, -1)
        seen = (wanted, weights * 2, weights, torch.rand(wanted.shape, generator=draw) < 0.5)
        for mine, new in zip(held[2:6], seen, strict=True):
            mine.copy_(new)
        chosen = torch.tensor([*some], dtype=torch.int64)
        if len(chosen):
            books[0].record_step(Together(numbers, lanes, *seen, None).rows(chosen))
        if standing is not None:
            got = standing.add(None if len(chosen) == rows else [*some])
            standing.behind.synchronize()
        else:
            own = books[1]
            told = torch.tensor([turn % 3, *(row in some for row in range(rows))])
            added, all_books = torch.empty(layers, rows, 8), (own._counts, own._mass, own.uses, own._totals)
            demand_triton.add_some_demand(held[:6], all_books, 0.1, told, kept, added)
            got = kept[0][turn % 3], kept[1][turn % 3]
        counts = torch.zeros(rows, 1)
        counts[chosen] = 1
        assert torch.equal(got[1].cpu(), weights * counts)
        assert torch.equal(got[0][:, chosen].cpu(), wanted[:, chosen])
        for name in ("counts", "mass", "totals", "uses"):
            within(f"{name}, turn {turn}", getattr(books[1], name), getattr(books[0], name).float(), 1e-6)


CASES = {name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")}


def main(names: list[str]) -> None:
    for name in names or CASES:
        print(name)
        draw.manual_seed(7)  # a case's numbers do not depend on those before it
        CASES[name]()
    print("ok")


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[2:])
