"""The expert memory as a model sees it: bytes of the slots, which pair lies where, and where demand is recorded."""

from dataclasses import dataclass

from torch import Tensor

from kernels.record import ExpertRecord
from tided.experts.fetch import UrgentReads
from tided.experts.tables import DemandTap, RoutingTables


@dataclass(frozen=True)
class ExpertBank:
    """`slots` [slots, record.slot_bytes] uint8 on the model's device. `urgent` None: no row ever waits for a read."""

    record: ExpertRecord
    slots: Tensor
    tables: RoutingTables
    tap: DemandTap
    urgent: UrgentReads | None = None
