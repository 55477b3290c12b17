"""Figures of measured decode steps, as data and in words."""

import statistics
from typing import Any

import torch
from decode_rank import Job
from decode_timed import PARTS, SAMPLING, TimedSampler, Times

HOST_LIMIT_MS = 1.0
LARGE_VOCABULARY = 129_280
LARGE_DRAWS = 20


def report(times: Times, job: Job) -> dict[str, Any]:
    def spread(values: list[float]) -> dict[str, float]:
        tenths = statistics.quantiles(values, n=10)
        return {"median_ms": statistics.median(values), "p10_ms": tenths[0], "p90_ms": tenths[-1]}

    lanes = job.settings.engine.lanes
    return {
        "ranks": job.settings.parallel.ranks,
        "lanes": lanes,
        "steps": len(times.step),
        "resident": times.resident,
        "resident_share": times.resident / times.total,
        "context_tokens": job.prompt_tokens,
        "collectives_a_step": times.calls,
        "tokens_a_second": 1000 * lanes / statistics.median(times.step),
        **{part: spread(getattr(times, part)) for part in ("step", *PARTS)},
        "sampler_at": {"vocabulary": LARGE_VOCABULARY, "median_ms": large_draw_ms()},
        **({"swaps": swaps_of(times)} if job.swaps else {}),
    }


def swaps_of(times: Times) -> dict[str, Any]:
    """Steps while experts are exchanged against the others of the same run, in milliseconds and as shares."""
    moving = [value for value, moves in zip(times.step, times.moving, strict=True) if moves]
    rest = [value for value, moves in zip(times.step, times.moving, strict=True) if not moves]
    median = statistics.median(times.step)
    return {
        "swapped": times.swapped,
        "steps": len(moving),
        "median_ms": statistics.median(moving),
        "worst_ms": max(moving),
        "worst_of_median": max(moving) / median,
        "worst_of_median_at_rest": max(rest) / median,
    }


def large_draw_ms() -> float:
    """Median milliseconds of one draw with the requests' sampling, from logits as spread as a model's."""
    logits = 4 * torch.randn(1, LARGE_VOCABULARY, generator=torch.Generator().manual_seed(1))
    seconds, timed = [], TimedSampler()
    for position in range(LARGE_DRAWS):
        timed(logits, [(SAMPLING, position)])
        seconds.append(timed.seconds)
    return 1000 * statistics.median(seconds)


def show(figures: dict[str, Any]) -> None:
    print(
        f"{figures['ranks']} ranks, {figures['lanes']} lanes, {figures['resident']} experts resident "
        f"({100 * figures['resident_share']:.1f} %), {figures['steps']} steps after {figures['context_tokens']} tokens"
    )
    for part in ("step", *PARTS):
        times = figures[part]
        share = 100 * times["median_ms"] / figures["step"]["median_ms"]
        print(
            f"  {part:12}{times['median_ms']:9.2f} ms {share:6.1f} %   ({times['p10_ms']:.2f} to {times['p90_ms']:.2f})"
        )
    if swaps := figures.get("swaps"):
        print(
            f"  {swaps['swapped']} swaps in {swaps['steps']} steps: median {swaps['median_ms']:.2f} ms, worst "
            f"{swaps['worst_ms']:.2f} ms, {swaps['worst_of_median']:.2f} x the median "
            f"(worst of the other steps: {swaps['worst_of_median_at_rest']:.2f} x)"
        )
    large = figures["sampler_at"]
    print(f"  a draw at a vocabulary of {large['vocabulary']:,}: {large['median_ms']:.2f} ms")
    verdict = "within" if figures["host"]["median_ms"] < HOST_LIMIT_MS else "OVER"
    print(f"  {figures['tokens_a_second']:.1f} tokens/s; {figures['collectives_a_step']} collectives a step; host time")
    print(f"  {verdict} its limit of {HOST_LIMIT_MS:g} ms")


def show_pairs(figures: dict[str, Any]) -> None:
    for without, with_ring in zip(figures["without_tok_s"], figures["with_tok_s"], strict=True):
        print(f"  without {without:8.2f} tok/s   with {with_ring:8.2f} tok/s   {with_ring / without:.3f}")
    print(f"  a ring of {figures['ring']} slots, {figures['hot_reads']} hot reads: {figures['with_over_without']:.3f}")
