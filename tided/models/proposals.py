"""Proposals of a drafter as CUDA graphs: for each number of lanes and each way to choose, one graph of a whole block,
or one a place where tokens are made one by one.

A `Proposal` has a fixed shape: what changes is told to memory of fixed address, and the host reads nothing. The first
of a kind runs eagerly and compiles what it needs; then the same code is captured, which runs nothing. A choice can be
part of a graph where it says how (`Lawful`); any other is made by the eager form."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tided.cache.context import Context
from tided.models.base import Choose, Draft
from tided.models.copies import Copies
from tided.models.graphs import Graphs


@dataclass(frozen=True)
class Law:
    """How tokens follow from logits. `name` tells laws apart; `told` [places, lanes, n], on the CPU, is what changes
    from one proposal to the next; `drawn` maps logits [R, V] and one place's told [R, n] to ids [R] int64, -1 for
    logits that are no numbers, without looking at the device."""

    name: str
    told: Tensor
    drawn: Callable[[Tensor, Tensor], Tensor]


@runtime_checkable
class Lawful(Protocol):
    """A choice that a graph can make."""

    def law(self, places: int) -> Law: ...

    def took(self, drawn: Tensor) -> None:
        """drawn [places, R]: what the law gave, in the choice's stead; the choice's to keep."""
        ...


class Proposal(Protocol):
    """Of R lanes. Its memory: drawn [K, R] int64, logits [K, R, V] and confidence [K, R] fp32."""

    capturable: bool  # else it always runs eagerly
    ranks: int  # that compute it together
    one_by_one: bool  # whether a place's graph is worth its own launch, because fewer may be wanted
    drawn: Tensor
    logits: Tensor
    confidence: Tensor

    def tell(self, lanes: Sequence[Context], anchors: Tensor) -> None:
        """Copies to the device, without waiting, what this proposal is of."""
        ...

    def offer(self, place: int) -> None:
        """Computes logits[place]. Places come in order, each behind the choice of the one before."""
        ...

    def settle(self, place: int) -> None:
        """Behind the choice: drawn[place] -> confidence[place]."""
        ...


@dataclass
class Lawed:
    """A law's numbers of a proposal, on the host and the device, and the graphs that read them."""

    host: Tensor
    told: Tensor
    graphs: list[Any] | None = None


@dataclass
class Prepared:
    """A number of lanes: its proposal, and where what it says comes to on the host."""

    proposal: Proposal
    copies: Copies
    drawn: Tensor
    confidence: Tensor
    laws: dict[str, Lawed] = field(default_factory=dict)


class Proposals:
    """Of one drafter. Used by the engine's thread alone."""

    def __init__(self) -> None:
        self.captures = True  # False: every proposal runs eagerly
        self.over_ranks = False  # True: those of several ranks are captured too, which no two GPUs have shown yet
        self._prepared: dict[int, Prepared] = {}  # by lanes
        self._graphs = Graphs()

    @torch.inference_mode()
    def run(
        self,
        lanes: Sequence[Context],
        anchors: Tensor,
        choose: Choose,
        places: int,
        most: int,
        make: Callable[[int], Proposal],
    ) -> Draft:
        """anchors [R] int64; `make` a proposal of so many lanes, where there is none yet -> `places` tokens, ids and
        confidence on the host. More than `most` lanes go one part after another, if the choice is lawful."""
        parts = [slice(first, first + most) for first in range(0, len(lanes), most)]
        told, found = choose.law(places) if isinstance(choose, Lawful) else None, []
        for part in parts:
            drawn, logits, sure = self._part(lanes[part], anchors[part], choose, told, part, places, make)
            found.append((drawn, logits if len(parts) == 1 else logits.clone(), sure))
        drawn, logits, sure = found[0] if len(found) == 1 else (torch.cat(each, 1) for each in zip(*found, strict=True))
        if isinstance(choose, Lawful):
            choose.took(drawn)
        return Draft(drawn.clamp_min(0).t(), logits.transpose(0, 1), sure.t())

    def _part(
        self,
        lanes: Sequence[Context],
        anchors: Tensor,
        choose: Choose,
        law: Law | None,
        part: slice,
        places: int,
        make: Callable[[int], Proposal],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """drawn, logits and confidence, [places, R, ..] each; the logits where they lie."""
        made = self._prepared.get(len(lanes)) or self._prepare(make(len(lanes)), len(lanes))
        one = made.proposal
        made.copies.wait()
        one.tell(lanes, anchors)
        if law is not None:
            self._by_law(made, law, part, places)
        else:
            for place in range(places):
                one.offer(place)
                one.drawn[place].copy_(choose(place, one.logits[place]))
                one.settle(place)
        made.drawn.copy_(one.drawn, non_blocking=True)
        made.confidence.copy_(one.confidence, non_blocking=True)
        made.copies.made()
        made.copies.wait()
        return made.drawn[:places].clone(), one.logits[:places], made.confidence[:places].clone()

    def _prepare(self, one: Proposal, lanes: int) -> Prepared:
        drawn, sure = (
            torch.zeros_like(each, device="cpu", pin_memory=each.is_cuda) for each in (one.drawn, one.confidence)
        )
        made = self._prepared[lanes] = Prepared(one, Copies(one.drawn.device), drawn, sure)
        return made

    def _by_law(self, made: Prepared, law: Law, part: slice, places: int) -> None:
        one, kept = made.proposal, made.laws.get(law.name)
        if kept is None:
            shape, device = (len(one.drawn), *law.told[0, part].shape), one.drawn.device
            host = torch.zeros(shape, dtype=law.told.dtype, pin_memory=device.type == "cuda")
            kept = made.laws[law.name] = Lawed(host, torch.zeros_like(host, device=device))
        kept.host[:places].copy_(law.told[:, part])
        kept.told.copy_(kept.host, non_blocking=True)
        if kept.graphs is not None and self.captures:
            for graph in kept.graphs[: places if one.one_by_one else 1]:
                graph.replay()
            return
        _make(one, law, kept.told, range(places))
        if kept.graphs is None and self._captures(one) and one.drawn.is_cuda:
            kept.graphs = self._captured(one, law, kept.told)

    def _captures(self, one: Proposal) -> bool:
        return self.captures and one.capturable and (one.ranks == 1 or self.over_ranks)

    def _captured(self, one: Proposal, law: Law, told: Tensor) -> list[Any]:
        every = range(len(one.drawn))
        groups = [[place] for place in every] if one.one_by_one else [every]
        return [self._graphs.capture(partial(_make, one, law, told, group))[0] for group in groups]


def _make(one: Proposal, law: Law, told: Tensor, places: Iterable[int]) -> None:
    for place in places:
        one.offer(place)
        one.drawn[place].copy_(law.drawn(one.logits[place], told[place]))
        one.settle(place)
