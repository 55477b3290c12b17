"""Answers scored again with every expert: what is remembered, what is found, and who waits for whom."""

import asyncio
from statistics import fmean

import pytest
from engine_fakes import request
from msgspec.structs import replace
from real_pair import GLM, GOLDEN, Living, opened
from test_caches import PROMPT, ask

from tided.engine.audit import Answered, Auditor, Scores, again, audit_of
from tided.engine.types import Failed, Finished, Scored, Started, TokenLogprob, Tokens
from tided.errors import QueueFullError, RequestError


def told(
    auditor: Auditor, name: str, ids: list[int], reason: str = "length", prompt: int = 4, stats=None, **changes
) -> None:
    auditor.opened(replace(request(name, prompt=prompt), **changes))
    auditor.heard(Started(name))
    for token in ids:
        auditor.heard(Tokens(name, [token]))
    auditor.heard(Finished(name, reason, prompt, len(ids), stats or {}))


class FakeClient:
    """Plays what the engine says of an audit, `plays` in turn; the last one again and again."""

    def __init__(self, *plays) -> None:
        self.plays, self.asked, self.cancelled = list(plays), [], []
        self.serves, self.idle_s, self.rested = True, 0.0, 0

    async def rests(self, timeout_s: float) -> bool:
        self.rested += 1
        return True

    async def submit(self, asked):
        self.asked.append(asked)
        for event in (self.plays.pop(0) if len(self.plays) > 1 else self.plays[0])(asked):
            await asyncio.sleep(0)
            yield event

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


def scored(asked, redrawn=None, reason="length"):
    ids = asked.prompt_ids[1:]
    again_ = (asked.prompt_ids[asked.redrawn_from :] if redrawn is None else redrawn) if asked.redrawn_from else []
    loss = 1.0 if asked.fidelity == "exact" else 1.5
    stats = {"read_before_use": {"reads": 7}, "nvme_gb": 0.5, "substituted_weight_share": 0.2}
    logprobs = [TokenLogprob(one, -loss, [], 1) for one in ids]
    return [Scored(asked.request_id, logprobs, again_), Finished(asked.request_id, reason, len(ids) + 1, 1, stats)]


def gave_way(asked):
    return [Started(asked.request_id), Finished(asked.request_id, "cancelled", 1, 0, {})]


async def test_an_answer_is_scored_with_every_expert_and_with_those_that_are_here():
    auditor, client = Auditor(1000, 0.0, True), FakeClient(lambda asked: scored(asked, [5, 6, 9]))
    told(auditor, "a", [5, 6, 7], reason="stop", fidelity="fast", loop_break=9)
    found = await auditor.audit(client, "a")
    exact, resident = client.asked
    assert (exact.fidelity, exact.adapts, exact.background, exact.redrawn_from) == ("exact", True, True, 4)
    assert (resident.fidelity, resident.adapts, resident.background) == ("fast", False, True)
    assert exact.prompt_ids[4:] == [5, 6, 7]
    assert (found.exact_loss, found.resident_loss, found.residency_loss) == (1.0, 1.5, 0.5)
    assert (found.tokens, found.differ, found.reads, found.read_bytes, found.ends_alike) == (
        3,
        1,
        7,
        500_000_000,
        False,
    )
    [one] = found.differences
    assert (one.at, one.token_id, one.exact_id) == (2, 7, 9)
    assert await auditor.audit(client, "a") == found
    assert len(client.asked) == 2, "an audit is made once"


async def test_an_exact_answer_is_scored_once_and_a_guided_one_is_not_drawn_again():
    auditor, client = Auditor(1000, 0.0, True), FakeClient(scored)
    told(auditor, "a", [5], fidelity="exact")
    assert (await auditor.audit(client, "a")).residency_loss == 0
    assert len(client.asked) == 1
    told(auditor, "b", [5], guided=True)
    found = await auditor.audit(client, "b")
    assert (found.differ, found.differences, found.ends_alike) == (None, [], None)
    assert client.asked[-1].redrawn_from == 0


async def test_whether_an_answer_that_went_in_circles_would_end_alike_is_not_known():
    """No token ended it, and its audit looks for none: whatever is drawn there says nothing."""
    auditor, client = Auditor(1000, 0.0, True), FakeClient(scored)
    told(auditor, "a", [5], reason="stop", stats={"loop_break": True})
    told(auditor, "b", [5], reason="stop", stats={"loop_break": False})
    assert (await auditor.audit(client, "a")).ends_alike is None
    assert (await auditor.audit(client, "b")).ends_alike is False


async def test_one_that_is_not_remembered_may_have_been_ended_from_outside():
    """At a client's stop string the API cancels it."""
    auditor = Auditor(1000, 0.0, True)
    told(auditor, "a", [5], reason="cancelled")
    with pytest.raises(RequestError, match="a stop string"):
        await auditor.audit(FakeClient(scored), "a")


async def test_one_that_gave_way_begins_again_when_nobody_asks():
    auditor, client = Auditor(1000, 0.0, True), FakeClient(gave_way, gave_way, scored)
    told(auditor, "a", [5, 6])
    found = await auditor.audit(client, "a")
    assert found.tries == 3
    assert client.rested == len(client.asked) == 4
    assert len({one.request_id for one in client.asked}) == 4


async def test_memory_is_bounded_and_the_oldest_go():
    auditor = Auditor(100, 0.0, True)
    for name in "abc":
        told(auditor, name, [5] * 20, asker=f"who asked {name}")  # 40 with its prompt and what it takes beside
    assert [auditor.asker_of(name) for name in "abc"] == [None, "who asked b", "who asked c"]
    told(auditor, "large", [5] * 81)
    assert [auditor.asker_of(name) for name in ("b", "c", "large")] == ["who asked b", "who asked c", None]
    assert auditor.asker_of("latest") == "who asked c"
    assert auditor._tokens == sum(one.tokens for one in auditor._kept.values()) <= 100


async def test_an_answer_that_filled_the_context_is_audited_but_for_its_last_token():
    auditor, client = Auditor(1000, 0.0, True, context_tokens=10), FakeClient(scored)
    told(auditor, "whole", [5, 6, 7, 8, 9, 8], fidelity="exact")
    told(auditor, "short", [5, 6, 7, 8, 9], fidelity="exact")
    for name in ("whole", "short"):
        assert (await auditor.audit(client, name)).tokens == 5
        assert len(client.asked[-1].prompt_ids) == 9


@pytest.mark.parametrize(
    "changes", [{"scored": True}, {"background": True}, {"reason": "cancelled"}, {"ids": []}, {"most": 0}], ids=str
)
async def test_what_cannot_be_audited_is_not_kept(changes):
    auditor = Auditor(changes.pop("most", 1000), 0.0, True)
    told(auditor, "a", **{"ids": [5]} | changes)
    auditor.opened(request("failed"))
    auditor.heard(Failed("failed", "x"))
    with pytest.raises(RequestError) as error:
        await auditor.audit(FakeClient(scored), "a")
    assert error.value.status == 404
    assert auditor._open == {}


async def test_an_audit_that_cannot_be_made_says_why():
    auditor = Auditor(1000, 0.0, False)
    told(auditor, "a", [5])
    with pytest.raises(RequestError, match="sync_slots"):
        await auditor.audit(FakeClient(scored), "a")
    auditor, client = Auditor(1000, 0.0, True), FakeClient(gave_way)
    told(auditor, "a", [5])
    client.serves = False
    with pytest.raises(RequestError) as error:
        await auditor.audit(client, "a")
    assert error.value.status == 503
    with pytest.raises(RequestError, match="boom"):
        await auditor.audit(FakeClient(lambda asked: [Failed(asked.request_id, "boom")]), "a")


async def test_few_wait_for_an_audit_and_one_that_nobody_waits_for_is_cancelled():
    auditor, client = Auditor(1000, 0.0, True), FakeClient(scored)
    told(auditor, "a", [5])
    hold = asyncio.Event()

    async def submit(asked):
        client.asked.append(asked)
        await hold.wait()
        yield Started(asked.request_id)

    client.submit = submit
    waiting = [asyncio.create_task(auditor.audit(client, "a")) for _ in range(8)]
    await asyncio.sleep(0.01)
    with pytest.raises(QueueFullError):
        await auditor.audit(client, "a")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert client.cancelled == [client.asked[0].request_id]


async def test_answers_are_audited_when_it_is_quiet_the_newest_first(monkeypatch):
    monkeypatch.setattr("tided.engine.audit.LOOK_S", 0.001)
    auditor, client = Auditor(1000, 5.0, True), FakeClient(scored)
    for name in ("old", "new"):
        told(auditor, name, [5, 6], fidelity="exact")
    assert auditor.watches
    watch = asyncio.create_task(auditor.watch(client))
    await asyncio.sleep(0.05)
    assert client.asked == [], "somebody has asked a moment ago"
    client.idle_s = 6.0
    async with asyncio.timeout(20):
        while len(auditor._audits) < 2:
            await asyncio.sleep(0.001)
    assert list(auditor._audits) == ["new", "old"]
    told(auditor, "newest", [5], fidelity="exact")
    async with asyncio.timeout(20):
        while len(auditor._audits) < 3:
            await asyncio.sleep(0.001)
    watch.cancel()
    assert not Auditor(0, 5.0, True).watches
    assert not Auditor(9, 0.0, True).watches


async def test_an_audit_that_fails_by_a_mistake_is_told_and_the_next_answer_is_audited(monkeypatch, caplog):
    monkeypatch.setattr("tided.engine.audit.LOOK_S", 0.001)

    def mistaken(_):
        raise ValueError("a mistake")

    auditor, client = Auditor(1000, 5.0, True), FakeClient(mistaken, scored)
    for name in ("old", "new"):
        told(auditor, name, [5, 6], fidelity="exact")
    client.idle_s = 6.0
    watch = asyncio.create_task(auditor.watch(client))
    async with asyncio.timeout(20):
        while not auditor._audits and not watch.done():
            await asyncio.sleep(0.001)
    assert list(auditor._audits) == ["old"]
    assert caplog.text.count("an answer could not be audited") == 1
    watch.cancel()


def audited(living: Living, asked, ids: list[int], reason: str):
    """As the auditor has it done, by an engine that is turned by hand."""
    answered, found = Answered(asked, ids, reason), {}
    for fidelity in dict.fromkeys(("exact", asked.fidelity)):
        one = again(answered, f"{fidelity} {asked.request_id}", fidelity)
        living.submit(one)
        living.rest()
        events = [e for e in living.events if isinstance(e, Scored) and e.request_id == one.request_id]
        end = living.end(one.request_id)
        found[fidelity] = Scores(
            [x for e in events for x in e.logprobs], [x for e in events for x in e.redrawn], end.stats,
            end.reason == "stop", 1,
        )  # fmt: skip
    return audit_of(answered, found["exact"], found[asked.fidelity], 0.1)


@pytest.mark.parametrize(("path", "total", "ranks"), [(GOLDEN, 80, 2), (GLM, 64, 1)], ids=["deepseek", "glm"])
def test_an_audit_finds_what_residency_changed_and_nothing_else(path, total, ranks):
    """At half of the experts a fast answer is another one, and an exact one is not: greedy, or drawn and penalised."""
    living = Living(model := opened(ranks, path=path, resident=total // 2))
    chunks = -(-(40 + 12) // model.settings.model.prefill_chunk_tokens)
    beside = replace(ask("beside", PROMPT[40:70], 8, temperature=0.0), fidelity="exact")
    living.submit(beside)
    living.rest()
    draws = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 6, "presence_penalty": 1.0}]
    differ = 0
    for at, draw in enumerate(draws):
        exact, fast = (
            replace(ask(f"{fidelity} {at}", PROMPT[:40], 12, **draw), fidelity=fidelity)
            for fidelity in ("exact", "fast")
        )
        living.submit(exact)
        living.rest()
        clean = audited(living, exact, living.tokens(exact.request_id), "length")
        assert (clean.differ, clean.residency_loss) == (0, 0.0)
        living.submit(fast)
        living.rest()
        drawn = living.tokens(fast.request_id)
        found = audited(living, fast, drawn, "length")
        assert found.residency_loss != 0
        assert 0 < found.reads <= (total - total // 2) * chunks  # what is missing, once for each chunk that wants it
        assert found.tokens == 12
        differ += found.differ
        # Up to where an answer begins to differ it is the exact one; from there on it goes its own way.
        first = found.differences[0].at if found.differences else len(drawn)
        assert drawn[:first] == living.tokens(exact.request_id)[:first]
        if first < len(drawn):
            assert found.differences[0].exact_id == living.tokens(exact.request_id)[first]
    assert differ > 0
    # Somebody asks between two layers of an audit's chunk: neither notices the other.
    again_ = replace(again(Answered(fast, drawn, "length"), "interrupted", "exact"))
    living.submit(again_)
    living.turn(3)
    steps = living.engine.seq
    living.submit(replace(beside, request_id="later"))
    living.rest()
    assert living.tokens("later") == living.tokens("beside")
    assert living.engine.seq > steps
    told_ = [x for e in living.events if isinstance(e, Scored) and e.request_id == "interrupted" for x in e.logprobs]
    whole = [x for e in living.events if isinstance(e, Scored) and e.request_id == "exact fast 1" for x in e.logprobs]
    assert told_ == whole
    living.check()
    living.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_audit_whose_lane_is_needed_leaves_nothing_behind(ranks):
    """In the middle of a chunk, between two layers, on every rank."""
    living = Living(opened(ranks, path=GLM, resident=32, lanes=1))
    asked = replace(ask("asked", PROMPT[:40], 6), fidelity="exact")
    living.submit(asked)
    living.rest()
    wanted = living.tokens("asked")
    living.submit(again(Answered(asked, wanted, "length"), "behind", "exact"))
    living.turn(8)  # of a few layers a chunk: the second one is under way
    assert living.end("behind") is None
    assert living.ranks[0].executor.lanes[0].scoring is not None
    living.submit(replace(asked, request_id="again"))
    living.rest()
    assert living.end("behind").reason == "cancelled"
    assert living.tokens("again") == wanted
    living.check()
    living.close()


def test_losses_are_those_of_the_answer_alone():
    """Not of its prompt."""
    asked = request("a", prompt=3)
    told_ = [TokenLogprob(one, -float(one), [], 1 + (one > 4)) for one in (9, 9, 3, 4, 5)]
    one = Scores(told_, [3, 4, 5], {}, True, 1)
    found = audit_of(Answered(asked, [3, 4, 5], "stop"), one, one, 1.0)
    assert found.exact_loss == fmean([3, 4, 5])
    assert found.exact_top1 == pytest.approx(2 / 3)
    assert (found.differ, found.ends_alike) == (0, True)
