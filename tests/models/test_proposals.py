"""What is proposed comes from the proposal of so many lanes, with the numbers of its own lanes and places."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tided.models.proposals import Law, Proposals

SIZE, VOCAB = 3, 50


class Counting:
    """Tokens are the anchor, the place and what the law was told."""

    capturable, one_by_one = True, True

    def __init__(self, lanes: int) -> None:
        self.ranks = 1
        self.drawn = torch.zeros(SIZE, lanes, dtype=torch.int64)
        self.logits, self.confidence = torch.zeros(SIZE, lanes, VOCAB), torch.zeros(SIZE, lanes)

    def tell(self, lanes: Any, anchors: Tensor) -> None:
        self.anchors, self.positions = anchors, [lane.position for lane in lanes]

    def offer(self, place: int) -> None:
        self.logits[place] = self.anchors.unsqueeze(1) + place

    def settle(self, place: int) -> None:
        self.confidence[place] = self.drawn[place].float() / 2


class Choice:
    def __init__(self, lanes: int) -> None:
        self.lanes, self.taken = lanes, list[Tensor]()

    def __call__(self, place: int, logits: Tensor) -> Tensor:
        return logits[:, 0].long()

    def law(self, places: int) -> Law:
        told = torch.arange(places * self.lanes).view(places, self.lanes, 1) * 1000
        return Law("told", told, lambda logits, told: logits[:, 0].long() + told[:, 0])

    def took(self, drawn: Tensor) -> None:
        self.taken.append(drawn)


def run(proposals: Proposals, count: int, choose: Any, places: int = SIZE) -> Any:
    lanes: Any = [SimpleNamespace(position=n) for n in range(count)]
    return proposals.run(lanes, torch.arange(count) * 10, choose, places, 2, Counting)


def test_lanes_in_parts_have_their_own_numbers_of_the_law():
    proposals, choose = Proposals(), Choice(5)
    draft = run(proposals, 5, choose)
    wanted = [[10 * lane + place + 1000 * (5 * place + lane) for place in range(SIZE)] for lane in range(5)]
    assert draft.ids.tolist() == wanted
    assert draft.confidence.tolist() == [[token / 2 for token in row] for row in wanted]
    assert draft.logits[:, :, 0].tolist() == [[10 * lane + place for place in range(SIZE)] for lane in range(5)]
    assert torch.equal(choose.taken[0], draft.ids.t())
    assert len(choose.taken) == 1


def test_fewer_places_are_the_first_and_an_earlier_draft_stays():
    proposals = Proposals()
    whole = run(proposals, 2, Choice(2))
    kept = [part.clone() for part in (whole.ids, whole.confidence)]
    short = run(proposals, 2, Choice(2), places=1)
    assert torch.equal(short.ids, whole.ids[:, :1])
    run(proposals, 2, lambda place, logits: torch.full((2,), 7))
    assert all(map(torch.equal, kept, (whole.ids, whole.confidence)))


def test_a_choice_without_a_law_is_asked_place_by_place():
    seen = []

    def choose(place: int, logits: Tensor) -> Tensor:
        seen.append(place)
        return logits[:, 0].long() + place

    assert run(Proposals(), 2, choose).ids.tolist() == [[0, 2, 4], [10, 12, 14]]
    assert seen == [0, 1, 2]


def test_what_is_no_number_is_told_and_not_proposed():
    choose = Choice(1)
    choose.law = lambda places: Law("none", torch.zeros(places, 1, 1), lambda logits, told: torch.full((1,), -1))  # type: ignore[method-assign]
    assert run(Proposals(), 1, choose).ids.tolist() == [[0] * SIZE]
    assert int(choose.taken[0].max()) == -1
