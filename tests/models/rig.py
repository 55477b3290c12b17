"""A model for tests: loads a checkpoint with every expert in a bank filled by hand."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from kernels.record import ExpertRecord
from packers.shards import Checkpoint
from tided.experts.bank import ExpertBank
from tided.experts.tables import DemandTap, RoutingTables
from tided.models.families import family_of
from tided.models.parallel import Alone, Group
from tided.settings import Cache, Experts, Model, Settings

GOLDEN = Path(__file__).parent.parent / "golden" / "deepseek-v41"
GLM = GOLDEN.parent / "glm53"
CPU = torch.device("cpu")


def settings(path: Path = GOLDEN, *, pool_tokens: int = 1024, context_tokens: int = 512, **model: Any) -> Settings:
    return Settings(
        model=Model(path=str(path), served_name="tiny", **model),
        experts=Experts(resident=80),
        cache=Cache(context_tokens=context_tokens, pool_tokens=pool_tokens),
    )


def cut_record(checkpoint: Checkpoint, names: tuple[str, ...], record: ExpertRecord, rank: int) -> Tensor:
    """The slot image of one rank's share, cut from whole tensors: rows of w1 and w3, columns of w2."""
    slot = torch.zeros(record.slot_bytes, dtype=torch.uint8)
    for name, part in zip(names, record.parts, strict=True):
        raw = checkpoint.read(name).view(torch.uint8)
        rows, columns = slice(rank * part.rows, (rank + 1) * part.rows), slice(None)
        if ".w2." in name or ".down_proj." in name:
            rows, columns = slice(None), slice(rank * part.row_bytes, (rank + 1) * part.row_bytes)
        slot[part.offset : part.offset + part.nbytes] = raw[rows, columns].reshape(-1)
    return slot


def full_bank(
    checkpoint: Checkpoint, ranks: int = 1, rank: int = 0, lanes: int = 32, device: torch.device = CPU
) -> ExpertBank:
    """Every expert resident, in slots of no particular order."""
    family = family_of(checkpoint.config)
    shape, record = family.shape(checkpoint.config), family.expert_record(checkpoint, ranks)
    names = family.expert_names(checkpoint)
    layers, experts = shape.moe_layers, shape.experts_per_layer
    tables, tap = RoutingTables(layers, experts, device), DemandTap(lanes, layers, experts, device)
    slots = torch.zeros(layers * experts, record.slot_bytes, dtype=torch.uint8)
    for layer in range(layers):
        for expert in range(experts):
            slot = expert * layers + layer
            slots[slot] = cut_record(checkpoint, names(layer, expert), record, rank)
            tables.publish(layer, expert, slot)
    return ExpertBank(record, slots.to(device), tables, tap)


def load_model(
    path: Path = GOLDEN,
    group: Group | None = None,
    config: Settings | None = None,
    device: torch.device = CPU,
    **model: Any,
) -> Any:
    """`model`: fields of [model], such as numerics."""
    group = group or Alone()
    checkpoint = Checkpoint.open(path)
    bank = full_bank(checkpoint, group.ranks, group.rank, device=device)
    return family_of(checkpoint.config).load(checkpoint, config or settings(path, **model), group, bank, device)


def drafting_model(path: Path, numerics: str) -> Any:
    """With its drafter."""
    base = settings(path, numerics=numerics)
    return load_model(path, config=replace(base, engine=replace(base.engine, draft="acceptance")))


class Threads:
    """Ranks as threads of one process. Sums in rank order, so every rank gets the same bits."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.parts: list[Tensor | None] = [None] * ranks
        self.members = [_Member(self, rank, ranks) for rank in range(ranks)]

    def run(self, work: Callable[[Group], Any]) -> list[Any]:
        """work(group) on every rank; the results in rank order. The first failure is raised."""
        results: list[Any] = [None] * len(self.members)
        failures: list[BaseException] = []

        def body(member: "_Member") -> None:
            try:
                results[member.rank] = work(member)
            except BaseException as e:
                failures.append(e)
                self.barrier.abort()

        threads = [threading.Thread(target=body, args=(m,)) for m in self.members]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        if failures:
            raise failures[0]
        return results


class _Member:
    def __init__(self, owner: Threads, rank: int, ranks: int) -> None:
        self.owner, self.rank, self.ranks = owner, rank, ranks

    def _exchange(self, part: Tensor) -> list[Tensor]:
        self.owner.parts[self.rank] = part.clone()
        self.owner.barrier.wait()
        parts = [p.clone() for p in self.owner.parts if p is not None]
        self.owner.barrier.wait()
        return parts

    def sum(self, part: Tensor) -> Tensor:
        parts = self._exchange(part)
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        return total

    def gather(self, part: Tensor) -> Tensor:
        return torch.stack(self._exchange(part))

    def concat(self, part: Tensor) -> Tensor:
        return torch.cat(self._exchange(part), -1)
