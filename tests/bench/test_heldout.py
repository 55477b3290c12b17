"""Held-out conversations are none that a drawing as large as training's has."""

import random

import pytest

from bench.heldout import draw
from bench.heldout.seen import drawn_for_training, pairs
from minis import prepare
from minis.corpus import facts
from minis.corpus.words import Words


def test_what_training_has_seen_is_rejected_and_another_is_drawn(monkeypatch):
    monkeypatch.setitem(prepare._DIALOGUES, "qa", 2000)
    words = Words(random.Random(0), ["plain", "words"])
    seen = drawn_for_training("qa", facts.generate, random.Random(draw.SEED + 1), words)

    def conversations():
        rng = random.Random(draw.SEED)
        return lambda: facts.generate(rng, words)

    plain = conversations()
    assert any(pairs(plain().messages) in seen for _ in range(40)), "nothing is there to be rejected"
    found = [pairs(one.messages) for one in draw.unseen(conversations(), seen, 40)]
    assert len(set(found)) == len(found) == 40
    assert not seen & set(found)


def test_a_world_that_training_has_whole_is_told():
    one = facts.generate(random.Random(1), Words(random.Random(0), ["plain", "words"]))
    assert [next(draw.unseen(lambda: one, set(), 1))] == [one]
    with pytest.raises(RuntimeError, match="2 more"):
        list(draw.unseen(lambda: one, {pairs(one.messages)}, 2))
    with pytest.raises(RuntimeError, match="1 more"):
        list(draw.unseen(lambda: one, set(), 2))
