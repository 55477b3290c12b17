"""Triton's forms of what a decode step of latent attention does, against the references: run by
`test_latent_triton.py` in the interpreter, and on a GPU at the real shapes too.

python tests/kernels/latent_cases.py cpu|cuda [name of a case]"""

import sys

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from kernels import latent_attention_triton, latent_rows, latent_select_triton, router, router_triton
from kernels import latent_decode_triton as between
from kernels.attention import latent_attention
from kernels.indexer import best, index_scores
from kernels.norm import rms_norm
from kernels.numerics import WEIGHTS_ONLY as N
from kernels.partial_attention import partial_attention
from kernels.rope import frequencies, rotate_, rotation
from kernels.swiglu import clamped_swiglu

DEVICE = torch.device(sys.argv[1] if sys.argv[0].endswith("_cases.py") else "cpu")
LARGE = DEVICE.type == "cuda"
draw = torch.Generator().manual_seed(7)
EPS = 1e-6
ONE_ROUNDING = 4e-3  # what a last bit of bf16 is, at most, in the mean


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw)


def stored(*shape: int) -> Tensor:
    return N.store(randn(*shape))


def there(x: Tensor) -> Tensor:
    return x.to(DEVICE)


def half(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(DEVICE)


def near(name: str, got: Tensor, wanted: Tensor, most: float = ONE_ROUNDING) -> None:
    got, wanted = got.float().cpu(), wanted.float()
    assert torch.isfinite(got).all(), name
    off = float((got - wanted).norm() / wanted.norm())
    print(f"  {name}: {off:.1e}")
    assert off < most, name


def angles(positions: Tensor, rope: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    turn = rotation(positions, frequencies(rope, 8e6, None))
    return turn, (there(turn.real.contiguous()), there(turn.imag.contiguous()))


SHAPES = [(2, 4, 48, 64, 16, 64)] + ([(5, 32, 192, 512, 64, 256)] if LARGE else [])  # rows, heads, nope, c, r, v


def case_norms() -> None:
    for rows, width in ((3, 96), *([(4, 6144)] if LARGE else [])):
        x, y, weight = stored(rows, width), randn(rows, width), randn(width)
        near("norm", between.normed(there(y), there(weight), EPS), N.store(rms_norm(N.store(y), weight, EPS)))
        whole = N.store(x + N.store(y))
        total, out = between.added(half(x), there(y), there(weight), EPS)
        assert torch.equal(total.float().cpu(), whole)
        near("sum's norm", out, N.store(rms_norm(whole, weight, EPS)))
        near("unrounded", between.normed(there(y), there(weight), EPS, rounds=False), rms_norm(y, weight, EPS))


def case_heads() -> None:
    for rows, heads, nope, latent, rope, values in SHAPES:
        query, up = randn(rows, heads * (nope + rope)), stored(heads, nope + values, latent)
        turn, (cos, sin) = angles(torch.arange(rows) * 1000 + 5, rope)
        parts = N.store(query).view(rows, heads, -1)
        turned = N.store(rotate_(parts[..., nope:].contiguous(), turn))
        inside = N.store(torch.einsum("thk,hkc->thc", parts[..., :nope], up[:, :nope]))
        got = between.absorbed(there(query), half(up), cos, sin, nope)
        near("absorbed", got[..., :latent], inside)
        near("turned", got[..., latent:], turned)
        gathered = stored(rows, heads, latent)
        wanted = N.store(torch.einsum("thc,hvc->thv", gathered, up[:, nope:]))
        near("brought out", between.brought_out(half(gathered), half(up), nope), wanted.flatten(1))


def case_rows() -> None:
    """Into places of their own; a token that another rank keeps leaves nothing."""
    for rows, _, _, latent, rope, _ in SHAPES:
        joint, norm = randn(rows, latent + rope), randn(latent)
        turn, (cos, sin) = angles(torch.arange(rows) * 777 + 3, rope)
        places = torch.randperm(40, generator=draw)[:rows]
        key = N.store(rotate_(N.store(joint[:, latent:]).contiguous(), turn))
        wanted = torch.cat([N.store(rms_norm(N.store(joint[:, :latent]), norm, EPS)), key], 1)
        given = places.clone()
        given[0] = -1
        for packed in (False, True):
            width = latent_rows.row_bytes(latent, rope) if packed else latent + rope
            pool = torch.zeros(40, width, dtype=torch.uint8 if packed else torch.bfloat16, device=DEVICE)
            between.keep_rows(there(joint), there(norm), EPS, cos, sin, there(given), pool)
            held = pool.cpu()[places[1:]]
            if packed:
                same = (held == latent_rows.pack(wanted, latent)[1:]).float().mean()
                print(f"  bytes as packed: {same:.4f}")
                assert same > 0.97  # a norm's last bit
                held = latent_rows.unpack(held, latent)
            near("rows", held, wanted[1:], 0.04 if packed else ONE_ROUNDING)
            assert int((pool.cpu() != 0).any(1).sum()) == rows - 1


def case_index() -> None:
    """Keys, queries, scores by page, and what is chosen of them."""
    for rows, heads, width, rope, count, sizes in (
        (3, 4, 32, 16, 32, (20, 33, 300)),
        *([(3, 32, 128, 64, 2048, (300, 2049, 9000))] if LARGE else []),
    ):
        turn, (cos, sin) = angles(torch.arange(rows) * 100 + 1, rope)
        x, weight, bias = randn(rows, width), randn(width), randn(width)
        key = N.store(layer_norm(N.store(x), (width,), weight, bias, EPS))
        rotate_(key[:, :rope], turn)
        pages = -(-max(sizes) // 128)
        keys = torch.zeros(rows * pages * 128, width, dtype=torch.bfloat16, device=DEVICE)
        places = torch.tensor([7, -1, 300])
        between.keep_keys(there(x), there(weight), there(bias), EPS, cos, sin, there(places), keys)
        near("keys", keys.cpu()[[7, 300]], N.store(key)[[0, 2]])
        assert int((keys.cpu() != 0).any(1).sum()) == 2
        product, scales = randn(rows, heads * width), randn(rows, heads)
        query = N.store(product).view(rows, heads, width)
        rotate_(query[..., :rope], turn)
        query = N.store(query)
        got = between.index_query(there(product), cos, sin, heads)
        near("query", got, query)
        held = stored(rows * pages * 128, width)
        keys.copy_(held)
        tables = torch.randperm(rows * pages, generator=draw).view(rows, pages)
        on_device = there(tables)
        visible = there(torch.tensor(sizes, dtype=torch.int32))
        out = torch.full((rows, pages * 128), float("nan"), device=DEVICE)
        for least, fills in ((-1, True), (count, False)):
            between.index_scores(
                got, there(scales), on_device, visible, keys, out, 128, least=least, fills=fills
            )  # fmt: skip
        out[2, : sizes[2] : 3] = out[2, 0]  # ties
        chosen = latent_select_triton.select(out, visible, on_device, count, 128)
        for row, size in enumerate(sizes):
            of = held.view(-1, 128, width)[tables[row]].flatten(0, 1)[:size]
            score = index_scores(got[row : row + 1].float().cpu(), scales[row : row + 1] * (width * heads) ** -0.5, of)
            if row < 2:
                near("scores", out[row : row + 1, :size], score, 1e-5)
            assert bool((out[row, size:] == -torch.inf).all())
            numbers, _ = best(out[row : row + 1, :size].cpu(), min(count, size))
            at = tables[row][numbers[0] // 128] * 128 + numbers[0] % 128
            assert torch.equal(chosen[row, : len(at)].long().cpu(), at)
            assert bool((chosen[row, len(at) :] == -1).all())
        numbers, valid = best(out, count)  # without a wait where the device is one
        mine, others = best(out.cpu(), count)
        assert torch.equal(numbers.cpu(), mine)
        assert torch.equal(valid.cpu(), others)


def case_select() -> None:
    """Of contexts that several programs share, with ties at the border."""
    sizes, count = (5000, 40, 2050), 64
    score = randn(3, 5120)
    score[0] = (score[0] * 8).round() / 8
    tables, visible = torch.randperm(120, generator=draw).view(3, 40), torch.tensor(sizes, dtype=torch.int32)
    chosen = latent_select_triton.select(there(score), there(visible), there(tables), count, 128).cpu().long()
    for row, size in enumerate(sizes):
        numbers = best(score[row : row + 1, :size], min(count, size))[0][0]
        assert torch.equal(chosen[row, : len(numbers)], tables[row][numbers // 128] * 128 + numbers % 128)
        assert bool((chosen[row, len(numbers) :] == -1).all())


def case_attention() -> None:
    for rows, heads, _, latent, rope, _ in SHAPES:
        chosen = 2048 if latent == 512 else 100
        values, query = stored(4096, latent + rope), stored(rows, heads, latent + rope)
        places = torch.stack([torch.randperm(4096, generator=draw)[:chosen] for _ in range(rows)]).to(torch.int32)
        places[0, chosen // 3 :] = -1  # a short context
        places[1, ::2] = -1  # every other token is another rank's
        valid, scale = places >= 0, (latent + rope) ** -0.5
        for packed in (False, True):
            pool = latent_rows.pack(values, latent) if packed else values.to(torch.bfloat16)
            read = latent_rows.unpack(pool, latent) if packed else values
            found = read[places.clamp_min(0).long()]
            sink = torch.full((heads,), -torch.inf)
            wanted = latent_attention(query, found, valid, sink, scale, N.probability)[..., :latent]
            given = half(query), there(pool), there(places), latent, scale
            near("whole", latent_attention_triton.attend(*given, whole=True), wanted)
            part = partial_attention(query, found, valid, scale, latent, N.probability)
            near("part", latent_attention_triton.attend(*given, whole=False), part, 1e-3)
            wider = torch.cat([places, torch.full((rows, 64), -1, dtype=torch.int32)], 1)
            again = latent_attention_triton.attend(*given[:2], there(wider), latent, scale, whole=True)
            assert torch.equal(again, latent_attention_triton.attend(*given, whole=True)), "places of no token count"
        nothing = torch.full_like(places, -1)
        part = latent_attention_triton.attend(*given[:2], there(nothing), latent, scale, whole=False)
        assert torch.equal(part.cpu()[..., latent], torch.full((rows, heads), -torch.inf))
        assert not bool(part[..., :latent].any())


def case_router() -> None:
    for rows, experts, top_k in ((3, 16, 4), *([(4, 256, 8)] if LARGE else [])):
        logits, bias = randn(rows, experts), randn(experts) * 0.1
        routable = torch.rand(experts, generator=draw) < 0.8
        slot_of = torch.where(routable, torch.arange(experts) * 3, -1).to(torch.int32)
        wanted = router.route(torch.sigmoid(logits), bias, routable, top_k, 2.5)
        got = router_triton.room(rows, top_k, device=DEVICE)
        given = (there(one) for one in (logits.unsqueeze(0), bias, routable, slot_of))
        router_triton.route(*given, top_k, 2.5, got, sigmoid=True)
        assert torch.equal(got.wanted.cpu(), wanted.wanted)
        assert torch.equal(got.missed.cpu(), wanted.missed)
        assert torch.equal(got.slots.cpu(), slot_of[wanted.ids])
        for name in ("weights", "wanted_scores", "wanted_weights"):
            near(name, getattr(got, name), getattr(wanted, name), 1e-6)


def case_swiglu() -> None:
    for rows, width in ((3, 96), *([(4, 1024)] if LARGE else [])):
        x = 3 * randn(rows, 2 * width)
        wanted = N.store(clamped_swiglu(N.store(x), float("inf")))
        near("swiglu", between.swiglu(there(x), float("inf")), wanted)


CASES = {name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:] or CASES:
        print(name, flush=True)
        CASES[name]()
    print("ok")
