"""Exported histories: what comes back is what went out, and nothing else is taken for one."""

import json

import numpy as np
import pytest

from tided.errors import DataError
from tided.tide.demand import Demand, RouterShape, vote_of
from tided.tide.export import encoded, export_of, load_export, merged

SHAPE = RouterShape(2, 3, 1)
IDENTITY = "ab" * 32


def demand(seed: int, requests: int) -> Demand:
    rng, made = np.random.default_rng(seed), Demand.none(SHAPE)
    for _ in range(requests):
        made = made.folded(vote_of(rng.random((2, 3)), rng.random((2, 3)), SHAPE), 0.9)
    return made


def export(seed: int = 1, requests: int = 5, identity: str = IDENTITY):
    return export_of(demand(seed, requests), identity, "deepseek_v41", SHAPE)


def test_what_comes_back_is_bit_for_bit_what_went_out(tmp_path):
    path = tmp_path / "learned.json"
    path.write_bytes(encoded(export()))
    again, went = load_export(path).demand, demand(1, 5)
    assert again.requests == 5
    assert np.array_equal(again.counts, went.counts)
    assert np.array_equal(again.mass, went.mass)
    assert path.read_bytes().count(b"\n") == 3, "a line a layer"


def test_an_export_holds_sums_and_nothing_else():
    assert set(json.loads(encoded(export()))) == {
        "format", "version", "identity", "model_type", "unit", "layers", "experts", "top_k", "requests",
        "counts", "mass",
    }  # fmt: skip


def test_merged_exports_hold_the_votes_of_both():
    both = merged(export(1, 5), export(2, 7))
    assert both.requests == 12
    np.testing.assert_allclose(both.demand.mass, demand(1, 5).mass + demand(2, 7).mass)


def test_exports_of_two_models_do_not_mix():
    with pytest.raises(ValueError, match=r"deepseek_v41 abababababababab, 2 layers x 3.*cdcdcdcdcdcdcdcd"):
        merged(export(), export(identity="cd" * 32))


WRONG = {
    "another format": ({"format": "tidelm-seed"}, "format"),
    "a later version": ({"version": 2}, "version"),
    "counted in slots": ({"unit": "slot"}, "unit"),
    "no identity": ({"identity": "ab"}, "identity"),
    "another shape": ({"experts": 4}, "counts is [2, 3], must be [2, 4]"),
    "ragged": ({"mass": [[1, 2, 3], [1]]}, "no exported history"),
    "negative": ({"mass": [[1, 2, -3], [1, 1, 1]]}, "mass holds"),
    "text": ({"counts": [["a", 0, 0], [0, 0, 0]]}, "counts"),
    "an extra key": ({"prompts": ["hello"]}, "prompts"),
    "a negative number of requests": ({"requests": -1}, "requests"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_export_is_refused_with_the_reason(tmp_path, change, message):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(json.loads(encoded(export())) | change))
    with pytest.raises(DataError) as caught:
        load_export(path)
    assert message in str(caught.value)
    assert str(path) in caught.value.where


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000], ids=["empty", "torn", "noise", "deep"])
def test_a_damaged_export_is_refused(tmp_path, content):
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match="is no exported history"):
        load_export(path)


def test_a_missing_export_is_named(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        load_export(tmp_path / "none.json")
