"""The policy on pick counts of the real DeepSeek-V4.1-Flash: layers 0 and 24, topics of some 3,500 tokens each.

Every test pairs a topic of layer 0 with one of layer 24: what a text of that kind asks of a model of these two layers.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tided.settings import Tide
from tided.tide.demand import RouterShape, per_layer
from tided.tide.history import History
from tided.tide.pilot import Pilot
from tided.tide.seed import load_seed

SHAPE = RouterShape(2, 384, 6)
BUDGET = round(0.65 * 2 * 384)
DATA = Path(__file__).parent / "data"
PAIRS = {"web": ("html", "typescript"), "code": ("go", "reasoning_code"), "talk": ("chinese", "reasoning")}


def topics() -> dict[str, np.ndarray]:
    """topic -> how likely each expert is picked [2, 384]."""
    first, later = (json.loads((DATA / f"ds41_layer{layer}_topics.json").read_text()) for layer in (0, 24))
    counts = {name: [first[f"counts_{a}"], later[f"counts_{b}"]] for name, (a, b) in PAIRS.items()}
    return {name: per_layer(np.array(both, dtype=np.float64)) for name, both in counts.items()}


def seed_of(tmp_path, *names):
    content = {
        "model_type": "deepseek_v41", "layers": 2, "experts": 384, "top_k": 6,
        "domains": {
            name: {"tokens": 3500, "counts": (21_000 * topics()[name]).tolist(), "mass": topics()[name].tolist()}
            for name in names
        },
    }  # fmt: skip
    path = tmp_path / "seed.json"
    path.write_text(json.dumps(content))
    return load_seed(path, "deepseek_v41", SHAPE)


def pilot(tmp_path, *names, **settings) -> Pilot:
    tide = Tide(**settings)
    return Pilot(History.open(tmp_path, "cd" * 32, SHAPE, False), seed_of(tmp_path, *names), tide, SHAPE, BUDGET)


def coverage(pilot: Pilot, topic: str) -> float:
    """Share of the topic's picks that are resident."""
    return float(sum(topics()[topic][pair] for pair in pilot.residents)) / 2


def request(pilot: Pilot, topic: str, rng, tokens: int = 600) -> int:
    counts = np.stack([rng.multinomial(tokens * 6, likely) for likely in topics()[topic]]).astype(np.float64)
    missed = counts.sum() - sum(counts[pair] for pair in pilot.residents)
    first = pilot.prompt_done(counts, counts, [counts.sum(), missed, 1, 0], tokens, lane=0)
    pilot.applied(first)
    pilot.request_done(counts, counts, [0, 0, 0, 0], 0, lane=0)
    second = pilot.idle_plan()
    pilot.applied(second)
    return len(first) + len(second)


@pytest.mark.parametrize("topic", PAIRS)
def test_a_set_made_for_one_topic_serves_it_and_serves_others_worse(tmp_path, topic):
    tide = pilot(tmp_path, topic)
    assert coverage(tide, topic) > 0.96
    assert max(coverage(tide, other) for other in PAIRS if other != topic) < coverage(tide, topic) - 0.05


def test_one_vote_a_domain_lifts_the_worst_served_domain(tmp_path):
    worst = {name: min(coverage(pilot(tmp_path, name), topic) for topic in PAIRS) for name in PAIRS}
    assert min(coverage(pilot(tmp_path, *PAIRS), topic) for topic in PAIRS) > max(worst.values()) + 0.05


@pytest.mark.parametrize(("begin", "turn"), [("web", "talk"), ("talk", "code"), ("code", "web")])
def test_the_set_turns_with_the_traffic_and_then_rests(tmp_path, begin, turn):
    tide, rng = pilot(tmp_path, begin), np.random.default_rng(5)
    before = coverage(tide, turn)
    assert request(tide, turn, rng) > 0
    assert coverage(tide, turn) > before
    for _ in range(40):
        request(tide, turn, rng)
    assert coverage(tide, turn) > 0.95
    assert np.mean([request(tide, turn, rng) for _ in range(20)]) < 6
