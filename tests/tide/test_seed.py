"""A seed: one vote a domain, for this model only."""

import copy
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tided.errors import DataError
from tided.profile import load
from tided.tide.demand import RouterShape
from tided.tide.seed import layered_set, load_seed

PROFILES = Path(__file__).parents[2] / "profiles"

SHAPE = RouterShape(2, 3, 1)
RIGHT = {
    "model_type": "deepseek_v41",
    "layers": 2,
    "experts": 3,
    "top_k": 1,
    "domains": {
        "code": {"tokens": 1000, "counts": [[1000, 0, 0], [0, 500, 500]], "mass": [[800.0, 0, 0], [0, 300.0, 100.0]]},
        "prose": {"tokens": 10, "counts": [[0, 0, 10], [0, 10, 0]], "mass": [[0, 0, 5.0], [0, 7.0, 0]]},
    },
}


def write(path, content) -> object:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_each_domain_has_one_vote_however_long_its_text_was(tmp_path):
    path = write(tmp_path / "seed.json", RIGHT)
    seed = load_seed(path, "deepseek_v41", SHAPE)
    np.testing.assert_allclose(seed.prior, [[0.5, 0, 0.5], [0, 0.875, 0.125]])
    assert seed.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert seed.domains == ("code", "prose")


def test_the_log_says_which_seed_it_was(tmp_path, caplog):
    caplog.set_level("INFO")
    seed = load_seed(write(tmp_path / "seed.json", RIGHT), "deepseek_v41", SHAPE)
    assert f"demand seed seed.json (sha256 {seed.sha256[:16]}): code, prose" in caplog.messages


def wrong(**changes) -> dict:
    return {**RIGHT, **changes}


def with_domain(**changes) -> dict:
    seed = copy.deepcopy(RIGHT)
    seed["domains"]["code"].update(changes)
    return seed


WRONG = {
    "another model": (wrong(model_type="glm53"), "a seed for glm53"),
    "another shape": (wrong(experts=384), "384 experts"),
    "another top-k": (wrong(top_k=6), "6 a token"),
    "no domain": (wrong(domains={}), "is not a demand seed"),
    "unknown key": (wrong(residents=[1]), "residents"),
    "missing key": ({k: v for k, v in RIGHT.items() if k != "top_k"}, "top_k"),
    "no JSON": ("{", "is not a demand seed"),
    "no tokens": (with_domain(tokens=0), "tokens"),
    "ragged": (with_domain(counts=[[1, 2, 3], [1, 2]]), "domain 'code'"),
    "a layer missing": (with_domain(mass=[[1, 2, 3]]), "domain 'code': mass is [1, 3]"),
    "negative": (with_domain(mass=[[1, 2, -3], [1, 1, 1]]), "domain 'code': mass holds"),
    "NaN": (json.dumps(with_domain(tokens=5)).replace("800.0", "NaN"), "is not a demand seed"),
    "an empty layer": (with_domain(mass=[[1, 0, 0], [0, 0, 0]]), "a layer of it holds no demand"),
    "text": (with_domain(counts=[["a", "b", "c"], [1, 1, 1]]), "is not a demand seed"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_seed_is_refused_with_the_reason(tmp_path, content, message):
    path = write(tmp_path / "seed.json", content)
    with pytest.raises(DataError) as caught:
        load_seed(path, "deepseek_v41", SHAPE)
    assert message in str(caught.value)
    assert "seed.json" in caught.value.where


def test_a_seed_that_is_not_there_names_the_setting(tmp_path):
    with pytest.raises(DataError, match=r"(?s)cannot be read.*`seed` of the \[tide\]"):
        load_seed(tmp_path / "none.json", "deepseek_v41", SHAPE)


LAYERS_ONLY = {**{k: v for k, v in RIGHT.items() if k != "domains"}, "source": "a server", "layer_residents": [3, 1]}


def test_a_seed_may_know_the_layers_and_not_the_experts(tmp_path):
    seed = load_seed(write(tmp_path / "seed.json", LAYERS_ONLY), "deepseek_v41", SHAPE)
    assert seed.layer_residents == (3, 1)
    assert seed.domains == ()
    np.testing.assert_allclose(seed.prior, np.full((2, 3), 1 / 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_residents": [3]}, "must be 2 numbers up to 3"),
        ({"layer_residents": [3, 4]}, "must be 2 numbers up to 3"),
        ({"layer_residents": [3, 0]}, "is not a demand seed"),
        ({"layer_residents": []}, "either domains or layer_residents"),
        ({"domains": RIGHT["domains"]}, "either domains or layer_residents"),
    ],
)
def test_wrong_layers_are_refused(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        load_seed(write(tmp_path / "seed.json", {**LAYERS_ONLY, **change}), "deepseek_v41", SHAPE)


def by_layer(pairs, layers: int) -> list[int]:
    return [sum(layer == at for at, _ in pairs) for layer in range(layers)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 48), min_size=1, max_size=12), st.data())
def test_a_budget_is_shared_out_whole_and_within_limits(residents, data):
    layers = len(residents)
    floor = data.draw(st.integers(1, 48))
    budget = data.draw(st.integers(layers * floor, layers * 48))
    counts = by_layer(layered_set(tuple(residents), 48, budget, floor), layers)
    assert sum(counts) == budget
    assert all(floor <= count <= 48 for count in counts)
    for one, count in zip(residents, counts, strict=True):
        for other, rival in zip(residents, counts, strict=True):
            if one > other:
                assert count >= rival


def test_at_the_budget_it_was_learned_with_the_layers_are_what_they_were():
    seed = load_seed(PROFILES / "seeds" / "ds41-mxfp4.json", "deepseek_v41", RouterShape(40, 384, 6))
    assert sum(seed.layer_residents) == 9400
    assert tuple(by_layer(layered_set(seed.layer_residents, 384, 9400, 6), 40)) == seed.layer_residents
    larger = by_layer(layered_set(seed.layer_residents, 384, 10_000, 6), 40)
    assert (min(larger), max(larger)) == (190, 303)


def test_every_bundled_profile_has_a_seed_of_its_model():
    """Of the minis it must be whole. Of DeepSeek-V4.1-Flash no public data tells more than the layers, of GLM-5.3 none
    tells even that: its profile alone has no seed, and says so."""
    seeds = {path.stem: load(path).tide.seed for path in PROFILES.glob("*.toml")}
    assert load_seed(Path(seeds.pop("mini-deepseek")), "deepseek_v41", RouterShape(10, 48, 4)).domains
    assert load_seed(Path(seeds.pop("mini-glm")), "glm_moe_dsa", RouterShape(8, 32, 4)).domains
    assert load_seed(Path(seeds.pop("ds41-mxfp4")), "deepseek_v41", RouterShape(40, 384, 6)).layer_residents
    assert seeds == {"glm53-exl3": ""}
    assert "There is none for this model yet" in (PROFILES / "glm53-exl3.toml").read_text()
