"""The loop's side: bounded, cancellable, honest about the engine's end. A real engine runs on a thread of its own."""

import asyncio
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from engine_fakes import LIMITS, Alone, executor, request
from msgspec.structs import replace

from tided.engine import client as client_module
from tided.engine.board import ExpertBoard
from tided.engine.client import EngineClient
from tided.engine.leader import LeaderEngine
from tided.engine.scheduler import Scheduler
from tided.engine.stats import Residency
from tided.engine.types import Failed, Finished, Sampling, Started, Tokens
from tided.errors import QueueFullError, RequestError

BOARD = ExpertBoard(1, 2, [])
RESIDENCY = Residency(generation=0, residents=15, total=24, mask_hash="")


class Gate(Alone):
    """A link that holds the engine before a step while it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()

    def send(self, step) -> None:
        assert self.open.wait(30)
        super().send(step)


@asynccontextmanager
async def running():
    client, link, loop = EngineClient(LIMITS.lanes, LIMITS.queue), Gate(), asyncio.get_running_loop()

    def fail(error):  # as the daemon does when the engine ends by an error
        loop.call_soon_threadsafe(client.fail_all, error.what)

    engine = LeaderEngine(executor(), Scheduler(LIMITS), link, client.post, fail)
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    client.attach(engine)
    try:
        yield client, engine, link
    finally:
        link.open.set()
        engine.close("end of the test")
        await asyncio.to_thread(thread.join, 30)
        assert not thread.is_alive()


async def collect(answer):
    return [event async for event in answer]


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_an_answer_streams_in_order():
    async with running() as (client, _, _):
        events = await collect(client.submit(request("a", prompt=20, max_tokens=6)))
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    tokens = [token for event in events[1:-1] for token in event.token_ids]
    assert len(tokens) == events[-1].completion_tokens == 6
    assert client.recent(5)[0] == events[-1].stats


async def test_a_slow_reader_finds_its_tokens_joined():
    async with running() as (client, _, _):
        answer = client.submit(request("a", max_tokens=50))
        await until(lambda: answer.done)
        events = await collect(answer)
    assert [type(event) for event in events] == [Started, Tokens, Finished]
    assert len(events[1].token_ids) == 50


async def test_what_runs_in_the_background_is_nobodys():
    """It takes no place of the queue, and is in no figure; a drain does not wait for it."""
    async with running() as (client, _, link):
        link.open.clear()
        behind = replace(request("behind", prompt=30, max_tokens=1), scored=True, background=True)
        answer = client.submit(behind)
        health = client.health()
        assert (health["busy"], health["queue"], health["lanes"]["busy"]) == (False, 0, 0)
        assert client.idle_s >= 0
        asked = [client.submit(request(f"r{i}", max_tokens=2)) for i in range(LIMITS.lanes + LIMITS.queue)]
        assert client.health()["queue"] == len(asked)
        assert client.idle_s == 0
        link.open.set()
        await asyncio.gather(*map(collect, asked))
        assert (await collect(answer))[-1].reason in ("length", "cancelled")
        assert len(client.recent_stats) == len(asked)
        again = client.submit(replace(behind, request_id="again"))
        await client.drain(20)
        assert (await collect(again))[-1].reason in ("cancelled", "length")


async def test_a_full_queue_is_refused_before_any_event_and_a_cancelled_place_is_free_again():
    async with running() as (client, _, link):
        link.open.clear()
        answers = [client.submit(request(f"r{i}", max_tokens=2)) for i in range(LIMITS.lanes + LIMITS.queue)]
        with pytest.raises(QueueFullError):
            client.submit(request("late"))
        client.cancel("r5")
        link.open.set()
        assert (await collect(answers[5]))[-1].reason == "cancelled"
        late = client.submit(request("late", max_tokens=1))
        ends = [(await collect(answer))[-1] for answer in [*answers[:5], late]]
        assert all(end.reason == "length" for end in ends)


async def test_closing_a_stream_cancels_its_request():
    async with running() as (client, _, _):
        answer = client.submit(request("a", prompt=3, max_tokens=300))
        assert isinstance(await anext(answer), Started)
        await answer.aclose()
        await until(lambda: not client.health()["busy"])
        assert client.recent_stats[0]["completion_tokens"] < 300


async def test_closing_an_ended_stream_leaves_its_id_alone():
    async with running() as (client, _, _):
        first = client.submit(request("a", max_tokens=2))
        await collect(first)
        second = client.submit(request("a", max_tokens=40))
        await first.aclose()
        assert (await collect(second))[-1].reason == "length"


async def test_cancelling_twice_or_too_late_does_nothing():
    async with running() as (client, _, _):
        answer = client.submit(request("a", max_tokens=300))
        client.cancel("a")
        client.cancel("a")
        assert (await collect(answer))[-1].reason == "cancelled"
        client.cancel("a")
        client.cancel("unknown")
        assert (await collect(client.submit(request("a", max_tokens=2))))[-1].reason == "length"


async def test_an_id_in_use_is_refused():
    async with running() as (client, _, _):
        client.submit(request("a", max_tokens=300))
        with pytest.raises(RequestError, match="in use"):
            client.submit(request("a"))
        client.cancel("a")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prompt_ids": []}, "needs a prompt"),
        ({"max_tokens": 0}, "room for one token"),
        ({"max_tokens": 396}, "maximum context length is 400"),
        ({"prompt_ids": [1, 64]}, "outside of 0 to 63"),
        ({"prompt_ids": [-1]}, "outside of 0 to 63"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": Sampling(temperature=-1.0)}, "temperature"),
        ({"sampling": Sampling(top_p=float("inf"))}, "top_p"),
        ({"sampling": Sampling(top_k=-1)}, "top_k"),
        ({"sampling": Sampling(min_p=float("nan"))}, "min_p"),
        ({"sampling": Sampling(seed=1 << 64)}, "64 bits"),
    ],
)
async def test_what_would_fail_on_every_rank_is_refused_at_once(change, match):
    async with running() as (client, _, _):
        with pytest.raises(RequestError, match=match):
            client.submit(replace(request("bad"), **change))
        extreme = Sampling(temperature=1e-6, top_p=1e-9, top_k=10**12, seed=(1 << 64) - 1)
        good = replace(request("good", max_tokens=2), sampling=extreme)
        assert (await collect(client.submit(good)))[-1].reason == "length"


async def test_the_engines_end_fails_every_open_request_and_later_ones():
    async with running() as (client, engine, _):
        engine.executor.model.raise_at = 40
        answers = [client.submit(request(name, max_tokens=300 // 3)) for name in "abc"]
        for events in await asyncio.gather(*map(collect, answers)):
            assert isinstance(events[-1], Failed)
            assert "the disk is gone" in events[-1].message
            assert "/secret" not in events[-1].message  # the server's paths are no client's business
        await until(lambda: client.state == "fault")
        assert "the disk is gone" in client.health()["fault"]
        assert "/secret" not in str(client.health())
        with pytest.raises(RequestError, match="the engine stopped") as refused:
            client.submit(request("d"))
        assert refused.value.status == 503


async def test_a_lost_peer_fails_requests_at_once_even_if_the_engine_hangs():
    async with running() as (client, _, link):
        link.open.clear()
        answer = client.submit(request("a"))
        client.fail_all("rank 1 is silent")
        assert [type(event) for event in await collect(answer)] == [Failed]
        link.open.set()


async def test_health_tells_lanes_queue_and_residents():
    async with running() as (client, engine, link):
        idle = client.health()
        assert (idle["state"], idle["lanes"], idle["queue"]) == ("ready", {"total": 2, "busy": 0}, 0)
        assert (idle["residents"], idle["experts"], idle["generation"]) == (15, 24, 0)
        link.open.clear()
        answers = [client.submit(request(name, max_tokens=2)) for name in "abcd"]
        await until(lambda: client.health()["lanes"]["busy"] >= 1)
        assert client.health()["queue"] >= 2
        link.open.set()
        await asyncio.gather(*map(collect, answers))
        assert client.health()["engine_seq"] == engine.seq > 0
        assert client.health()["last_step_age_s"] >= 0


async def test_the_engine_learns_what_its_tokens_spell():
    client = EngineClient(2, 2, [b"a", None])
    engine = SimpleNamespace()
    client.attach(engine)
    assert engine.token_bytes == [b"a", None]


async def test_health_tells_the_speed_of_the_answers_that_grow(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    client = EngineClient(2, 2)
    client.attach(
        SimpleNamespace(
            submit=lambda request, guide=None, pixels=(): None,
            residency=RESIDENCY,
            seq=1,
            last_step_s=0.0,
            expert_reads={"source": "pack"},
            data_plane={"sum_us": 12.0},
            about={"build": {"code": "ab"}},
            living=(8, 9),
            board=BOARD,
        )
    )

    async def post(at_s, *events):
        now[0] = at_s
        client.post(events)
        await asyncio.sleep(0)  # one turn of the loop: the wake-up runs

    assert client.health()["build"] == {"code": "ab"}
    assert client.health()["tide"] == {"moving": False, "last_plan": None}

    def speed():
        return client.health()["decode_tok_s"]

    assert speed() is None
    for name in "ab":
        client.submit(request(name))
    await post(160, Started("a"), Started("b"), Tokens("a", [1]))  # a minute for the prompt
    assert speed() is None
    for step in range(1, 41):
        await post(160 + step / 10, Tokens("a", [1]), Tokens("b", [1, 2]))
    assert speed() == pytest.approx(30)
    now[0] += 8  # a stall shows at once
    assert 1 < speed() < 15
    await post(now[0], Finished("a", "stop", 3, 41, {}))
    assert speed() is not None
    client.fail_all("lost")
    assert speed() is None


async def test_steps_that_arrive_with_one_wake_up_are_counted_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    client = EngineClient(2, 2)
    client.attach(
        SimpleNamespace(
            submit=lambda request, guide=None, pixels=(): None,
            residency=RESIDENCY,
            seq=1,
            last_step_s=0.0,
            expert_reads={"source": "pack"},
            data_plane={"sum_us": 12.0},
            about={"build": {"code": "ab"}},
            living=(8, 9),
            board=BOARD,
        )
    )
    answer = client.submit(request("a"))
    client.post([Started("a"), Tokens("a", [1])])
    assert [type(await anext(answer)) for _ in range(2)] == [Started, Tokens]
    for step in range(1, 11):
        now[0] = step / 5
        for _ in range(2):  # two steps of the engine before the loop comes round
            client.post([Tokens("a", [1])])
        assert (await anext(answer)).token_ids == [1, 1]  # a reader that keeps up finds them joined
    assert client.health()["decode_tok_s"] == pytest.approx(10)


async def test_a_reader_that_goes_leaves_nothing_that_waits_for_it():
    async with running() as (client, _, link):
        answer = client.submit(request("a", max_tokens=300))
        await until(lambda: answer.growing)
        link.open.clear()
        assert answer._events
        await answer.aclose()
        assert not answer._events
        link.open.set()


async def test_draining_refuses_newcomers_and_waits_for_the_rest():
    async with running() as (client, _, _):
        answer = client.submit(request("a", max_tokens=20))
        drain = asyncio.create_task(client.drain(30))
        await until(lambda: client.state == "draining")
        with pytest.raises(RequestError, match="shutting down"):
            client.submit(request("b"))
        await drain
        assert (await collect(answer))[-1].completion_tokens == 20


async def test_draining_cancels_what_outlasts_its_time():
    async with running() as (client, _, link):
        link.open.clear()
        answer = client.submit(request("a", max_tokens=300))
        drain = asyncio.create_task(client.drain(0.01))
        await until(lambda: answer.cancelled)
        link.open.set()
        await drain
        assert not client.health()["busy"]
        assert (await collect(answer))[-1].reason == "cancelled"


async def test_before_the_engine_is_there_requests_are_refused():
    client = EngineClient(1, 1)
    assert client.health()["state"] == "starting"
    with pytest.raises(RequestError, match="being loaded"):
        client.submit(request("a"))
    client.fail_all("rank 1 differs")
    with pytest.raises(RequestError, match="rank 1 differs"):
        client.submit(request("a"))
