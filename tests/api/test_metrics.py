"""GET /metrics."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import said

HISTOGRAM = re.compile("_seconds_|request_(prompt|generation)_tokens_")
FULL = {
    "lane": 0, "cached_tokens": 0, "queue_s": 0.02, "prefill_s": 0.3, "ttft_s": 0.4, "decode_s": 0.6, "steps": 6,
    "experts": {"routed_picks": 100, "miss_picks": 7}, "spec": {"drafted": 10, "accepted": 4}, "completion_tokens": 13,
    "spec_depth": {"0": 3, "2": 2, "5": 1}, "parked": 2, "grammar": {"active": True, "mask_ms": 2.0},
}  # fmt: skip
FIGURES = {
    "steps": 12, "swaps": 3, "reads_nbytes": 4096, "reads_seconds": 0.5, "reads_hot_issued": 5, "kv_tokens_used": 64,
    "kv_tokens_capacity": 256, "rank_wait_s": {1: 0.25, 2: 0.5}, "rank_waits": 2, "device_bytes": 0,
    "arena_bytes": 512, "available_bytes": {0: 1e9, 1: 2e9}, "reads_hot_bytes": 7, "reads_hot_used": 4,
    "reads_hot_late": 1, "reads_waited_reads": 3, "reads_wait_s": 0.5, "reads_failed": 2,
}  # fmt: skip


async def scraped(server, **options) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of their names...) -> value."""
    async with server.session.get("/metrics", **options) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await response.text()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_requests_and_tokens(server, engine):
    def play(answer):
        answer.start().say("thought</think>answer").finish(stats=FULL)

    engine.play = play
    await server.ask(said("hi"))
    await server.stream(said("hi"))
    await server.ask(said("hi", temperature=9))
    async with server.post({"max_tokens": 5, "messages": said("hi")["messages"]}, path="/v1/messages") as response:
        assert response.status == 200
    found = await scraped(server)
    requests = {
        labels: value
        for (name, *labels_), value in found.items()
        if name == "tidelm_requests_total"
        for labels in [tuple(labels_)]
    }
    assert requests == {
        ("stop", "/v1/chat/completions", "200"): 2,
        ("none", "/v1/chat/completions", "400"): 1,
        ("stop", "/v1/messages", "200"): 1,
    }
    prompts = sum(len(answer.request.prompt_ids) for answer in engine.answers)
    drawn = sum(answer.drawn + 1 for answer in engine.answers)
    assert found["tidelm_prompt_tokens_total",] == found["vllm:prompt_tokens_total", "0", "deepseek"] == prompts
    assert found["tidelm_generation_tokens_total",] == found["vllm:generation_tokens_total", "0", "deepseek"] == drawn
    assert found["tidelm_reasoning_tokens_total",] > 0
    assert (found["tidelm_expert_picks_total",], found["tidelm_expert_miss_total",]) == (300, 21)
    assert (found["tidelm_spec_drafted_total",], found["tidelm_spec_accepted_total",]) == (30, 12)
    assert found["tidelm_loop_breaks_total",] == 0
    assert found["vllm:spec_decode_num_drafts_total", "0", "deepseek"] == 9
    assert found["vllm:num_preemptions_total", "0", "deepseek"] == 6
    assert found["vllm:request_success_total", "0", "stop", "deepseek"] == 3
    assert found["tidelm_build_info", "deepseek", "", version("tidelm")] == 1


async def test_loops_are_counted(server, engine):
    engine.play = lambda answer: answer.start().say("</think>no no").finish(stats=FULL | {"loop_break": True})
    status, reply = await server.ask(said("hi"))
    assert (status, reply["choices"][0]["finish_reason"], reply["x_engine_stats"]["loop_break"]) == (200, "stop", True)
    assert (await scraped(server))["tidelm_loop_breaks_total",] == 1


async def test_histograms(server, engine):
    engine.play = lambda answer: answer.start().say("</think>a").finish(stats=FULL)
    await server.ask(said("hi"))
    found = await scraped(server)
    assert found["tidelm_queue_seconds_sum",] == pytest.approx(0.02)
    assert (found["tidelm_queue_seconds_bucket", "0.01"], found["tidelm_queue_seconds_bucket", "0.025"]) == (0, 1)
    assert found["tidelm_queue_seconds_bucket", "+Inf"] == found["tidelm_queue_seconds_count",] == 1
    # 12 tokens came after the first, in 6 steps: a step that drafts brings several.
    assert found["tidelm_inter_token_seconds_count",] == 12
    assert found["tidelm_inter_token_seconds_sum",] == pytest.approx(0.6)
    assert (found["tidelm_inter_token_seconds_bucket", "0.03"], found["tidelm_inter_token_seconds_bucket", "0.05"]) == (
        0,
        12,
    )
    assert found["vllm:inter_token_latency_seconds_count", "0", "deepseek"] == 12
    assert found["vllm:request_decode_time_seconds_sum", "0", "deepseek"] == pytest.approx(0.6)
    assert found["tidelm_grammar_mask_seconds_sum",] == pytest.approx(0.002)
    assert found["tidelm_time_to_first_token_seconds_sum",] == pytest.approx(0.4)
    assert found["tidelm_request_seconds_count",] == 1
    prompt = len(engine.request.prompt_ids)
    assert (
        found["tidelm_request_prompt_tokens_sum",] == prompt == found["vllm:request_prompt_tokens_sum", "0", "deepseek"]
    )
    assert (
        found["tidelm_request_prompt_tokens_bucket", "1.0"],
        found["tidelm_request_prompt_tokens_bucket", "100.0"],
    ) == (0, 1)
    assert found["tidelm_request_generation_tokens_count",] == 1


async def test_figures_of_the_engine(server, engine):
    bare = await scraped(server)
    assert not [name for name, *_ in bare if "kv_tokens" in name or "nvme" in name]  # nothing is loaded yet
    engine.counters, plain = FIGURES, engine.health
    engine.health = lambda: plain() | {"residents": 4, "experts": 8, "lanes": {"total": 2, "busy": 1}, "queue": 3}
    found = await scraped(server)
    assert (found["tidelm_requests_running",], found["tidelm_requests_waiting",]) == (1, 3)
    assert (
        found["vllm:num_requests_running", "0", "deepseek"],
        found["vllm:num_requests_waiting", "0", "deepseek"],
    ) == (1, 3)
    assert (found["tidelm_expert_resident",], found["tidelm_nvme_read_bytes_total",]) == (4, 4096)
    assert found["vllm:kv_cache_usage_perc", "0", "deepseek"] == 0.25
    assert (found["tidelm_rank_wait_seconds_total", "1"], found["tidelm_rank_wait_seconds_total", "2"]) == (0.25, 0.5)
    assert (found["tidelm_memory_available_bytes", "1"], found["tidelm_arena_bytes",]) == (2e9, 512)
    assert found["process_resident_memory_bytes",] > 1e6


async def test_every_name_is_documented_and_every_documented_name_is_told(server, engine):
    """`docs/metrics.md`, with the statistics that the engine itself makes of a request."""
    from tided.engine.stats import Reads as EngineReads
    from tided.engine.stats import RequestStats, Residency

    def play(answer):
        stats = RequestStats(answer.request, submitted_s=1.0)
        stats.admitted(0, 2.0, 1, EngineReads())
        stats.cached_tokens, stats.prefix_source = 3, "disk"
        for _ in range(5):
            stats.token(3.0)
        stats.stepped(3, 3)
        stats.stepped(0, 1)
        report = stats.report(Residency(1, 4, 8, "m"), 5.0, EngineReads())
        answer.start().say("</think>abcde").finish(stats=report | {"grammar": {"active": True, "mask_ms": 1.0}})

    engine.play, engine.counters, plain = play, FIGURES, engine.health
    engine.health = lambda: plain() | {"residents": 4, "experts": 8}
    await server.ask(said("hi"))
    found = await scraped(server)
    assert (found["tidelm_spec_drafted_total",], found["tidelm_spec_accepted_total",]) == (3, 2)
    assert found["tidelm_prefix_hits_total", "disk"] == 1
    assert found["tidelm_inter_token_seconds_count",] == 4
    told = {name for name, *_ in found if not name.startswith("process_")}
    told = {re.sub("_(bucket|count|sum|created)$", "", name) if HISTOGRAM.search(name) else name for name in told}
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `([a-z0-9:_]+)", page, re.MULTILINE))
    assert told == documented


async def test_labels_are_the_servers_own(server, engine):
    """Whatever paths and models clients send, the number of series stays."""
    engine.script("</think>x")
    await server.ask(said("hi"))
    async with server.session.get("/nothing") as response:
        assert response.status == 404
    before = set(await scraped(server))
    for number in range(5):
        await server.ask(said("hi", model=f"model-{number}"))
        async with server.session.get(f"/nothing/{number}") as response:
            assert response.status == 404
    assert {name for name in set(await scraped(server)) - before if "/metrics" not in name} == set()


async def test_the_key_of_a_scrape(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    closed = await serve(api_keys_file=str(keys))
    async with closed.session.get("/metrics") as response:
        assert response.status == 401
    assert await scraped(closed, headers={"Authorization": "Bearer k"})
    assert await scraped(await serve(api_keys_file=str(keys), metrics_open=True))


async def test_a_scrape_while_everything_is_busy(server, engine):
    engine.counters, plain = FIGURES, engine.health
    engine.health = lambda: plain() | {"busy": True, "lanes": {"total": 2, "busy": 2}, "queue": 64}
    assert await scraped(server)
    engine.state = "fault"
    assert await scraped(server)
