"""The next token from logits. Every rank holds the same logits and draws the same token (C9).

The noise is counter-based: 64 bits from (seed, position) alone, so a seeded request repeats whatever runs beside it and
however its steps are cut. The draw is a race: every token has an exponential clock of its own that runs at the speed of
its weight, and the first to ring is drawn: token i with probability w_i / sum w. No sum over tokens is taken but
top-p's, and that one of integers, so no reduction order of a device can make two ranks disagree.

Two distributions p and q that race with the same clocks draw the same token with probability
sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), at least (1 - d) / (1 + d) where d is their distance in total variation:
a draft that is nearly right is nearly always drawn alike, wherever in the vocabulary the two differ. Inverting a
distribution function has no such bound: one token's difference shifts all that stand behind it.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), Philox4x32-10; Steele et al., "Fast
splittable pseudorandom number generators" (2014), SplitMix64, for the clocks; Daliri et al., "Coupling without
communication and drafter-invariant speculative decoding" (2024).
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tided.engine.types import Sampling
from tided.errors import PairError
from tided.models.parallel import is_finite

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # SplitMix64's constants, as signed words
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
_LAST_SHIFT = 31

# Relative to the likeliest: a token so unlikely is not drawn in the life of a machine, and its weight divides safely.
_NEVER = 2.0**-64

TEMPERATURE, NOISE, MIN_P, TOP_K, TOP_P = range(5)  # of a row, where kernels read how it is drawn

Words = tuple[int, int, int, int]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four 32-bit words of noise for a 128-bit counter under a 64-bit key."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (right >> 32) ^ b ^ k0, right & _WORD, (left >> 32) ^ d ^ k1, left & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return a, b, c, d


def noise(seed: int, position: int) -> int:
    """64 uniform bits for the token at `position` of a request; `seed` counts modulo 2^64."""
    low, high, _, _ = philox((position & _WORD, position >> 32, 0, 0), (seed & _WORD, seed >> 32 & _WORD))
    return high << 32 | low


def sample(logits: Tensor, rows: Sequence[tuple[Sampling, int]]) -> list[int]:
    """logits [R, vocab] fp32; `rows` holds each row's sampling and the position its token will have.

    Raises PairError for logits that are no numbers: such a rank must stop, not serve.
    """
    if logits.is_cuda:
        return sample_there(logits, rows)
    if not is_finite(logits):
        raise no_numbers()
    greedy = [number for number, (sampling, _) in enumerate(rows) if sampling.temperature <= 0]
    best = dict(zip(greedy, first_max(logits[greedy]).tolist(), strict=True)) if greedy else {}
    return [
        best[number] if number in best else draw(logits[number], sampling, noise(sampling.seed, position))
        for number, (sampling, position) in enumerate(rows)
    ]


def sample_there(logits: Tensor, rows: Sequence[tuple[Sampling, int]]) -> list[int]:
    """`sample` without looking at the device but once, for the ids."""
    return Drawn(drawn_there(logits, rows)).tokens()


class Drawn:
    """Ids [R] int64 that a device is to draw: a copy of them is on its way. Memory and events for it are used again:
    to give them back to the system takes time while the device waits for its next step."""

    _spare: ClassVar[dict[int, list[tuple[Tensor, Any]]]] = {}  # by R

    def __init__(self, ids: Tensor) -> None:
        self._ids, self._behind = ids, None
        if ids.is_cuda:
            spare = self._spare.setdefault(len(ids), [])
            self._ids, self._behind = spare.pop() if spare else _landing(len(ids))
            self._ids.copy_(ids, non_blocking=True)
            self._behind.record()

    def tokens(self) -> list[int]:
        """Waits for them; once. Raises as `sample`."""
        if self._behind is not None:
            self._behind.synchronize()
        tokens: list[int] = self._ids.tolist()
        if self._behind is not None:
            self._spare[len(tokens)].append((self._ids, self._behind))
        if -1 in tokens:
            raise no_numbers()
        return tokens


@torch.inference_mode(False)  # used again by whoever comes, within that mode or not
def _landing(rows: int) -> tuple[Tensor, Any]:
    return torch.empty(rows, dtype=torch.int64, pin_memory=True), torch.cuda.Event()  # type: ignore[no-untyped-call]


def drawing(logits: Tensor, rows: Sequence[tuple[Sampling, int]]) -> Callable[[], list[int]]:
    """`sample` in two: a device begins with it now, and what is returned gives the tokens."""
    if logits.is_cuda:
        return Drawn(drawn_there(logits, rows)).tokens
    return lambda: sample(logits, rows)


def laws(rows: Sequence[tuple[Sampling, int]]) -> Tensor:
    """-> [R, 5] int64 on the CPU, as `kernels.sampling_triton` takes them: a field of `TEMPERATURE` and its like each,
    floats as their bits."""
    told = torch.empty(len(rows), 5, dtype=torch.int64, pin_memory=torch.cuda.is_available())
    floats, whole = told.view(torch.float64).numpy(), told.numpy()
    for row, (one, position) in enumerate(rows):
        floats[row] = (one.temperature, 0.0, one.min_p, 0.0, one.top_p)
        whole[row, [NOISE, TOP_K]] = signed(noise(one.seed, position)), one.top_k
    return told


def bounds_of(rows: Sequence[tuple[Sampling, int]]) -> tuple[bool, bool]:
    """Whether top-k and top-p bound what any row draws."""
    drawn = [sampling for sampling, _ in rows if sampling.temperature > 0]
    return any(one.top_k > 0 for one in drawn), any(one.top_p < 1 for one in drawn)


def drawn_there(logits: Tensor, rows: Sequence[tuple[Sampling, int]]) -> Tensor:
    """`sample` without looking at the device -> [R] int64 on it; -1 stands for logits that are no numbers."""
    if logits.is_cuda and all(sampling.temperature <= 0 for sampling, _ in rows):
        from kernels.sampling_triton import likeliest  # a compiler, which a CPU need not have

        return likeliest(logits.contiguous())
    if logits.is_cuda:
        return drawn_by_kernels(logits, laws(rows).to(logits.device, non_blocking=True), *bounds_of(rows))
    best = torch.where(torch.isfinite(logits).all(-1), first_max(logits), -1)
    for number, (sampling, position) in enumerate(rows):
        if sampling.temperature > 0:
            drawn = draw_there(logits[number], sampling, noise(sampling.seed, position))
            best[number] = torch.where(best[number] < 0, best[number], drawn)
    return best


def drawn_by_kernels(logits: Tensor, told: Tensor, by_count: bool, by_share: bool) -> Tensor:
    """logits [R, vocab], told [R, 5] of `laws`, both on CUDA -> as `drawn_there`. `by_count`, `by_share`: whether any
    row may have a top-k, and a top-p."""
    from kernels.sampling_triton import draw as draw_all  # a compiler, which a CPU need not have

    return draw_all(logits.contiguous(), told.contiguous(), by_count, by_share)


def no_numbers() -> PairError:
    return PairError("the model computed logits that are no numbers", hint="restart the pair; check its checkpoint")


def draw_there(row: Tensor, sampling: Sampling, bits: int) -> Tensor:
    """`draw` as a tensor [] int64 on the row's device: every token has a clock, those that may not be drawn never
    ring."""
    weights = row.to(torch.float64, copy=True).sub_(row.max()).div_(sampling.temperature).exp_()
    ids = torch.arange(weights.numel(), device=row.device)
    least = torch.clamp_min(_bound_there(weights, sampling), _NEVER)
    times = torch.where(weights >= least, clocks(bits, ids) / weights, torch.inf)
    return torch.where(times == times.amin(), ids, weights.numel()).amin()


def _bound_there(weights: Tensor, sampling: Sampling) -> Tensor:
    """`least_weight` as a tensor []: everything is sorted where a CPU would sort a few."""
    least, kept = weights.new_full((), min(sampling.min_p, 1.0)), weights
    if 0 < sampling.top_k < weights.numel():
        least = torch.maximum(least, torch.topk(weights, sampling.top_k).values[-1])
        kept = torch.where(weights >= least, weights, 0.0)
    if sampling.top_p < 1:
        ranked = kept.sort(descending=True).values
        reached = _units(ranked, weights.numel()).cumsum(dim=0)
        last = torch.searchsorted(reached, _share(reached[-1], sampling.top_p))
        least = torch.maximum(least, ranked.gather(0, last.clamp_max(len(ranked) - 1).view(1))[0])
    return least


def first_max(logits: Tensor) -> Tensor:
    """logits [R, vocab] -> [R] int64: the lowest id among equals (argmax leaves that choice to the device)."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == logits.amax(dim=-1, keepdim=True), ids, logits.shape[-1]).amin(dim=-1)


def draw(row: Tensor, sampling: Sampling, bits: int) -> int:
    """row [vocab] fp32 finite; `bits` 64 uniform bits -> a token id of the filtered distribution."""
    weights = row.to(torch.float64, copy=True).sub_(row.max()).div_(sampling.temperature).exp_()
    ids = (weights >= max(least_weight(weights, sampling), _NEVER)).nonzero().squeeze(1)
    return int(ids[torch.argmin(clocks(bits, ids) / weights[ids])])


def clocks(bits: int, ids: Tensor) -> Tensor:
    """ids [n] int64 -> [n] float64: the exponential of each token, from the noise of a position and its id alone."""
    return rung(signed(bits), ids)


def signed(bits: int) -> int:
    """64 bits as int64 holds them."""
    return bits - (1 << 64) if bits >> 63 else bits


def rung(bits: Tensor | int, ids: Tensor) -> Tensor:
    """`clocks` of one position, or of bits [R, 1] int64 -> [R, n]."""
    word = (ids + 1).mul_(_GOLDEN) + bits  # wraps, as SplitMix64 does
    for shift, factor in _MIX:
        word.bitwise_xor_(_shifted(word, shift)).mul_(factor)
    word.bitwise_xor_(_shifted(word, _LAST_SHIFT))
    uniform = _shifted(word, 11).to(torch.float64).add_(0.5).mul_(2.0**-53)  # in (0, 1), never an end
    return uniform.log_().neg_()


def _shifted(word: Tensor, count: int) -> Tensor:
    """int64 shifted right as if it had no sign."""
    return (word >> count) & ((1 << (64 - count)) - 1)


def least_weight(weights: Tensor, sampling: Sampling) -> float:
    """weights [vocab], the largest 1 -> the least weight that may be drawn: top-k, then top-p of what it left, min-p.

    A bound rather than a list of ids: equal weights share one fate, whatever order a sort gives them.
    """
    least, vocab = min(sampling.min_p, 1.0), weights.numel()  # the likeliest token always stays
    if 0 < sampling.top_k < weights.numel():
        least = max(least, float(torch.topk(weights, sampling.top_k).values[-1]))
        weights = weights[weights >= least] if sampling.top_p < 1 else weights
    return max(least, _nucleus(weights, sampling.top_p, vocab)) if sampling.top_p < 1 else least


def _nucleus(weights: Tensor, top_p: float, vocab: int) -> float:
    """The least weight of the smallest set of likeliest tokens that holds `top_p` of the sum. Tokens lighter than half
    the tail's mean over all tokens cannot make up the tail, so the heavier ones reach `top_p`: only they are sorted."""
    units = _units(weights, vocab)
    total = units.sum()
    ranked = weights[units >= int(total) * (1 - top_p) / (2 * weights.numel())].sort(descending=True).values
    last = int(torch.searchsorted(_units(ranked, vocab).cumsum(dim=0), _share(total, top_p)))
    return float(ranked[min(last, ranked.numel() - 1)])


def _units(weights: Tensor, vocab: int) -> Tensor:
    """weights [n] up to 1, n <= vocab -> [n] int64, so fine that all together just fit: sums are exact in any order."""
    return (weights * 2.0 ** (62 - vocab.bit_length())).to(torch.int64)


def _share(total: Tensor, top_p: float | Tensor) -> Tensor:
    """total [] int64 -> [] int64: the least count of units that is `top_p` of it."""
    return torch.minimum((total.to(torch.float64) * top_p).ceil().to(torch.int64), total)
