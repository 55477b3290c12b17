"""The residency benchmark judges what the engine computes, and its figures are those of what it saw."""

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import residency  # noqa: E402
from residency import tour  # noqa: E402
from residency_report import ALL, ANSWERS, Answer, Seen, back_after, figures, gain  # noqa: E402

from tidectl.evals.texts import read  # noqa: E402

MINI = ROOT / "minis" / "deepseek"


def test_the_ladder_of_one_domain():
    command = [sys.executable, "bench/residency.py", "profiles/mini-deepseek.toml", "--budgets", "100,35"]
    sizes = ["--domains", "qa", "--tokens", "6", "--longest", "3", "--traffic", "1", "--exact-tokens", "3"]
    done = subprocess.run(
        [*command, *sizes, "--switches", "0", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["variant"]: row for row in json.loads(done.stdout)["ladder"]}
    names = ["all resident", "substitution", "+ adaptation", "+ hot reads", "+ balanced", "hot reads alone", "exact"]
    assert list(rows) == names
    own = {name: row["domains"]["qa"]["first"] for name, row in rows.items()}
    assert rows["exact"]["equal"] == rows["exact"]["answers"] == 1
    assert own["exact"]["loss"] == own["all resident"]["loss"]
    assert own["substitution"]["loss"] != own["all resident"]["loss"]
    assert own["all resident"]["missed"] == own["exact"]["substituted"] == 0
    assert own["exact"]["missed"] > 0
    assert own["substitution"]["substituted"] == own["substitution"]["missed"] > 0
    assert own["+ balanced"]["substituted"] < own["+ balanced"]["missed"]
    assert own["substitution"]["kb_a_token"] == 0 < own["+ adaptation"]["kb_a_token"] < own["exact"]["kb_a_token"]


def test_every_domain_has_texts_whose_answers_end():
    texts = read(MINI, residency.MOST_REQUEST_TOKENS)
    assert sorted(texts) == ["code", "codechat", "lang", "math", "prose", "qa", "story", "tools"]
    for domain, found in texts.items():
        assert len(found) >= 30
        assert all(0 < text.prompt_tokens < len(text.ids) for text in found)
        assert domain in ("prose", "code") or {text.ids[-1] for text in found} == {1}  # the end of a sentence


def passes(*shares: float, tokens: int = 20) -> list[Seen]:
    return [Seen(tokens, False, 1.0, share, share) for share in shares]


def back(seen: list[Seen]) -> dict[str, float]:
    return back_after(seen, *ALL)


def test_tokens_until_the_missed_share_is_back():
    """A window is the last 64 tokens or a little more: four passes of 20."""
    calm = [0.1] * 20
    assert back(passes(*calm))["tokens"] == 80  # no window ends earlier
    soon = back(passes(*[0.5] * 5, *calm))
    assert (soon["tokens"], soon["first"]) == (180, 0.5)
    assert soon["steady"] == pytest.approx(0.1)
    assert back(passes(*[0.5] * 15, *calm))["tokens"] == 380  # too late is told as it is
    assert back(passes(*[0.004] * 5, *[0.0] * 20))["tokens"] == 80  # as good as none from the start


def test_a_stay_that_ends_before_it_comes_down_is_never_back():
    assert back(passes(*[0.9] * 15, 0.1))["tokens"] == math.inf


def test_answers_have_a_window_of_their_own():
    seen = passes(*[0.6] * 40, *[0.1] * 100, tokens=1)
    assert back_after(seen, *ANSWERS)["tokens"] == 40 + 31  # one of 32 passes may still be bad


def test_gain_is_nats_a_token_with_domains_weighing_alike():
    def answers(*losses: float) -> list[Answer]:
        names = ("a", "a", "b")
        return [Answer(name, losses=[loss] * 2) for name, loss in zip(names, losses, strict=True)]

    found = gain(answers(1.0, 1.0, 1.0), answers(2.0, 4.0, 1.0))
    assert found["mean"] == pytest.approx((2.0 + 0.0) / 2)
    assert (found["low"], found["high"]) == pytest.approx((0.5, 1.5))


def test_a8_a_set_that_misses_less_and_answers_worse_has_no_gain():
    """What is missed is not what is lost: the ladder's gains are those of held-out loss."""

    def answers(loss: float, missed: float) -> list[Answer]:
        seen = [Seen(1, True, 1.0, missed, missed)] * 2
        return [Answer("a", losses=[loss] * 2, hits=[True, False], seen=seen)]

    less, more = answers(loss=1.5, missed=0.1), answers(loss=1.0, missed=0.4)
    assert figures(less)["missed"] < figures(more)["missed"]
    assert gain(less, more)["mean"] == pytest.approx(-0.5)


def test_a_tour_changes_the_domain_and_repeats_no_change():
    path = tour(["a", "b", "c", "d"], 12, seed=3)
    changes = list(pairwise(path))
    assert all(old != new for old, new in changes)
    assert len(set(changes)) == len(changes)
    assert len(tour(["a", "b"], 7, seed=0)) == 3
