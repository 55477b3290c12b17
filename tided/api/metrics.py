"""GET /metrics: Prometheus text, version 0.0.4.

Requests are counted on the loop when they end; figures of the engine are those that it published last. A scrape reaches
no other thread and takes no lock that one holds. The names of vLLM are offered beside ours, so that boards that know
them go on working.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tided.api.generation import Generation
from tided.api.ports import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_TOKENS = (1, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
_MASK_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)


class Histogram:
    """Counts by upper bound, of seconds or tokens; one thread uses it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: each counts all below its bound."""
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        total, found = 0, []
        for name, count in zip(names, self._counts, strict=True):
            total += count
            found.append((name, float(total)))
        return found


class Metrics(Collector):
    """Everything that ended since the start. Labels have few values: routes as the server knows them, no names that a
    client gives."""

    def __init__(self, engine: Engine, model: str, version: str, overlay: str = "") -> None:
        """`overlay`: the sha256 of the file under which the model is served; "" for none."""
        self._engine, self._build = engine, {"version": version, "model": model, "overlay": overlay}
        self.requests: Counter[tuple[str, str, str]] = Counter()  # by route, status, finish reason
        self.counts: Counter[str] = Counter()
        self.prefix_hits: Counter[str] = Counter()
        self.sizes = {"request_prompt_tokens": Histogram(_TOKENS), "request_generation_tokens": Histogram(_TOKENS)}
        self.histograms = {
            "queue": Histogram(_SECONDS),
            "prefill": Histogram(_SECONDS),
            "time_to_first_token": Histogram(_SECONDS),
            "inter_token": Histogram(_TOKEN_SECONDS),
            "decode": Histogram(_SECONDS),
            "grammar_mask": Histogram(_MASK_SECONDS),
            "request": Histogram(_SECONDS),
        }
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def ended(self, route: str, status: int, seconds: float, generations: Sequence[Generation]) -> None:
        for generation in generations:
            self._answered(generation)
        reason = generations[0].ending.replace(" ", "_") if generations else "none"
        self.requests[route, str(status), reason] += 1
        if generations:
            self.histograms["request"].observe(seconds)

    def _answered(self, generation: Generation) -> None:
        usage, stats = generation.usage(), generation.stats
        self.counts["prompt_tokens"] += usage["prompt_tokens"]
        self.sizes["request_prompt_tokens"].observe(usage["prompt_tokens"])
        self.sizes["request_generation_tokens"].observe(usage["completion_tokens"])
        self.counts["cached_prompt_tokens"] += usage["prompt_cache_hit_tokens"]
        self.counts["generation_tokens"] += usage["completion_tokens"]
        self.counts["reasoning_tokens"] += usage["completion_tokens_details"]["reasoning_tokens"]
        self.prefix_hits[(stats.get("prefix") or {}).get("source", "none")] += 1
        for name, key in [("queue", "queue_s"), ("prefill", "prefill_s"), ("time_to_first_token", "ttft_s")]:
            if (value := stats.get(key)) is not None:
                self.histograms[name].observe(value)
        # Between tokens, not between steps: a drafted step brings several. The first token ends the prompt's time.
        later, decode_s = (stats.get("completion_tokens") or 0) - 1, stats.get("decode_s")
        if later > 0 and decode_s is not None:
            self.histograms["inter_token"].observe(decode_s / later, later)
            self.histograms["decode"].observe(decode_s)
        if (mask_ms := (stats.get("grammar") or {}).get("mask_ms")) is not None:
            self.histograms["grammar_mask"].observe(mask_ms / 1000)
        self.counts["contexts_parked"] += stats.get("parked") or 0
        self.counts["spec_steps"] += sum(n for depth, n in (stats.get("spec_depth") or {}).items() if depth != "0")
        self.counts["loop_breaks"] += bool(stats.get("loop_break"))
        self._counted(stats, "experts", {"routed_picks": "expert_picks", "miss_picks": "expert_miss"})
        self._counted(stats, "spec", {"drafted": "spec_drafted", "accepted": "spec_accepted"})

    def _counted(self, stats: Mapping[str, Any], part: str, names: Mapping[str, str]) -> None:
        values = stats.get(part) or {}
        for key, name in names.items():
            self.counts[name] += int(values.get(key) or 0)

    def collect(self) -> Iterator[Metric]:
        yield from self._ours()
        yield from self._engines()
        yield from self._vllms()

    def _ours(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "tidelm_requests", "Requests that ended.", labels=["route", "status", "finish_reason"]
        )
        for labels, count in sorted(self.requests.items()):
            requests.add_metric(labels, count)
        yield requests
        for name in _COUNTS:
            yield CounterMetricFamily(f"tidelm_{name}", _COUNTS[name], value=self.counts[name])
        hits = CounterMetricFamily("tidelm_prefix_hits", "Answers by where their prefix was found.", labels=["source"])
        for source, count in sorted(self.prefix_hits.items()):
            hits.add_metric([source], count)
        yield hits
        for name, histogram in self.histograms.items():
            yield _histogram(f"tidelm_{name}_seconds", _HISTOGRAMS[name], histogram, {})
        for name, histogram in self.sizes.items():
            yield _histogram(f"tidelm_{name}", _SIZES[name], histogram, {})
        info = GaugeMetricFamily("tidelm_build_info", "Always 1.", labels=list(self._build))
        info.add_metric(list(self._build.values()), 1)
        yield info

    def _engines(self) -> Iterator[Metric]:
        health, figures = self._engine.health(), self._engine.figures()
        lanes = health["lanes"]
        yield GaugeMetricFamily("tidelm_requests_running", "Requests that have a lane.", value=lanes["busy"])
        yield GaugeMetricFamily("tidelm_requests_waiting", "Requests that wait for a lane.", value=health["queue"])
        if "residents" in health:
            yield GaugeMetricFamily("tidelm_expert_resident", "Routed experts resident.", value=health["residents"])
            yield GaugeMetricFamily("tidelm_expert_count", "Routed experts of the model.", value=health["experts"])
        for key, (kind, name, text) in _FIGURES.items():
            if key in figures:
                yield kind(name, text, value=figures[key])
        for key, (kind, name, text) in _BY_RANK.items():
            family = kind(name, text, labels=["rank"])
            for rank, value in sorted(figures.get(key, {}).items()):
                family.add_metric([str(rank)], value)
            yield family

    def _vllms(self) -> Iterator[Metric]:
        """The same under the names that vLLM gives."""
        health, figures, labels = self._engine.health(), self._engine.figures(), ["model_name", "engine"]
        values = [self._build["model"], "0"]

        def gauge(name: str, value: float) -> Metric:
            family = GaugeMetricFamily(f"vllm:{name}", "As in vLLM.", labels=labels)
            family.add_metric(values, value)
            return family

        def counter(name: str, value: float) -> Metric:
            family = CounterMetricFamily(f"vllm:{name}", "As in vLLM.", labels=labels)
            family.add_metric(values, value)
            return family

        yield gauge("num_requests_running", health["lanes"]["busy"])
        yield gauge("num_requests_waiting", health["queue"])
        if figures.get("kv_tokens_capacity"):
            yield gauge("kv_cache_usage_perc", figures["kv_tokens_used"] / figures["kv_tokens_capacity"])
        for name in ("prompt_tokens", "generation_tokens"):
            yield counter(name, self.counts[name])
        yield counter("prefix_cache_queries", self.counts["prompt_tokens"])
        yield counter("prefix_cache_hits", self.counts["cached_prompt_tokens"])
        yield counter("num_preemptions", self.counts["contexts_parked"])
        yield counter("spec_decode_num_drafts", self.counts["spec_steps"])
        yield counter("spec_decode_num_draft_tokens", self.counts["spec_drafted"])
        yield counter("spec_decode_num_accepted_tokens", self.counts["spec_accepted"])
        success = CounterMetricFamily("vllm:request_success", "As in vLLM.", labels=[*labels, "finished_reason"])
        for reason, vllms in (("stop", "stop"), ("length", "length"), ("tool_calls", "tool_calls")):
            count = sum(n for (_, _, ended), n in self.requests.items() if ended == reason)
            success.add_metric([*values, vllms], count)
        yield success
        named = dict(zip(labels, values, strict=True))
        for name, ours in _VLLM_HISTOGRAMS.items():
            yield _histogram(f"vllm:{name}", "As in vLLM.", self.histograms[ours], named)
        for name, histogram in self.sizes.items():
            yield _histogram(f"vllm:{name}", "As in vLLM.", histogram, named)


_COUNTS = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_prompt_tokens": "Of them, those that the prompt cache held.",
    "generation_tokens": "Tokens of answers.",
    "reasoning_tokens": "Of them, those of reasoning.",
    "loop_breaks": "Answers that were ended because they went round in circles.",
    "spec_drafted": "Drafted tokens that steps verified.",
    "spec_accepted": "Of them, those accepted.",
    "spec_steps": "Steps that verified any.",
    "contexts_parked": "Contexts that left the pool for the disk.",
    "expert_picks": "Router picks, before residency.",
    "expert_miss": "Of them, those whose expert was not resident.",
}
_HISTOGRAMS = {
    "queue": "From a request to its lane.",
    "prefill": "Steps of a prompt.",
    "time_to_first_token": "From a request to the first token of its answer.",
    "inter_token": "Between an answer's tokens: its mean, once for each of them.",
    "decode": "From the first token of an answer to its last.",
    "grammar_mask": "Masks of an answer's grammar, all together.",
    "request": "From a request to the end of its reply.",
}
_SIZES = {
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens of an answer.",
}
_FIGURES: dict[str, tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str, str]] = {
    "steps": (CounterMetricFamily, "tidelm_steps", "Steps that rank 0 finished."),
    "swaps": (CounterMetricFamily, "tidelm_expert_swaps", "Experts that became resident while serving."),
    "reads_nbytes": (CounterMetricFamily, "tidelm_nvme_read_bytes", "Bytes of experts read by rank 0."),
    "reads_seconds": (CounterMetricFamily, "tidelm_nvme_read_seconds", "Time in reads of experts, of all together."),
    "reads_failed": (CounterMetricFamily, "tidelm_expert_reads_failed", "Reads of experts that failed on rank 0."),
    "reads_hot_issued": (CounterMetricFamily, "tidelm_expert_hot_reads", "Hot reads asked for."),
    "reads_hot_bytes": (CounterMetricFamily, "tidelm_expert_hot_read_bytes", "Bytes of hot reads."),
    "reads_hot_used": (CounterMetricFamily, "tidelm_expert_hot_used", "Hot reads that a later step wanted."),
    "reads_hot_late": (CounterMetricFamily, "tidelm_expert_hot_late", "Hot reads that came late."),
    "reads_waited_reads": (CounterMetricFamily, "tidelm_expert_waited_reads", "Reads that a layer waited for."),
    "reads_wait_s": (CounterMetricFamily, "tidelm_expert_wait_seconds", "Time that layers waited for reads."),
    "kv_tokens_used": (GaugeMetricFamily, "tidelm_kv_tokens_used", "Tokens of the context pool that requests hold."),
    "kv_tokens_capacity": (GaugeMetricFamily, "tidelm_kv_tokens_capacity", "Tokens of the context pool."),
    "rank_waits": (CounterMetricFamily, "tidelm_rank_waits", "Times that rank 0 waited for the others."),
    "device_bytes": (GaugeMetricFamily, "tidelm_device_memory_bytes", "Memory of the accelerator that is in use."),
    "arena_bytes": (GaugeMetricFamily, "tidelm_arena_bytes", "The arena of experts, on each rank."),
}
_BY_RANK: dict[str, tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str, str]] = {
    "rank_wait_s": (CounterMetricFamily, "tidelm_rank_wait_seconds", "Time that rank 0 waited for a rank's digests."),
    "available_bytes": (GaugeMetricFamily, "tidelm_memory_available_bytes", "Memory that a rank's node could give."),
}
_VLLM_HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token",
    "inter_token_latency_seconds": "inter_token",
    "time_per_output_token_seconds": "inter_token",
    "e2e_request_latency_seconds": "request",
    "request_queue_time_seconds": "queue",
    "request_prefill_time_seconds": "prefill",
    "request_decode_time_seconds": "decode",
}


def _histogram(name: str, text: str, histogram: Histogram, labels: Mapping[str, str]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), buckets=histogram.buckets(), sum_value=histogram.sum)
    return family


METRICS: web.AppKey[Metrics] = web.AppKey("metrics", Metrics)


async def metrics(request: web.Request) -> web.Response:
    text = generate_latest(request.app[METRICS].registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})
