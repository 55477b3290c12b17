"""GET /metrics."""

from importlib.metadata import version

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import said

FULL = {
    "lane": 0, "cached_tokens": 0, "queue_s": 0.02, "prefill_s": 0.3, "ttft_s": 0.4, "decode_s": 0.6, "steps": 6,
    "experts": {"routed_picks": 100, "miss_picks": 7}, "spec": {"drafted": 10, "accepted": 4},
}  # fmt: skip
FIGURES = {
    "steps": 12, "swaps": 3, "reads_nbytes": 4096, "reads_seconds": 0.5, "reads_hot_issued": 5, "kv_tokens_used": 64,
    "kv_tokens_capacity": 256, "rank_wait_s": 0.25, "rank_waits": 2, "device_bytes": 0,
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
    assert found["vllm:request_success_total", "0", "stop", "deepseek"] == 3
    assert found["tidelm_build_info", "deepseek", version("tidelm")] == 1


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
    assert found["tidelm_inter_token_seconds_count",] == 6
    assert found["tidelm_inter_token_seconds_sum",] == pytest.approx(0.6)
    assert found["vllm:inter_token_latency_seconds_count", "0", "deepseek"] == 6
    assert found["tidelm_time_to_first_token_seconds_sum",] == pytest.approx(0.4)
    assert found["tidelm_request_seconds_count",] == 1


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
    assert found["tidelm_rank_wait_seconds_total",] == 0.25
    assert found["process_resident_memory_bytes",] > 1e6


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
