"""Synthetic demand with the real model's statistics.

Topics are pick counts of DeepSeek-V4.1-Flash, layers 0 and 24 (`data/`, some 3,500 tokens a topic). A simulated layer
is one of the two with its experts renamed, sharpened or flattened until the popularity of its union of topics is that
of the real layer it stands for. Inside a topic every request has subjects of its own, which drift while it is written;
how much was chosen so that static sets, LRU and six tokens together do as they do on the real model (`calibration`).
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from tided.sim.trace import Span, Trace
from tided.tide.demand import Grid, RouterShape, per_layer

EXPERTS, TOP_K, MODEL_LAYERS = 384, 6, 40
Experts = npt.NDArray[np.int16]  # [tokens, layers, top_k]
Weights = npt.NDArray[np.float32]  # [tokens, layers, top_k]
Topics = npt.NDArray[np.float64]  # [topics, layers, experts], every layer sums to 1

SEED_TOKENS = 3500  # what a seed has seen of each topic
STRETCH_TOKENS = 32  # after so many tokens the subject has drifted
REQUEST_TILT, STRETCH_TILT, DRIFT = 0.9, 0.9, 0.5


@dataclass(frozen=True)
class Mix:
    """`stay` requests of one topic, then another; 1 is mixed traffic. `tokens`: prompt and answer of a request."""

    name: str
    requests: int
    stay: int
    prompt: tuple[int, int] = (60, 240)  # least, most
    answer: tuple[int, int] = (100, 300)


MIXED = Mix("mixed", 24, 1)
SWITCHING = Mix("switching", 24, 6)


def topics(layers: int, count: int, seed: int) -> Topics:
    """[count, layers, experts]: how likely a token of a topic picks an expert."""
    rng = np.random.default_rng(seed)
    first, later = _counts("ds41_layer0_topics.json"), _counts("ds41_layer24_topics.json")
    coverage = _union_coverage()
    result = np.empty((count, layers, EXPERTS))
    for layer in range(layers):
        stands_for = layer * MODEL_LAYERS // layers
        real = first if stands_for == 0 else later
        result[:, layer] = _layer(_more(real, count, rng), coverage[stands_for], rng)
    return result


def traffic(mix: Mix, layers: int = 8, topic_count: int = 6, seed: int = 0) -> Trace:
    """A trace of `mix`. The topics belong to the model and are the same for every seed."""
    known = topics(layers, topic_count, seed=2026)
    rng = np.random.default_rng([seed, mix.stay])
    spans = _spans(mix, topic_count, rng)
    parts = [_request(known[int(span.topic)], span.prompt + span.answer, rng) for span in spans]
    experts = np.concatenate([part[0] for part in parts])
    weights = np.concatenate([part[1] for part in parts])
    seen = np.stack([[rng.multinomial(SEED_TOKENS * TOP_K, layer) for layer in topic] for topic in known])
    base: Grid = per_layer(sum((per_layer(topic.astype(np.float64)) for topic in seen), np.zeros(seen.shape[1:])))
    return Trace(RouterShape(layers, EXPERTS, TOP_K), experts, weights, spans, base)


def _spans(mix: Mix, topic_count: int, rng: np.random.Generator) -> list[Span]:
    spans, at, topic = [], 0, int(rng.integers(topic_count))
    for number in range(mix.requests):
        if number and number % mix.stay == 0:
            topic = (topic + int(rng.integers(1, topic_count))) % topic_count
        prompt, answer = (int(rng.integers(least, most)) for least, most in (mix.prompt, mix.answer))
        spans.append(Span(at, prompt, answer, str(topic)))
        at += prompt + answer
    return spans


def _request(topic: Grid, tokens: int, rng: np.random.Generator) -> tuple[Experts, Weights]:
    """experts, weights [tokens, layers, top_k] of one request of a topic [layers, experts]."""
    likely = np.log(np.maximum(topic, 1e-7)) + REQUEST_TILT * rng.standard_normal(topic.shape)
    experts, weights = [], []
    for count, drift in _stretches(tokens, topic.shape, rng):
        noise = rng.gumbel(size=(count, *topic.shape)).astype(np.float32)
        picks, values = _top_k((likely + STRETCH_TILT * drift).astype(np.float32) + noise)
        experts.append(picks)
        weights.append(values)
    return np.concatenate(experts), np.concatenate(weights)


def _stretches(tokens: int, shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[tuple[int, Grid]]:
    drift = rng.standard_normal(shape)
    for at in range(0, tokens, STRETCH_TOKENS):
        yield min(STRETCH_TOKENS, tokens - at), drift
        drift = DRIFT * drift + np.sqrt(1 - DRIFT**2) * rng.standard_normal(shape)


def _top_k(logits: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float32]]:
    """The Gumbel trick: the top k of log-probability + noise are a draw without replacement. Weights fall from about
    0.3 to 0.1 along the k, as those of a softplus router do."""
    picks = np.argpartition(logits, -TOP_K, axis=-1)[..., -TOP_K:]
    values = np.take_along_axis(logits, picks, -1)
    above = 1.0 + 0.5 * (values - values.min(axis=-1, keepdims=True))
    return picks.astype(np.int16), (above / above.sum(axis=-1, keepdims=True)).astype(np.float32)


def _layer(popular: Grid, top_quarter: float, rng: np.random.Generator) -> Grid:
    """popular [topics, experts] with its experts renamed, raised to the power at which the union's most popular quarter
    takes `top_quarter` of the picks."""
    low, high = 0.2, 3.0
    for _ in range(30):
        power = (low + high) / 2
        union = np.sort(per_layer(popular**power).mean(axis=0))[::-1]
        low, high = (power, high) if union[: EXPERTS // 4].sum() < top_quarter else (low, power)
    renamed: Grid = per_layer(popular**high)[:, rng.permutation(EXPERTS)]
    return renamed[rng.permutation(len(renamed))]


def _more(real: Grid, count: int, rng: np.random.Generator) -> Grid:
    """As many topics as asked for: the real ones, then real ones with half of their experts exchanged."""
    rows = list(real[:count])
    while len(rows) < count:
        row = real[len(rows) % len(real)].copy()
        half = rng.permutation(EXPERTS)[: EXPERTS // 2]
        row[half] = row[rng.permutation(half)]
        rows.append(row)
    return np.stack(rows)


def _counts(name: str) -> Grid:
    """[topics, experts], every topic sums to 1; a pick that was never seen counts as a fifth of one."""
    content = json.loads((files("tided.sim") / "data" / name).read_text())
    counts = {key: np.array(value, dtype=np.float64) for key, value in content.items() if key.startswith("counts_")}
    everything = counts.pop("counts_all_topics", None)
    if everything is not None:  # what is not one of the named topics is a broad one of its own
        counts["others"] = np.maximum(everything - sum(counts.values()), 0.0)
    return per_layer(np.stack(list(counts.values())) + 0.2)


def _union_coverage() -> list[float]:
    """[40]: what the most popular quarter of each real layer takes of its picks."""
    text = (files("tided.sim") / "data" / "ds41_union_layers.csv").read_text()
    return [float(row["top25_cov"]) for row in csv.DictReader(text.splitlines())]
