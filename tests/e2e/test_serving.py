"""One request's whole way, from HTTP over two ranks and back, at two thirds of the experts: of every bundled model, as
its profile has it."""

import asyncio
import json
import re
import time

import aiohttp
import pytest
from typer.testing import CliRunner

from packers.shards import Checkpoint
from tests.bundled import DEEPSEEK
from tests.daemon.helpers import running, until
from tests.e2e.conftest import ROOT, answer, ask, chunks, get, mini, post
from tidectl.main import app
from tided.guard import code_digest

pytestmark = pytest.mark.xdist_group("serving")
SECRET = "zanzibar-quartz-lantern"
TIDE = (
    'fidelity = "balanced"\nsync_slots = 8\nsync_weight = 0.2\nsync_reads = 16'  # GLM-5.3's policy for what is missing
)


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory):
    with running(mini(model, tide="" if model is DEEPSEEK else TIDE), tmp_path_factory.mktemp("pair")) as started:
        yield started


@pytest.fixture
def deepseek(model, pair):
    """The pair of the one model for what takes long and asks nothing of a family."""
    if model is not DEEPSEEK:
        pytest.skip("shown on the other model")
    return pair


@pytest.fixture(scope="module")
def residents(model, pair):
    """As many mean experts' worth of bytes as the profile says; of one size, as many experts."""
    health = asyncio.run(get(pair.url, "/health"))[1]
    if model is DEEPSEEK:
        assert (health["residents"], health["residents_bytes_share"]) == (312, None)
    else:
        assert 0.65 < health["residents_bytes_share"] < 0.68
    assert sum(health["residents_by_layer"]) == health["residents"]
    return health["residents"]


async def test_traffic_of_one_kind_moves_the_resident_set_towards_it(pair, residents):
    """What the first answers had to substitute, the later ones find resident. Here first: all answers move the set."""

    async def substituted(n):
        text = f"Tell me a long story about {n} ships and the sea."
        _, reply = await post(pair.url, ask(text, max_tokens=32, fidelity="fast"))
        return reply["x_engine_stats"]["substituted_weight_share"]

    before = (await get(pair.url, "/health"))[1]
    shares = [await substituted(n) for n in range(6)]
    while sum(shares[-3:]) >= sum(shares[:3]) and len(shares) < 16:  # a set of larger experts takes longer
        shares.append(await substituted(len(shares)))
    after = (await get(pair.url, "/health"))[1]
    assert after["generation"] > before["generation"]
    assert after["residents"] == before["residents"] == residents
    assert sum(shares[-3:]) < sum(shares[:3])


async def test_an_answer_streams_with_usage_and_statistics(pair, residents):
    body = ask("Tell me about Japan.", stream=True, stream_options={"include_usage": True})
    async with aiohttp.ClientSession() as session, session.post(f"{pair.url}/v1/chat/completions", json=body) as reply:
        assert reply.status == 200
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        events = await chunks(reply)
    assert events[-1] == "[DONE]"
    text = "".join(c["delta"].get("content") or "" for e in events[:-1] for c in e["choices"])
    assert "Japan" in text
    assert text.rstrip().endswith(".")
    usage = next(e["usage"] for e in reversed(events[:-1]) if e.get("usage"))
    stats = next(e["x_engine_stats"] for e in reversed(events[:-1]) if e.get("x_engine_stats"))
    assert usage["completion_tokens"] == stats["completion_tokens"] > 5
    assert stats["residency"]["residents"] == residents
    assert 0 <= stats["substituted_weight_share"] < 0.5
    section = (ROOT / "docs" / "openai.md").read_text().partition("## What an answer cost")[2].partition("\n## ")[0]
    for names, meaning in re.findall(r"^\| (`.*`) \| (.*) \|$", section, re.MULTILINE):
        told = [stats[name] for name in re.findall(r"`(\w+)`", names)]
        if isinstance(told[0], dict):
            inner = set(re.findall(r"`(\w+)`", meaning)) - {"none", "ram", "disk"}
            assert inner
            assert inner <= told[0].keys()


async def test_models_and_health(model, pair):
    status, models = await get(pair.url, "/v1/models")
    assert status == 200
    assert models["data"][0]["id"] == f"mini-{model}"
    status, health = await get(pair.url, "/health")
    assert status == 200
    assert health["status"] in {"ok", "ready"}
    assert health["build"]["code"] == code_digest()
    assert health["profile"] == pair.profile.stem
    assert health["machine"]["device"]
    assert health["checkpoint"]["identity"] == Checkpoint.open(model.path).identity()


async def test_the_other_api_gives_the_same_answer(pair):
    """Anthropic's, whole and streamed, with its usage and its order of events."""
    question = {"role": "user", "content": "What is the capital of Norway?"}
    whole = {
        "model": "any",
        "max_tokens": 24,
        "temperature": 0,
        "thinking": {"type": "disabled"},
        "messages": [question],
    }
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{pair.url}/v1/messages", json=whole) as reply:
            assert reply.status == 200, await reply.text()
            message = await reply.json()
        async with session.post(f"{pair.url}/v1/messages", json=whole | {"stream": True}) as reply:
            told = [json.loads(line[6:]) async for line in reply.content if line.startswith(b"data: ")]
    events = [event for event in told if event["type"] != "ping"]
    (block,) = message["content"]
    said = answer(await post(pair.url, ask(question["content"], max_tokens=24)))
    assert (block["type"], block["text"]) == ("text", said)
    assert "Oslo" in said
    assert message["stop_reason"] == "end_turn"
    names = [event["type"] for event in events]
    assert (names[0], names[1], names[-2:]) == (
        "message_start",
        "content_block_start",
        ["message_delta", "message_stop"],
    )
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == said
    used = events[-2]["usage"]["output_tokens"]
    assert used == message["usage"]["output_tokens"] > 3


async def test_a_request_may_ask_for_another_fidelity_than_the_profile_s(model, pair):
    """`balanced` is GLM-5.3's profile's own; what is missing is then read before use."""
    text = "Write a Python function that reverses a list."
    replies = [await post(pair.url, ask(text, max_tokens=24, **given)) for given in ({}, {"fidelity": "exact"})]
    plain, exact = (reply["x_engine_stats"] for _, reply in replies)
    assert plain["fidelity"] == ("fast" if model is DEEPSEEK else "balanced")
    assert (exact["fidelity"], exact["substituted_weight_share"]) == ("exact", 0)
    if model is not DEEPSEEK:
        assert plain["decode"]["classes"]["read"] + plain["prefill"]["classes"]["read"] > 0


BAD = [
    pytest.param("{", None, id="not JSON"),
    pytest.param("[]", None, id="not an object"),
    pytest.param(json.dumps({"messages": []}), "messages", id="no messages"),
    pytest.param(json.dumps(ask("x", temperature=1e9)), "temperature", id="absurd temperature"),
    pytest.param(json.dumps(ask("x", temperature=True)), "temperature", id="boolean temperature"),
    pytest.param('{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', None, id="NaN"),
    pytest.param(json.dumps(ask("x", top_p=-1)), "top_p", id="negative top_p"),
    pytest.param(json.dumps(ask("x", top_k=2**70)), "top_k", id="huge top_k"),
    pytest.param(json.dumps(ask("x", seed=2**200)), "seed", id="huge seed"),
    pytest.param(json.dumps(ask("x", max_tokens=-5)), "max_tokens", id="negative max_tokens"),
    pytest.param(json.dumps(ask("word " * 3000)), "messages", id="prompt over the context"),
    pytest.param("[" * 100_000, None, id="deep nesting"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
async def test_bad_input_is_refused_in_the_api_s_shape_and_the_daemon_goes_on(pair, body, param):
    status, reply = await post(pair.url, body)
    assert status == 400, reply
    assert reply["error"]["type"] == "invalid_request_error"
    assert reply["error"]["param"] == param
    assert "\n" not in reply["error"]["message"]
    assert (await get(pair.url, "/health"))[0] == 200


async def test_a_prompt_over_the_context_is_refused_with_the_words_clients_look_for(pair):
    _, reply = await post(pair.url, ask("word " * 3000))
    assert reply["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 1024 tokens" in reply["error"]["message"]


async def test_a_disconnect_cancels_at_once(pair):
    """Long before what was asked for is there."""
    body = ask("Tell me a long story about a fox.", max_tokens=600, temperature=1, stream=True, ignore_eos=True)
    _, before = await get(pair.url, "/health")
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{pair.url}/v1/chat/completions", json=body) as reply:
            await reply.content.readline()
        await session.close()

    async def idle():
        while (await get(pair.url, "/health"))[1]["lanes"]["busy"]:
            await asyncio.sleep(0.05)

    await asyncio.wait_for(idle(), 60)
    _, after = await get(pair.url, "/health")
    assert after["engine_seq"] - before["engine_seq"] < 300


async def test_an_answer_that_goes_round_in_circles_is_ended(model, pair):
    """A bias makes it say one word, or one digit, for ever: twelve words are enough, digits may be data."""

    async def ended(text, tokens, **fields):
        (token,) = model.tokenizer.encode_text(text)
        body = ask("Hello.", max_tokens=tokens, logit_bias={str(token): 100}, **fields)
        _, reply = await post(pair.url, body)
        choice = reply["choices"][0]
        told = reply["x_engine_stats"]["loop_break"]
        return choice["finish_reason"], reply["usage"]["completion_tokens"], told, choice["message"]["content"]

    assert await ended(" the", 60) == ("stop", 12, True, " the" * 12)
    assert "tokens came 12 times in a row" in pair.log(0)
    if model is not DEEPSEEK:
        return  # the rest asks nothing of a family
    assert await ended(" the", 40, loop_break=0) == ("length", 40, False, " the" * 40)
    assert await ended("0", 60) == ("length", 60, False, "0" * 60)
    assert await ended("0", 80, loop_break=2) == ("stop", 64, True, "0" * 64)


async def test_no_prompt_or_answer_text_in_logs_state_or_history(pair):
    reply = await post(pair.url, ask(f"Repeat after me: {SECRET}", max_tokens=12))
    said = answer(reply)
    for file in pair.state_dir.rglob("*"):
        if file.is_file() and not file.is_symlink():
            held = file.read_bytes()
            assert SECRET.encode() not in held, file
            if len(said) > 12:
                assert said.encode() not in held, file
    request_id = reply[1]["id"]  # what was searched holds this request
    until(lambda: any(line.count(request_id) and "answer" in line for line in pair.log(0).splitlines()))
    assert list((pair.state_dir / "history").glob("demand-*.sqlite"))


async def test_more_requests_than_lanes_wait_in_order_and_all_are_answered(deepseek):
    """Six requests on two lanes, each sent when the one before it is in: they begin in this order."""
    sent_s, tasks = [], []
    for n in range(6):
        sent_s.append(time.monotonic())
        body = ask(f"Tell me a long story about {n} ships.", temperature=1, max_tokens=(30, 44)[n % 2])
        tasks.append(asyncio.create_task(post(deepseek.url, body)))
        while not tasks[-1].done() and await open_requests(deepseek) < len(tasks) - sum(task.done() for task in tasks):
            await asyncio.sleep(0.01)
    replies = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert [status for status, _ in replies] == [200] * 6
    waited_s = [reply["x_engine_stats"]["queue_s"] for _, reply in replies]
    assert min(waited_s[2:]) > max(waited_s[:2])
    begun_s = [sent + waited for sent, waited in zip(sent_s, waited_s, strict=True)]
    assert begun_s[2:] == sorted(begun_s[2:])


async def open_requests(pair):
    _, health = await get(pair.url, "/health")
    return health["lanes"]["busy"] + health["queue"]


async def test_why_tells_what_a_request_wanted_and_missed_and_what_was_read_for_it_when(pair):
    for topic in ("2 + 3", ", and then about ".join(f"the sea and {n} ships" for n in range(2, 12))):
        _, reply = await post(pair.url, ask(f"Tell me all about {topic}.", max_tokens=48, fidelity="fast"))
    status, told = await get(pair.url, f"/v1/requests/{reply['id']}/residency")
    experts = reply["x_engine_stats"]["experts"]
    assert status == 200
    assert told["request_id"] == reply["id"]
    assert sum(pair_["picks"] for pair_ in told["pairs"]) <= experts["routed_picks"]
    assert told["missed_weight"] == pytest.approx(experts["miss_weight"], rel=1e-3)
    assert told["pairs_missed"] > 0
    missed = {(one["layer"], one["expert"]) for one in told["pairs"] if one["missed_weight"] > 0}
    came = [one for one in told["movements"] if one["what"] == "routable"]
    assert missed & {(one["layer"], one["expert"]) for one in came}, "what it missed was read while it ran"
    assert {one["why"] for one in came} <= {"chunk", "prompt", "decode", "urgent", "idle", "hot read"}
    assert all(told["first_step"] <= one["step"] <= told["last_step"] for one in told["movements"])
    assert SECRET not in str(told)


async def test_an_evaluation_moves_no_expert_and_exact_is_its_reference(deepseek, monkeypatch, tmp_path):
    monkeypatch.setenv("TIDE_STATE_DIR", str(deepseek.state_dir))
    before = (await get(deepseek.url, "/health"))[1]
    asked = ["eval", "--texts", "1", "--domain", "code", "--domain", "qa", "--longest", "128", "--json"]
    asked += ["--answers", "1", "--answer-tokens", "64", "--points", str(tmp_path / "points.jsonl")]
    ran = await asyncio.to_thread(CliRunner().invoke, app, asked)
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    exact, fast, balanced = found["rows"]
    assert [one["case"] for one in found["rows"]] == ["exact", "fast", "balanced"]
    assert exact["substituted_weight_share"] == 0
    assert fast["mean"]["kl"] >= balanced["mean"]["kl"] >= 0
    assert fast["mean"]["kl"] > exact["mean"]["kl"] == 0
    assert fast["share"] == pytest.approx(65)
    assert not any(row["moved"] for row in found["rows"])
    assert found["answers"]["rows"][0]["answers"] == 1
    after = (await get(deepseek.url, "/health"))[1]
    assert after["residents"] == before["residents"]


async def test_a_receipt_is_of_this_server_and_can_be_made_again(deepseek, monkeypatch, tmp_path):
    monkeypatch.setenv("TIDE_STATE_DIR", str(deepseek.state_dir))
    path = tmp_path / "receipt.json"
    asked = ["bench", "--tokens", "8", "--repeat", "1", "--case", "prose", "--fidelity", "exact"]
    asked += ["--receipt", str(path)]
    ran = await asyncio.to_thread(CliRunner().invoke, app, asked)
    assert ran.exit_code == 0, ran.output
    found = json.loads(path.read_text())
    before, after = found["server"]["before"], found["server"]["after"]
    now = (await get(deepseek.url, "/health"))[1]
    told = ("model", "profile", "build", "machine", "checkpoint", "engine_config", "engine_policy")
    assert all(before[name] == after[name] == now[name] for name in told)
    assert (before["build"]["code"], before["profile"]) == (code_digest(), deepseek.profile.stem)
    assert after["engine_seq"] > before["engine_seq"]
    [[[[one]]]] = [
        [[group["requests"] for group in groups] for groups in case["repetitions"]] for case in found["cases"]
    ]
    assert (one["tokens"], one["counted"], one["finish_reason"]) == (8, True, "length")
    assert (one["stats"]["fidelity"], one["stats"]["substituted_weight_share"]) == ("exact", 0)
    assert one["stats"].keys() >= {"nvme_gb", "experts", "prefix", "decode_tok_s"}
    again = ["bench", "verify", str(path), "--tolerance", "1000", "--json"]
    ran = await asyncio.to_thread(CliRunner().invoke, app, again)
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert (told["differs"], [row["same"] for row in told["verdicts"]]) == ([], [1])


async def test_an_audit_tells_which_tokens_every_expert_would_have_drawn(deepseek, monkeypatch):
    """Of a fast answer at 65 % there are some; of an exact one there is none, and it ends alike."""
    monkeypatch.setenv("TIDE_STATE_DIR", str(deepseek.state_dir))
    topic = "the old sea and nine ships that were lost there"
    exact = (await post(deepseek.url, ask(f"Tell me about {topic}.", fidelity="exact", temperature=0.7, seed=3)))[1]
    path = f"{deepseek.url}/v1/requests/{exact['id']}/audit"
    async with aiohttp.ClientSession() as session, session.post(path) as reply:
        found = await reply.json()
    assert (reply.status, found["differ"], found["differences"], found["residency_loss"]) == (200, 0, [], 0), found
    assert found["tokens"] > 0
    assert found["ends_alike"] in (None, True)
    asked = [ask(f"Tell me about {n} horses and the {what}.") for n, what in ((7, "moon"), (12, "bakery"), (3, "war"))]
    fast = [(await post(deepseek.url, one))[1] for one in asked]
    ran = await asyncio.to_thread(CliRunner().invoke, app, ["audit", "latest", "--json"])
    assert ran.exit_code == 0, ran.output
    told = [json.loads(ran.stdout)]
    for one in fast[:-1]:
        ran = await asyncio.to_thread(CliRunner().invoke, app, ["audit", one["id"], "--json"])
        told.append(json.loads(ran.stdout))
    assert [one["request_id"] for one in told] == [fast[-1]["id"], *(one["id"] for one in fast[:-1])]
    for seed in range(16):  # what residents lack depends on what was asked before, and how long ago
        if any(one["differ"] for one in told):
            break
        await post(deepseek.url, ask(f"Tell me about {seed} kings and their {topic}.", temperature=1.0, seed=seed))
        ran = await asyncio.to_thread(CliRunner().invoke, app, ["audit", "latest", "--json"])
        told.append(json.loads(ran.stdout))
    assert any(one["differ"] for one in told)
    assert all(one["differ"] == len(one["differences"]) and one["reads"] > 0 for one in told)
    shown = (await get(deepseek.url, "/v1/stats"))[1]["data"][0]
    assert shown["fidelity"] == "fast", "an audit is no answer of anybody's"
    assert f"audit of {exact['id']}: {found['tokens']} tokens at exact, 0 would be others" in deepseek.log(0)
    assert "nine ships" not in deepseek.log(0)


def test_a_full_queue_gets_429(tmp_path):
    async def flood(url):
        body = ask("Tell me a long story.", max_tokens=200, temperature=1)
        return await asyncio.gather(*(post(url, body | {"max_tokens": 40}) for _ in range(6)))

    with running(mini(lanes=1, queue=2), tmp_path, ranks=1) as single:
        replies = asyncio.run(flood(single.url))
    statuses = sorted(status for status, _ in replies)
    assert statuses == [200, 200, 200, 429, 429, 429]
    refused = next(body for status, body in replies if status == 429)
    assert refused["error"]["code"] == "queue_full"
