"""What the packs of all kinds of experts say of themselves: an immutable header, of which a kind knows the sizes of its
records."""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from kernels.exl3_record import Exl3Record
from kernels.record import PAGE_BYTES, ExpertRecord

DIGEST_BYTES = 16
MAX_RECORDS = 1 << 20
Count = Annotated[int, Meta(ge=1, le=MAX_RECORDS)]


class PackHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`model`: the checkpoint's identity (`Checkpoint.identity`). `index`: the checksum of the index region,
    hexadecimal; empty: not known; zeros in a file that is being written."""

    MAGIC: ClassVar[bytes]  # of a whole pack
    PARTIAL: ClassVar[bytes]  # of one that is being written
    SUFFIX: ClassVar[str]  # of its file

    model: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    hidden: Count
    intermediate: Count
    rank: Annotated[int, Meta(ge=0, le=63)]
    ranks: Annotated[int, Meta(ge=1, le=64)]
    layers: Count
    experts: Count
    index: Annotated[str, Meta(pattern="^([0-9a-f]{32})?$")] = ""

    @property
    def records(self) -> int:
        return self.layers * self.experts

    @property
    def header_bytes(self) -> int:
        """Of the header region, a multiple of a page."""
        return PAGE_BYTES

    @property
    def index_bytes(self) -> int:
        return -(-self.records * DIGEST_BYTES // PAGE_BYTES) * PAGE_BYTES

    @property
    def data_offset(self) -> int:
        return self.header_bytes + self.index_bytes

    @property
    def size_bytes(self) -> int:
        """Of the whole file."""
        return self.offset(self.records)

    @property
    def file_name(self) -> str:
        return f"experts-rank-{self.rank}-of-{self.ranks}.{self.SUFFIX}"

    @property
    def record(self) -> ExpertRecord | Exl3Record:
        raise NotImplementedError

    def nbytes(self, number: int) -> int:
        """Of record `number` = layer * experts + expert, a multiple of a page."""
        raise NotImplementedError

    def offset(self, number: int) -> int:
        """Of record `number` from the file's start; of the first that there is not, the file's end."""
        raise NotImplementedError

    def begin(self, number: int) -> bytes:
        """The first bytes of record `number`, as far as they are known without reading it."""
        return b""

    def fault(self) -> str:
        """What the fields contradict each other in; empty: nothing."""
        raise NotImplementedError
