"""Simulated demand: like the real model's, the same for a seed, and kept in files that are checked."""

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tided.errors import DataError
from tided.sim.calibration import likeness, lru_hits
from tided.sim.trace import Span, load, save, shuffled
from tided.sim.traffic import MIXED, SWITCHING, Mix, topics, traffic

SMALL = Mix("small", 3, 1, prompt=(20, 30), answer=(20, 30))


@pytest.fixture(scope="module")
def trace():
    return traffic(SMALL, 2, 3, seed=1)


def test_a_trace_repeats_by_seed_and_differs_without(trace):
    again, other = traffic(SMALL, 2, 3, seed=1), traffic(SMALL, 2, 3, seed=2)
    assert np.array_equal(trace.experts, again.experts)
    assert np.array_equal(trace.weights, again.weights)
    assert trace.requests == again.requests
    assert trace.experts.shape != other.experts.shape or not np.array_equal(trace.experts, other.experts)


def test_every_token_picks_different_experts_with_weights_that_sum_to_1(trace):
    picks = np.sort(trace.experts, axis=2)
    assert (np.diff(picks, axis=2) > 0).all()
    assert picks.min() >= 0
    assert picks.max() < 384
    assert trace.weights.sum(axis=2) == pytest.approx(1.0, abs=1e-5)
    assert trace.base.sum(axis=1) == pytest.approx(1.0)


def test_the_topics_have_the_popularity_of_the_real_layers():
    union = np.sort(topics(8, 6, seed=7).mean(axis=0), axis=1)[:, ::-1][:, :96].sum(axis=1)
    real = [0.537, 0.654, 0.682, 0.597, 0.677, 0.724, 0.682, 0.620]  # layers 0, 5, 10, ... of the model
    assert union == pytest.approx(real, abs=0.01)


def test_static_sets_and_lru_do_on_it_as_on_the_real_model():
    for one in likeness(traffic(Mix("likeness", 30, 2), 4, 8, seed=1)):
        assert one.static == pytest.approx(one.real_static, abs=0.06)
        assert one.lru == pytest.approx(one.real_lru, abs=0.03)
        assert one.lru_block == pytest.approx(one.real_lru_block, abs=0.03)


def test_mixed_traffic_changes_its_topic_at_once_and_switching_traffic_stays():
    for mix in (MIXED, SWITCHING):
        spans = traffic(Mix(mix.name, 12, mix.stay, (4, 8), (4, 8)), 1, 4, seed=0).requests
        changes = [at for at in range(1, 12) if spans[at].topic != spans[at - 1].topic]
        assert changes == list(range(mix.stay, 12, mix.stay))


def test_the_shuffled_control_has_neither_popularity_nor_memory(trace):
    control = shuffled(trace, 1)
    assert control.experts.shape == trace.experts.shape
    assert np.array_equal(control.weights, trace.weights)
    assert (np.diff(np.sort(control.experts, axis=2), axis=2) > 0).all()
    assert lru_hits(control, 0.4, 1) < 0.45 < lru_hits(trace, 0.4, 1)
    assert np.bincount(control.experts.ravel()).max() < 0.3 * np.bincount(trace.experts.ravel()).max()


def test_a_trace_comes_back_from_its_file(trace, tmp_path):
    save(trace, tmp_path / "a.safetensors")
    again = load(tmp_path / "a.safetensors")
    assert np.array_equal(again.experts, trace.experts)
    assert again.weights == pytest.approx(trace.weights, abs=0.02)
    assert again.weights.sum(axis=2) == pytest.approx(1.0, abs=1e-6)
    assert again.requests == trace.requests
    assert again.shape == trace.shape


def spoiled(path, requests=None, format_="tide-trace-1", **tensors):
    content = load_file(path)
    spans = requests if requests is not None else [Span(0, 20, len(content["experts"]) - 20, "a")]
    metadata = {"format": format_, "requests": msgspec.json.encode(spans).decode()}
    save_file(content | tensors, path, metadata=metadata)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_": "tide-trace-9"}, "tide-trace-9"),
        ({"requests": [Span(0, 1, 1, "a")]}, "requests have 2 tokens"),
        ({"requests": [Span(5, 1, 1, "a")]}, "begins at token 5"),
        ({"base": np.ones((2, 5), np.float32)}, "does not have"),
        ({"base": np.ones((3, 384), np.float32)}, "do not fit"),
        ({"weights": np.ones((1, 2, 6), np.uint8)}, "do not fit"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_what_is_wrong(trace, tmp_path, change, words):
    path = tmp_path / "a.safetensors"
    save(trace, path)
    spoiled(path, **change)
    with pytest.raises(DataError, match=words):
        load(path)


def test_a_file_that_is_not_even_one_of_tensors_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"no")
    for name in ("a", "missing"):
        with pytest.raises(DataError, match="is no trace"):
            load(tmp_path / name)
