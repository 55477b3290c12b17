"""An answer is the same with drafts and without, of every family: any depth, one rank or two, alone or beside another
lane (C5).

The model is random, and so is its drafter: next to nothing that it proposes is right. So that blocks are taken
whole, in part and not at all, a prompter that knows the plain answer replaces its words at most places.
"""

from functools import cache

import pytest
import torch
from msgspec import structs
from real_pair import Served, opened, with_tide
from test_real_model import asked

from tests.bundled import Mini
from tided.engine.depth import Depths
from tided.engine.types import TokenLogprob, Tokens
from tided.models.base import Draft

ANSWER = 34


def greedy(mini: Mini):
    return [asked(mini, "a", answer=ANSWER), asked(mini, "b", begin=37, tokens=33, answer=ANSWER - 7)]


def seeded(mini: Mini):
    return [
        asked(mini, "a", answer=ANSWER, temperature=0.8, seed=5),
        asked(mini, "b", begin=37, answer=24, temperature=1.0, top_p=0.9, seed=6),
    ]


class Alternating(Depths):
    """A depth after the other, whatever they bring; every fifth step nothing is drafted."""

    def plan(self, rows):
        depths, _ = super().plan(rows)
        self._turn = getattr(self, "_turn", 0) + 1
        return [min(depth, (self._turn + i) % 6) for i, depth in enumerate(depths)], self._turn % 5 != 0


class Prompter:
    """The model, whose proposals are the plain answers but for every fourth position or so."""

    def __init__(self, model, requests, answers) -> None:
        self._model, self._requests, self._answers = model, requests, answers

    def __getattr__(self, name):
        return getattr(self._model, name)

    def knows(self, request, place: int) -> bool:
        """Whether the token behind this place of the answer is proposed right."""
        return place * 7 % 4 > 0

    def propose(self, lanes, anchors, choose, places=0):
        draft = self._model.propose(lanes, anchors, choose, places)
        ids = draft.ids.clone()
        for row, (lane, anchor) in enumerate(zip(lanes, anchors.tolist(), strict=True)):
            for request in self._requests:
                done, answer = lane.position - len(request.prompt_ids), self._answers[request.request_id]
                if 0 <= done < len(answer) and answer[done] == anchor:
                    known = answer[done + 1 : done + 1 + ids.shape[1]]
                    for place, token in enumerate(known):
                        if self.knows(request, done + place):
                            ids[row, place] = token
        return Draft(ids, draft.logits, draft.confidence)


@cache
def plain(mini: Mini, requests=greedy, resident: int = 0, ranks: int = 1) -> dict[str, list[int]]:
    served = Served(opened(ranks, resident, "native", of=mini), requests(mini))
    return {name: served.tokens(name) for name in "ab"}


def drafted(mini: Mini, draft: str, requests, answers, ranks: int = 1, resident: int = 0) -> Served:
    def prepare(served: Served) -> None:
        for rank in served.ranks:
            rank.executor.model = Prompter(rank.model, requests, answers)
        if draft == "alternating":
            served.engine.scheduler.depths = Alternating("fixed", 5, 5)

    setting = "5" if draft == "alternating" else draft
    return Served(opened(ranks, resident, "native", of=mini, draft=setting), requests, prepare=prepare)


@pytest.mark.parametrize(
    ("draft", "ranks"),
    [
        *((draft, 1) for draft in ("3", "5", "alternating", "acceptance", "confidence")),
        ("alternating", 2),
        ("confidence", 2),
    ],
)
def test_greedy_answers_of_two_lanes(mini, draft, ranks):
    answers = plain(mini, ranks=ranks)
    served = drafted(mini, draft, greedy(mini), answers, ranks)
    assert served.faults == []
    assert {name: served.tokens(name) for name in "ab"} == answers
    stats = served.stats("a")
    assert sum(stats["spec_depth"].values()) == stats["steps"] < ANSWER - 1
    assert stats["accept_len_mean"] == pytest.approx((ANSWER - 1) / stats["steps"], abs=0.01)


@pytest.mark.parametrize("draft", ["5", "alternating"])
def test_seeded_answers(mini, draft):
    answers = plain(mini, seeded)
    served = drafted(mini, draft, seeded(mini), answers)
    assert {name: served.tokens(name) for name in "ab"} == answers
    assert served.stats("a")["steps"] < ANSWER - 10


def test_with_experts_missing_and_a_frozen_set(mini):
    answers = plain(mini, resident=mini.random.some)
    served = drafted(mini, "alternating", greedy(mini), answers, resident=mini.random.some)
    assert {name: served.tokens(name) for name in "ab"} == answers
    assert served.stats("a")["expert_misses"] > 0


def test_what_rejected_rows_wanted_is_nobodys_demand(mini):
    """The counters of an answer are those of its own tokens."""
    some, requests = mini.random.some, greedy(mini)[:1]
    one = Served(opened(resident=some, numerics="native", of=mini), requests).stats("a")
    two = drafted(mini, "alternating", requests, plain(mini, resident=some), resident=some).stats("a")
    for key in ("expert_misses", "substituted_weight_share", "expert_hit_rate", "prefill", "decode"):
        assert two[key] == one[key], key


def few(mini: Mini, draft: str):
    """Half of what `some` keeps above the least, and four slots for what is waited for."""
    resident = (mini.random.some + mini.random.least) // 2
    return with_tide(opened(resident=resident, numerics="native", of=mini, draft=draft), sync_slots=4)


def test_exact_stays_exact(mini):
    """Of the experts that are not resident each is read before use: the answer of all of them, drafted or not."""
    wanted = [structs.replace(request, fidelity="exact") for request in greedy(mini)]
    answers = plain(mini)

    def prepare(served: Served) -> None:
        served.engine.scheduler.depths = Alternating("fixed", 5, 5)
        served.ranks[0].executor.model = Prompter(served.ranks[0].model, wanted, answers)

    served = Served(few(mini, "5"), wanted, prepare=prepare)
    assert {name: served.tokens(name) for name in "ab"} == answers
    assert served.stats("a")["steps"] < ANSWER - 1


def test_the_policy_is_told_what_steps_touch_and_wait_for(mini):
    """Of an exact and a fast lane: distinct experts of each width, and what was read for the exact one alone."""
    one, other = greedy(mini)
    told = []

    def prepare(served: Served) -> None:
        tell = served.engine.scheduler.depths.costs.tell
        served.engine.scheduler.depths.costs.tell = lambda *what: (told.append(what), tell(*what))

    served = Served(few(mini, "acceptance"), [structs.replace(one, fidelity="exact"), other], prepare=prepare)
    shape, urgent = served.ranks[0].model.shape, served.ranks[0].executor.urgent
    picks = shape.moe_layers * shape.top_k
    assert sum(what[2].reads for what in told) > 10
    assert sum(what[2].waited_s for what in told) <= urgent.waits.seconds
    for widths, _, touched, waiting in told:
        assert set(waiting) <= {served.stats("a")["lane"]}
        assert picks <= touched.experts <= picks * sum(widths.values())
        assert touched.experts == picks or sum(widths.values()) > 1


def test_a_penalised_lane_is_not_drafted_and_its_neighbour_is(mini):
    """Nor is its likelihood told of another row."""
    told = structs.replace(asked(mini, "b", begin=37, tokens=33, answer=20, presence_penalty=0.5), logprobs=2)
    requests = [greedy(mini)[0], told]
    bare = Served(opened(numerics="native", of=mini), requests)
    answers = {name: bare.tokens(name) for name in "ab"}
    served = drafted(mini, "5", requests, answers)
    assert {name: served.tokens(name) for name in "ab"} == answers
    assert served.stats("b")["spec_depth"] == {"0": 19}
    assert likelihoods(served, "b") == likelihoods(bare, "b") != []
    assert served.stats("a")["steps"] < ANSWER - 1


def likelihoods(served: Served, name: str) -> list[TokenLogprob]:
    said = [event for event in served.events if isinstance(event, Tokens) and event.request_id == name]
    return [one for event in said for one in event.logprobs]


class Watched(Prompter):
    """Remembers, of everything that is proposed, the tokens that its answer had by then, and how many it may have."""

    def __init__(self, *known) -> None:
        super().__init__(*known)
        self.asked: list[tuple[int, int]] = []

    def propose(self, lanes, anchors, choose, places=0):
        (request,) = self._requests
        self.asked += [(lane.position - len(request.prompt_ids) + 1, request.max_tokens) for lane in lanes]
        return super().propose(lanes, anchors, choose, places)


class Planned(Depths):
    """Remembers the depths."""

    def plan(self, rows):
        self.plans = [*getattr(self, "plans", []), super().plan(rows)]
        return self.plans[-1]


@pytest.mark.parametrize("mode", ["fixed", "acceptance", "confidence"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 12])
def test_drafting_begins_with_the_prompt_and_ends_before_the_answer(mini, mode, length):
    """No proposal of which max_tokens could use nothing, and no step that verifies more than it could."""
    answers, requests = plain(mini), [asked(mini, "a", answer=length)]
    seen: list[tuple[Watched, Planned]] = []

    def prepare(served: Served) -> None:
        watched, planned = Watched(served.ranks[0].model, requests, answers), Planned(mode, 5, 5)
        served.ranks[0].executor.model, served.engine.scheduler.depths = watched, planned
        seen.append((watched, planned))

    served = Served(opened(numerics="native", of=mini, draft="5"), requests, prepare=prepare)
    ((watched, planned),) = seen
    assert served.faults == []
    assert served.tokens("a") == answers["a"][:length]
    assert [drawn for drawn, _ in watched.asked][:1] == ([1] if length > 2 else [])
    assert all(most - drawn >= 2 for drawn, most in watched.asked)
    had = 1
    for (depth,), _ in getattr(planned, "plans", []):
        assert depth <= length - had - 1
        had += 1  # at least
    if length > 2 and mode != "confidence":  # of which a drafter may have none
        assert planned.plans[0][0][0] >= 1


def test_behind_a_first_token_that_ends_the_answer_nothing_is_drafted(mini):
    answers = plain(mini)
    requests = [structs.replace(greedy(mini)[0], stop_ids=(answers["a"][0],))]
    seen: list[Watched] = []

    def prepare(served: Served) -> None:
        seen.append(Watched(served.ranks[0].model, requests, answers))
        served.ranks[0].executor.model = seen[0]

    served = Served(opened(numerics="native", of=mini, draft="5"), requests, prepare=prepare)
    assert (served.tokens("a"), served.faults, seen[0].asked) == ([], [], [])


def test_an_answer_ends_inside_a_block(mini):
    """At a stop id, and at its length, wherever in a block they fall."""
    answers = plain(mini)
    for length in (2, 3, 5, 8, 11):
        served = drafted(mini, "5", [asked(mini, "a", answer=length)], answers)
        assert served.tokens("a") == answers["a"][:length]
    for place in (3, 6, 9):
        stop = answers["a"][place]
        served = drafted(mini, "5", [structs.replace(greedy(mini)[0], stop_ids=(stop,))], answers)
        assert served.tokens("a") == answers["a"][: answers["a"].index(stop)]


def test_the_drafter_itself_is_asked(mini):
    """Without the prompter: its proposals are of its own, and change no token."""
    served = Served(opened(numerics="native", of=mini, draft="5"), greedy(mini))
    assert {name: served.tokens(name) for name in "ab"} == plain(mini)
    assert max(map(int, served.stats("a")["spec_depth"])) == 5


def test_a_draft_has_as_many_places_as_the_model_gives(mini):
    model = Served(opened(numerics="native", of=mini, draft="5"), []).ranks[0].model
    lane = model.open_lane(0)
    model.prefill(lane, torch.tensor([5, 6, 7]), "none")
    draft = model.propose([lane], torch.tensor([8]), lambda _, logits: logits.argmax(-1))
    assert draft.ids.shape == draft.confidence.shape == (1, model.draft_tokens)
