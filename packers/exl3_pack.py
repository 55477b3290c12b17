"""EXL3 experts in packs: every matrix keeps its width, so records differ in size. docs/formats/exl3-pack.md."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from kernels.exl3_record import CODEBOOKS, Exl3Record, Stored, header_of, stored_of
from kernels.record import PAGE_BYTES
from packers.pack_header import PackHeader

PREFIX_BYTES = 32  # in front of the JSON
CHARACTERS = 6  # a record: of gate, up and down a codebook's number and half bits a weight, each a digit
DIGITS = "0123456789abcdefg"


class Exl3Header(PackHeader, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a pack of EXL3 experts holds. `matrices`: CHARACTERS a record, by (layer, expert)."""

    MAGIC: ClassVar[bytes] = b"TIDEX3PK"
    PARTIAL: ClassVar[bytes] = b"TIDEX3PT"
    SUFFIX: ClassVar[str] = "exl3"

    matrices: Annotated[str, Meta(pattern="^([0-2][2-9a-g])+$", max_length=CHARACTERS << 20)]

    @property
    def record(self) -> Exl3Record:
        return Exl3Record(self.hidden, self.intermediate, self.ranks)

    @property
    def header_bytes(self) -> int:
        return _layout(self)[0]

    def stored(self, number: int) -> Stored:
        return _stored(self.matrices[CHARACTERS * number : CHARACTERS * (number + 1)])

    def nbytes(self, number: int) -> int:
        return self.record.slot_bytes(self.stored(number))

    def offset(self, number: int) -> int:
        header_bytes, begins = _layout(self)
        return header_bytes + self.index_bytes + begins[number]

    def begin(self, number: int) -> bytes:
        return header_of(self.stored(number))

    def fault(self) -> str:
        try:
            record, count = self.record, len(self.matrices) // CHARACTERS
            if len(self.matrices) % CHARACTERS or count != self.records:
                return f"the matrices of {len(self.matrices) / CHARACTERS:g} experts where there are {self.records}"
            for text in {self.matrices[i : i + CHARACTERS] for i in range(0, len(self.matrices), CHARACTERS)}:
                record.slot_bytes(_stored(text))
        except ValueError as e:
            return f"it describes no expert: {e}"
        return ""


@lru_cache(maxsize=16)
def _layout(header: Exl3Header) -> tuple[int, tuple[int, ...]]:
    """Bytes of the header's region, the index's checksum counted whether it is there yet or not; where each record
    begins behind the index, and where the last ends."""
    text = msgspec.json.encode(msgspec.structs.replace(header, index="0" * 32))
    header_bytes = -(-(PREFIX_BYTES + len(text)) // PAGE_BYTES) * PAGE_BYTES
    return header_bytes, tuple(accumulate(map(header.nbytes, range(header.records)), initial=0))


@lru_cache(maxsize=4096)
def _stored(text: str) -> Stored:
    """Raises ValueError."""
    numbers, widths = (int(one) for one in text[0::2]), (DIGITS.index(one) for one in text[1::2])
    return stored_of(bytes((1, *widths, *numbers)))


def _text(stored: Stored) -> str:
    pairs = zip(stored.codebooks, stored.half_bits, strict=True)
    return "".join(f"{CODEBOOKS.index(codebook)}{DIGITS[bits]}" for codebook, bits in pairs)


def exl3_header_of(
    model: str, record: Exl3Record, rank: int, layers: int, experts: int, stored: Sequence[Stored]
) -> Exl3Header:
    """`stored`: of every expert, by (layer, expert)."""
    return Exl3Header(
        model=model,
        hidden=record.hidden,
        intermediate=record.intermediate,
        rank=rank,
        ranks=record.ranks,
        layers=layers,
        experts=experts,
        matrices="".join(map(_text, stored)),
    )
