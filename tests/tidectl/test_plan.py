"""`tidectl plan`: the sum of memory by class, the gates, the largest budget, and what a budget covers."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from tests.tidectl.canned import Tidectl
from tests.tidectl.test_tide import MINI, learn, model  # noqa: F401  (fixture)
from tidectl import plan as planning
from tidectl import profiles
from tidectl.tide.model import Model
from tided.engine.build import OpenedModel
from tided.profile import load
from tided.tide.coverage import best_set, covered, curve
from tided.tide.kinds import kinds_of

NODES = planning.Given(130.7)  # GB: the 121.7 GiB that a node of 128 GB shows


def planned(tidectl: Tidectl, *arguments: str, code: int = 0) -> dict:
    result = tidectl("plan", *arguments, "--json")
    assert result.exit_code == code, result.output
    known = json.loads(result.stdout)
    assert known["schema"] == "tidectl.plan/1"
    return known


def of(known: dict, rank: int) -> dict[str, int]:
    return {one["what"]: one["bytes"] for one in known["ranks"][rank]["classes"]}


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenedModel]:
    """The large bundled profile, by the released shapes alone."""
    profile = profiles.find("ds41-mxfp4")
    with planning._opened(load(profile), profile, None) as (opened, like):
        assert like == "ds41"
        yield opened


def on_nodes(opened: OpenedModel, given: planning.Given = NODES, **changes: float) -> dict:
    """The plan of a changed profile, on two nodes of 128 GB."""
    settings = planning.changed(opened.settings, planning.Changes(**changes))
    return planning.facts(replace(opened, settings=settings), given, profiles.find("ds41-mxfp4"), "ds41")


@pytest.fixture
def published(released: OpenedModel, state: Path) -> dict:
    return on_nodes(released)


def test_the_released_model_needs_its_published_bytes(published: dict) -> None:
    """10,000 residents are 94.0 GB, half a drafter's experts 3.61 GB, the tower 0.97 GB on one node; 1 GB holds 106
    experts; of 100,000 tokens of context 0.32 GB, as this build keeps rows."""
    head, peer = of(published, 0), of(published, 1)
    assert published["model"]["like"] == "ds41"
    assert published["expert_bytes"] == 9_400_320
    assert head["residents"] == peer["residents"] == 10_000 * 9_400_320
    assert head["slots beside them"] == (64 + 32 + 16 + 1) * 9_400_320
    assert 3_609_722_880 <= head["drafter"] < 1.2 * 3_609_722_880
    assert head["context"] == 1_572_864 * 3_200
    assert 5.0e9 < head["dense weights"] < 8.5e9
    assert "vision tower" not in head
    assert 0.95e9 < peer["vision tower"] < 0.99e9
    assert published["a_gb"] == {"experts": 106.4, "context_tokens": 312_500}
    assert published["fits"]
    assert 10_000 <= published["largest_resident"] < 11_500


def test_the_largest_budget_fits_and_one_more_does_not(released: OpenedModel, published: dict) -> None:
    largest = published["largest_resident"]
    assert on_nodes(released, resident=largest)["fits"]
    beyond = on_nodes(released, resident=largest + 1)
    assert not beyond["fits"]
    missing = max(gate["missing_bytes"] for rank in beyond["ranks"] for gate in rank["gates"])
    assert 0 < missing <= 9_400_320
    assert beyond["largest_resident"] == largest


def test_context_and_reserve_take_experts_places(released: OpenedModel, published: dict) -> None:
    more = on_nodes(released, context_tokens=3_145_728, reserve_gb=11)
    extra = 3_145_728 * 3_200 - of(published, 0)["context"] + 5_000_000_000
    lost = published["largest_resident"] - more["largest_resident"]
    assert abs(lost * 9_400_320 - extra) < 9_400_320
    assert of(more, 0)["context"] == 3_145_728 * 3_200
    assert more["reserve_bytes"] == 11_000_000_000


def test_a_device_with_memory_of_its_own_holds_the_experts(released: OpenedModel) -> None:
    known = on_nodes(released, planning.Given(64, 141))
    assert known["free"] == {"bytes": 64 * 10**9, "device_bytes": 141 * 10**9, "apart": True, "of": "--memory"}
    gates = {gate["gate"]: gate for gate in known["ranks"][0]["gates"]}
    classes = known["ranks"][0]["classes"]
    on_device = sum(one["bytes"] for one in classes if not one["system_memory"])
    assert gates["load, device"]["asked_bytes"] == on_device
    assert gates["serve, device"]["asked_bytes"] == on_device + known["passing_bytes"]
    assert known["largest_resident"] > 10_000
    refused = on_nodes(released, planning.Given(64, 100))
    assert not refused["fits"]
    assert refused["largest_resident"] < 10_000


def test_a_small_model_on_this_machine_and_what_its_history_covers(tidectl: Tidectl, model: Model) -> None:  # noqa: F811
    seeded = planned(tidectl, "mini-deepseek")["coverage"]
    assert seeded["of"] == "the seed"
    learn(model, expert=47)
    known = planned(tidectl, "mini-deepseek")
    assert known["coverage"]["of"] == "a history of 6 requests"
    points = known["coverage"]["points"]
    assert points[-1] == {"resident": 480, "covered": 1.0, "bytes": known["expert_bytes"] * 480}
    shares = [point["covered"] for point in points]
    assert shares == sorted(shares)
    assert [point["covered"] for point in seeded["points"]] != shares
    assert {312, known["largest_resident"]} <= {point["resident"] for point in points}


def test_the_table_is_for_people(tidectl: Tidectl) -> None:
    result = tidectl("plan", str(MINI))
    assert result.exit_code == 0
    for said in ("residents", "dense weights", "all that stays", "the largest that fits: 480", "the profile's", "█"):
        assert said in result.stdout
    small = tidectl("plan", str(MINI), "--memory", "0.2")
    assert small.exit_code == 1
    assert "too little" in small.stdout
    assert "no budget fits: the least is 40 experts" in small.stdout


def test_what_cannot_be_planned_says_what_is_missing(tidectl: Tidectl, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(MINI.read_text().replace("../minis/deepseek", str(tmp_path / "nowhere")))
    result = tidectl("plan", str(other))
    assert result.exit_code == 65
    assert "nowhere" in result.stderr
    assert "--device is of a profile that runs on CUDA" in tidectl("plan", str(MINI), "--device", "3").stderr


def test_a_profile_is_changed_where_it_is_asked(tidectl: Tidectl) -> None:
    from tidectl.plan import Changes, changed

    settings = load(MINI)
    assert changed(settings, Changes()) == settings
    asked = changed(settings, Changes(40, 1024, 0.5))
    assert (asked.experts.resident, asked.cache.pool_tokens, asked.cache.context_tokens) == (40, 1024, 1024)
    assert asked.memory.reserve_bytes == 500_000_000


@trials(deadline=None)  # the first call imports
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_no_set_of_a_budget_covers_more_than_its_best(seed: int, floor: int) -> None:
    draw = np.random.default_rng(seed)
    scores = draw.random((3, 8)) ** 4
    scores /= scores.sum(axis=1, keepdims=True)
    budgets = list(range(3 * floor, 25))
    points = curve(scores, floor, budgets)
    assert [point.resident for point in points] == budgets
    assert all(a.covered <= b.covered + 1e-12 for a, b in pairwise(points))
    assert points[-1].covered == pytest.approx(1.0)
    some = best_set(scores, budgets[0], floor) + [
        pair for pair in best_set(1 - scores, 24, floor) if pair not in best_set(scores, budgets[0], floor)
    ]
    for point in points:
        assert covered(scores, some[: point.resident]) <= point.covered + 1e-12


def test_where_sizes_differ_a_budget_is_bytes() -> None:
    scores = np.full((2, 8), 1 / 8)
    sizes = np.array([[4096] * 4 + [12288] * 4] * 2, dtype=np.int64)
    kinds = kinds_of(sizes, 2, 0)
    points = curve(scores, 2, [1, 8, 16], kinds)
    assert [point.resident for point in points] == [8, 16]  # the floors alone do not fit the first
    assert points[0].covered > 0.5  # the small ones first: a byte serves more there
    assert points[1].covered == pytest.approx(1.0)
