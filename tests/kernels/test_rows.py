"""A decode row has the same bits alone and beside 1 to 15 others, at the widths of the released model (contract C5).

The widths are what counts: a vector unit takes 4 to 32 numbers at once, and what is left over is computed otherwise."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels import engram, experts, head, hyper, router
from kernels.linear import fp8_linear, grouped_linear
from kernels.norm import rms_norm
from kernels.numerics import NATIVE
from kernels.record import ExpertRecord
from kernels.rope import Yarn, frequencies, rotate_, rotation
from kernels.rows import ROWS, by_row, singly, together
from kernels.swiglu import clamped_swiglu

HIDDEN, STREAMS, HEADS, HEAD, INDEX, Q_RANK, INNER, EXPERTS, TOP_K = 5120, 4, 32, 512, 128, 1280, 2304, 384, 6
MIXES = STREAMS * (2 + STREAMS)
RECORD = ExpertRecord(hidden=HIDDEN, intermediate=64, ranks=1)
FREQUENCIES = frequencies(64, 160000.0, Yarn(16, 32, 1, 65536))
POSITIONS = torch.arange(ROWS) * 65_521 + 3


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def streams(rows: Tensor) -> Tensor:
    """[T, n] -> [T, S, D] that differ by row and stream."""
    return rows[:, :1, None] * randn(STREAMS, HIDDEN, seed=9) + rows.unsqueeze(1)


def mixed(rows: Tensor) -> Tensor:
    mix = hyper.mix(streams(rows), randn(MIXES, STREAMS * HIDDEN, seed=1) / 100, torch.ones(MIXES), GATES, 20, 1e-6)
    return torch.cat([mix.pre, mix.post, mix.comb.flatten(1)], 1)


def routed(rows: Tensor) -> Tensor:
    score = router.scores(rows, randn(EXPERTS, HIDDEN, seed=1) / 70)
    routing = router.route(score, randn(EXPERTS, seed=2) / 100, torch.arange(EXPERTS) % 3 > 0, TOP_K, 1.5)
    return torch.cat([score, routing.wanted_weights, routing.weights, routing.ids], 1)


def expert_sum(rows: Tensor) -> Tensor:
    slots = torch.randint(0, 256, (3, RECORD.slot_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for part in RECORD.parts[3:]:
        slots[:, part.offset : part.offset + part.nbytes] = 120
    picks = torch.stack([rows[:, 0] > 0, rows[:, 1] > 0], 1) + torch.tensor([0, 1])
    return experts.grouped_experts(NATIVE.activation(rows), slots, RECORD, picks, rows[:, 2:4].abs(), 10.0, NATIVE)


def rotated(*shape: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda rows, at: rotate_(rows.view(-1, *shape).clone(), rotation(at, FREQUENCIES)).flatten(1)


GATES = randn(MIXES, seed=3)
GROUPED = randn(2, 96, 4096, seed=1) / 64
SINGLE: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "norm": (HIDDEN, lambda x: rms_norm(x, randn(HIDDEN, seed=1), 1e-20)),
    "norm of a query": (Q_RANK, lambda x: rms_norm(x, randn(Q_RANK, seed=1), 1e-20)),
    "norm of a row": (HEAD, lambda x: rms_norm(x, randn(HEAD, seed=1), 1e-20)),
    "norm of a key": (INDEX, lambda x: rms_norm(x, randn(INDEX, seed=1), 1e-20)),
    "mix": (HIDDEN, mixed),
    "collapse": (HIDDEN, lambda x: hyper.collapse(streams(x), x[:, :STREAMS])),
    "expand": (HIDDEN, lambda x: hyper.expand(streams(x), x, x[:, :4], x[:, 4:20].view(-1, 4, 4)).flatten(1)),
    "store": (HIDDEN, NATIVE.store),
    "activation": (HIDDEN, NATIVE.activation),
    "window": (HEAD, NATIVE.window),
    "latent": (HEAD, NATIVE.latent),
    "index": (INDEX, NATIVE.index),
    "linear": (HIDDEN, lambda x: fp8_linear(x, randn(96, HIDDEN, seed=1), NATIVE.activation)),
    "grouped linear": (8192, lambda x: by_row(lambda o: grouped_linear(o, GROUPED), x.view(-1, 2, 4096))),
    "head": (HIDDEN, lambda x: head.logits(x, randn(96, HIDDEN, seed=1))),
    "swiglu": (2 * INNER, lambda x: clamped_swiglu(x, 2.0)),
    "router": (HIDDEN, routed),
    "router of few": (HIDDEN, lambda x: router.scores(x, randn(9, HIDDEN, seed=1) / 70)),
    "experts": (HIDDEN, expert_sum),
    "engram": (HIDDEN, lambda x: engram.mix(streams(x), streams(x.flip(1)), x, randn(4, HIDDEN, seed=4)).flatten(1)),
}
TURNED: dict[str, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = {
    "queries": (HEADS * HEAD, rotated(HEADS, HEAD)),
    "a row": (HEAD, rotated(HEAD)),
    "index queries": (HEADS * INDEX, rotated(HEADS, INDEX)),
    "a narrow row": (64, rotated(64)),
}


@pytest.fixture(autouse=True, params=[1, 4], ids=["1 thread", "4 threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Work is cut over threads by its size, which grows with the company."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def check(operation: Callable[..., Tensor], *rows: Tensor) -> None:
    alone = torch.cat([operation(*(tensor[i : i + 1] for tensor in rows)) for i in range(ROWS)])
    for count in range(2, ROWS + 1):
        beside = operation(*(tensor[:count] for tensor in rows))
        assert torch.equal(beside, alone[:count]), f"{count} rows"


@pytest.mark.parametrize("name", SINGLE)
def test_company_changes_no_bit(name: str) -> None:
    width, operation = SINGLE[name]
    check(operation, randn(ROWS, width))


@pytest.mark.parametrize("name", TURNED)
def test_company_changes_no_bit_of_a_rotation(name: str) -> None:
    width, operation = TURNED[name]
    check(operation, randn(ROWS, width), POSITIONS)


def test_guesses_are_computed_together_by_the_thread_that_asks_and_while_it_does() -> None:
    calls: list[int] = []

    def operation(rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return rows * 2

    def guess() -> None:
        with together():
            assert torch.equal(by_row(operation, rows), rows * 2)
            other = threading.Thread(target=lambda: elsewhere.append(singly(5)))
            other.start()
            other.join(10)
            raise ValueError("in between")

    rows, elsewhere = randn(5, HIDDEN), list[bool]()
    with pytest.raises(ValueError, match="in between"):
        guess()
    by_row(operation, rows)
    assert calls == [5, 1, 1, 1, 1, 1]
    assert elsewhere == [True]
