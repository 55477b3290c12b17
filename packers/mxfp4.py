"""MXFP4 experts in packs: all records of one size. docs/formats/mxfp4-pack.md."""

from typing import Annotated, ClassVar

from msgspec import Meta

from kernels.record import PAGE_BYTES, ExpertRecord
from packers.pack_header import PackHeader


class Header(PackHeader, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a pack of MXFP4 experts holds."""

    MAGIC: ClassVar[bytes] = b"TIDEPACK"
    PARTIAL: ClassVar[bytes] = b"TIDEPART"
    SUFFIX: ClassVar[str] = "mxfp4"

    record_bytes: Annotated[int, Meta(ge=PAGE_BYTES, le=1 << 32)]

    @property
    def record(self) -> ExpertRecord:
        return ExpertRecord(self.hidden, self.intermediate, self.ranks)

    def nbytes(self, number: int) -> int:
        return self.record_bytes

    def offset(self, number: int) -> int:
        return self.data_offset + number * self.record_bytes

    def fault(self) -> str:
        try:
            slot_bytes = self.record.slot_bytes
        except ValueError as e:
            return f"it describes no expert: {e}"
        if self.record_bytes == slot_bytes:
            return ""
        return f"records of {self.record_bytes} bytes where an expert's share has {slot_bytes}"


def header_of(model: str, record: ExpertRecord, rank: int, layers: int, experts: int) -> Header:
    return Header(
        model=model,
        hidden=record.hidden,
        intermediate=record.intermediate,
        rank=rank,
        ranks=record.ranks,
        layers=layers,
        experts=experts,
        record_bytes=record.slot_bytes,
    )
