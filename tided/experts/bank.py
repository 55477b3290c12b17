"""The expert memory as a model sees it: bytes of the slots, which pair lies where, and where demand is recorded."""

from dataclasses import dataclass

from torch import Tensor

from kernels.record import ExpertRecord
from tided.experts.checkpoint import Record
from tided.experts.fetch import UrgentReads
from tided.experts.tables import DemandTap, RoutingTables


@dataclass(frozen=True)
class ExpertBank:
    """`slots` [slots, unit bytes] uint8 on the model's device (`tided.experts.arena`). `urgent` None: no row ever waits
    for a read."""

    record: Record
    slots: Tensor
    tables: RoutingTables
    tap: DemandTap
    urgent: UrgentReads | None = None

    @property
    def plain_record(self) -> ExpertRecord:
        """Of experts that are all of one size."""
        assert isinstance(self.record, ExpertRecord), "these experts differ in size"
        return self.record
