"""EXL3 experts of random words in slots, as an arena has them: any words are a trellis, scales keep rows near one."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.exl3_record import Exl3Record, Stored, header_of
from kernels.record import PAGE_BYTES


def pages_of(record: Exl3Record, experts: Sequence[Stored]) -> list[int]:
    return [record.slot_bytes(one) // PAGE_BYTES for one in experts]


def filled(record: Exl3Record, experts: Sequence[Stored], device: torch.device) -> tuple[Tensor, list[int]]:
    """(slots [pages, PAGE_BYTES] uint8, the first page of each expert, one behind the other)"""
    pages = pages_of(record, experts)
    begins = [sum(pages[:number]) for number in range(len(pages))]
    slots = torch.empty(sum(pages), PAGE_BYTES, dtype=torch.uint8, device=device)
    noise(slots)
    write_heads(slots, record, zip(begins, experts, strict=True))
    return slots, begins


def noise(slots: Tensor) -> None:
    """In place, by 1 GB: `random_` of bytes is slow where it goes byte by byte."""
    for part in slots.view(-1).view(torch.int64).split(1 << 27):
        part.random_()


def write_heads(slots: Tensor, record: Exl3Record, experts: Iterator[tuple[int, Stored]]) -> None:
    """(first page, how it is stored): all that stands before an expert's trellises."""
    vectors = _vectors(record).to(slots.device)
    heads: dict[Stored, Tensor] = {}
    flat = slots.view(-1)
    for page, one in experts:
        if one not in heads:
            header = torch.frombuffer(bytearray(header_of(one)), dtype=torch.uint8).to(slots.device)
            heads[one] = torch.cat([header, vectors])
        flat[page * PAGE_BYTES :][: len(heads[one])] = heads[one]


def _vectors(record: Exl3Record) -> Tensor:
    """[bytes]: the scales of inputs take their number's root away, those of outputs are near one."""
    draw, d, n = torch.Generator().manual_seed(1), record.hidden, record.share
    sizes = (d**-0.5, d**-0.5, 1.0, 1.0, n**-0.5, 1.0)
    found = [size * torch.randn(length, generator=draw) for size, length in zip(sizes, record.lengths, strict=True)]
    return torch.cat(found).half().view(torch.uint8)
