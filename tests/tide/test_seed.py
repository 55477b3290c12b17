"""A seed: one vote a domain, for this model only."""

import copy
import hashlib
import json

import numpy as np
import pytest

from tided.errors import DataError
from tided.tide.demand import RouterShape
from tided.tide.seed import load_seed

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
