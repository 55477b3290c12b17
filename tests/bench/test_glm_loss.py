"""The losses of the mini GLM: trained, as stored, and with a part of its experts, on the same answers."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import glm_loss  # noqa: E402
from residency_engine import FROZEN  # noqa: E402

from minis.glm53 import heldout  # noqa: E402
from minis.glm53.checkpoint import load_parameters  # noqa: E402
from tided.engine.offline import settings_of  # noqa: E402

SIZES = ["--domains", "qa", "--tokens", "5", "--longest", "3"]


def test_exact_is_as_stored_and_substitution_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert glm_loss.main([*SIZES, "--held", "30", "--json"]) == 0
    found = {row["row"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    trained = found.pop("trained")
    assert list(found) == ["as stored", "substitution", "+ reads", "exact"]
    assert trained["loss"].keys() == {"qa"}
    assert trained["mean"] < found["substitution"]["mean"]
    assert all(row["answers"] == 2 and row["loss"].keys() == {"qa"} for row in found.values())
    assert [row["equal"] for row in found.values()] == [2, 0, 0, 2]
    assert found["exact"]["loss"] == found["as stored"]["loss"]
    assert found["as stored"]["missed"] == 0 < found["substitution"]["missed"]
    assert found["substitution"]["mean"] > found["+ reads"]["mean"]


def test_the_training_s_forward_pass_says_what_the_engine_says() -> None:
    """Given the stored weights as those of a training run: the two differ by what is rounded."""
    mini = ROOT / "minis" / "glm"
    whole = glm_loss.read(mini, 640)["qa"][:3]
    texts = glm_loss.chosen({"qa": whole}, 5, 3)
    config, parameters = load_parameters(mini)
    assert heldout.mark(mini) == heldout.mark_of(parameters)
    said = heldout.Trained("", {text.key: answer for text, answer in heldout.scored(config, parameters, whole)})
    ours = glm_loss.row("trained", glm_loss.by_training(mini, texts, said))
    theirs = glm_loss.row("as stored", glm_loss.by_engine(settings_of(mini), 100, FROZEN, texts))
    assert ours["mean"] == pytest.approx(theirs["mean"], abs=0.02)
    assert ours["top1"] == theirs["top1"]
    assert len(texts["qa"]) == 2


def test_losses_of_other_parameters_are_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "trained.json"
    other.write_text('{"checkpoint": "another", "answers": {}}')
    found = glm_loss.rows(glm_loss.arguments([*SIZES, "--trained", str(other)]))
    assert next(found)["row"] == "as stored"
    assert "of other parameters" in capsys.readouterr().err
    found.close()
