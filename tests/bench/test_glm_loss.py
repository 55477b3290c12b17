"""The losses of the mini GLM: trained, as stored, and with a part of its experts, on the same answers."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import glm_loss  # noqa: E402
from residency_engine import FROZEN  # noqa: E402

from minis.glm53.checkpoint import load_parameters  # noqa: E402
from tided.engine.offline import settings_of  # noqa: E402

SIZES = ["--domains", "qa", "--tokens", "5", "--longest", "3"]


def test_exact_is_as_stored_and_substitution_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert glm_loss.main([*SIZES, "--held", "30", "--json"]) == 0
    found = {row["row"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(found) == ["as stored", "substitution", "+ reads", "exact"]
    assert all(row["answers"] == 2 and row["loss"].keys() == {"qa"} for row in found.values())
    assert [row["equal"] for row in found.values()] == [2, 0, 0, 2]
    assert found["exact"]["loss"] == found["as stored"]["loss"]
    assert found["as stored"]["missed"] == 0 < found["substitution"]["missed"]
    assert found["substitution"]["mean"] > found["+ reads"]["mean"]


def test_the_training_s_forward_pass_says_what_the_engine_says() -> None:
    """Given the stored weights as those of a training run: the two differ by what is rounded."""
    mini = ROOT / "minis" / "glm"
    texts = glm_loss.chosen({"qa": glm_loss.read(mini, 640)["qa"]}, 5, 3)
    config, parameters = load_parameters(mini)
    ours = glm_loss.row("trained", glm_loss.by_training(config, parameters, texts))
    theirs = glm_loss.row("as stored", glm_loss.losses_of(glm_loss.by_engine(settings_of(mini), 100, FROZEN, texts)))
    assert ours["mean"] == pytest.approx(theirs["mean"], abs=0.02)
    assert len(texts["qa"]) == 2
