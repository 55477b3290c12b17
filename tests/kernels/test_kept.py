"""Decoded weights are found again by content: never those of other bytes, and never more than fit."""

import torch

from kernels.kept import Kept


class Decoder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, source: torch.Tensor, kept: Kept, kind: object = "k") -> torch.Tensor:
        def decode() -> torch.Tensor:
            self.calls += 1
            return source.to(torch.float32) * 2

        return kept.of(source, kind, decode)


def source(seed: int, count: int = 64) -> torch.Tensor:
    return torch.randint(-99, 99, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int16)


def test_the_same_bytes_are_decoded_once_wherever_they_lie():
    decode, kept = Decoder(), Kept(1 << 16)
    assert decode(source(1), kept).equal(decode(source(1), kept))
    assert decode.calls == 1
    decode(source(1), kept, kind="another")
    assert decode.calls == 2


def test_a_slot_that_something_else_was_read_into():
    decode, kept, slot = Decoder(), Kept(1 << 16), source(1)
    first = decode(slot, kept)
    slot.copy_(source(2))
    assert decode(slot, kept).equal(source(2).to(torch.float32) * 2)
    assert first.equal(source(1).to(torch.float32) * 2)
    slot[-1] += 1
    assert decode(slot, kept)[-1] == 2 * slot[-1]


def test_the_newest_used_are_kept_and_no_more_than_fit():
    decode, kept = Decoder(), Kept(8 * 256)  # eight results of 64 fp32
    for seed in range(8):
        decode(source(seed), kept)
    decode(source(0), kept)
    decode(source(8), kept)  # 1 leaves
    assert decode.calls == 9
    decode(source(0), kept)
    assert decode.calls == 9
    decode(source(1), kept)
    assert decode.calls == 10


def test_what_is_too_large_is_not_kept():
    decode, kept = Decoder(), Kept(8 * 256 - 8)
    decode(source(1), kept)
    decode(source(1), kept)
    assert decode.calls == 2
