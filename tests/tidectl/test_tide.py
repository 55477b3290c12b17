"""`tidectl tide show | export | import | merge | reset`, over histories of the bundled small model."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.tidectl.canned import Canned, Tidectl
from tidectl import running
from tidectl.tide.model import Model, model_of
from tided.engine.build import open_model
from tided.tide.demand import vote_of
from tided.tide.history import History
from tided.tide.pilot import Pilot

MINI = Path(__file__).parents[2] / "profiles" / "mini-deepseek.toml"
LAYERS, EXPERTS = 10, 48


@pytest.fixture
def model(state: Path) -> Model:
    return model_of(MINI)


@pytest.fixture(autouse=True)
def short_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tided.tide.history.LOCK_TIMEOUT_S", 0.1)


def learn(model: Model, requests: int = 6, expert: int = 47) -> History:
    """Requests that want one expert of each layer above all."""
    history = History.open(model.history.parent, model.identity, model.shape, record=True)
    counts = np.ones((LAYERS, EXPERTS))
    counts[:, expert] = 100
    for _ in range(requests):
        history.fold(vote_of(counts, counts, model.shape), 0.9)
    history.close()
    return history


def requests_of(model: Model) -> int:
    return History.open(model.history.parent, model.identity, model.shape, record=False).demand.requests


def shown(tidectl: Tidectl) -> dict:
    return json.loads(tidectl("tide", "show", str(MINI), "--json").stdout)


def test_before_the_first_request_the_seed_alone_speaks(tidectl, model):
    known = shown(tidectl)
    assert (known["schema"], known["recorded"], known["requests"]) == ("tidectl.tide.show/1", False, 0)
    assert (known["history_weight"], known["movers"], known["coverage_by_layer"]) == (0.0, [], None)
    assert sum(known["start_by_layer"]) == 312
    assert not model.history.exists()
    screen = tidectl("tide", "show", str(MINI)).stdout
    assert "none yet" in screen
    topics = known["coverage_by_topic"]
    assert list(topics.values()) == sorted(topics.values())
    assert 0.5 < min(topics.values()) < max(topics.values()) < 1
    [(least, share), *_] = topics.items()
    assert f"topics   a start would hold {100 * share:.1f} % of what {least} wants, the least of them" in screen
    assert "recorded" not in screen
    assert "of its demand" not in screen
    assert "demand-seed.json" in screen


def test_what_was_learned_is_shown(tidectl, model):
    learn(model)
    known = shown(tidectl)
    assert known["requests"] == 6
    assert known["votes"] == pytest.approx(sum(0.9**i for i in range(6)), abs=1e-3)
    assert known["history_weight"] == pytest.approx(known["votes"] / (known["votes"] + 4), abs=1e-3)
    assert known["half_life_requests"] == 10
    assert {one["expert"] for one in known["movers"]} == {47}
    assert all(one["kept"] and one["share"] > one["seed_share"] for one in known["movers"])
    assert 0.65 < min(known["coverage_by_layer"]) <= max(known["coverage_by_layer"]) <= 1
    screen = tidectl("tide", "show", str(MINI)).stdout
    assert "6 requests" in screen
    assert "half after 10.0 more" in screen
    held = known["coverage_by_layer"]
    told = f"{100 * sum(held) / len(held):.1f} % of it, of the weakest layer's {100 * min(held):.1f} %"
    assert f"recorded  a start would hold {told}" in screen
    head, _ = (line for line in screen.splitlines() if line.startswith("layer"))  # of the layers; of what moved
    assert head.rstrip().endswith("  of its demand")
    assert "coverage" not in screen  # that is what `top` measures


@pytest.mark.parametrize(
    ("ring_slots", "words"),
    [(0, "no plans and no aging, the set stands"), (16, "the ring still exchanges residents for what it read")],
)
def test_switched_off_it_says_what_still_moves_the_set(tidectl, model, tmp_path, ring_slots, words):
    text = MINI.read_text().replace('"../minis', f'"{MINI.parents[1]}/minis')
    text = text.replace('sensitivity = "high"', f'sensitivity = "off"\nhot_ring_slots = {ring_slots}')
    (profile := tmp_path / "off.toml").write_text(text)
    screen = tidectl("tide", "show", str(profile)).stdout
    assert "off: no plans" in screen
    assert words in screen
    assert ("the set stands" in screen) is not bool(ring_slots)


def test_a_running_daemon_tells_its_residents_by_layer(tidectl, model, monkeypatch):
    learn(model)
    live = [31, 31, 31, 31, 31, 31, 31, 31, 32, 32]
    now = running.Snapshot("serving", str(MINI), "", 0.0, [], {"residents_by_layer": live}, [], None)
    monkeypatch.setattr(running, "look", lambda: now)
    known = shown(tidectl)
    assert (known["running"], known["resident_by_layer"]) == (True, live)
    assert known["start_by_layer"] != live
    assert "at a start" in tidectl("tide", "show", str(MINI)).stdout
    monkeypatch.setattr(running, "look", lambda: now._replace(profile="/another.toml"))
    assert shown(tidectl)["running"] is False


def test_where_experts_differ_in_size_the_set_of_a_start_is_planned_by_bytes(tidectl, state, tmp_path):
    """The same that a rank would keep, told in bytes: their number alone says little."""
    glm = model_of(MINI.with_name("mini-glm.toml"))
    opened = open_model(glm.settings)
    assert opened.kinds.whole == glm.kinds.whole
    assert np.array_equal(opened.kinds.of, glm.kinds.of)
    history = History.open(tmp_path, glm.identity, glm.shape, record=False)
    kept = Pilot(history, glm.seed, glm.settings.tide, glm.shape, 172, opened.kinds).boot_pairs()
    known = json.loads(tidectl("tide", "show", str(glm.profile), "--json").stdout)
    counts = [sum(layer == one for layer, _ in kept) for one in range(8)]
    assert known["start_by_layer"] == counts
    told = known["bytes"]
    assert 0.66 < told["start"] / told["experts"] <= 172 / 256
    assert [one["start"] for one in told["sizes"]] == np.bincount([opened.kinds.of[pair] for pair in kept]).tolist()
    assert sum(one["experts"] for one in told["sizes"]) == 256
    assert sum(one["start"] * one["bytes"] for one in told["sizes"]) == told["start"]
    screen = tidectl("tide", "show", str(glm.profile)).stdout
    assert f"{100 * told['start'] / told['experts']:.1f} % of all bytes at a start, {sum(counts)} experts: " in screen
    assert f"{100 * told['start_share_by_layer'][3]:.1f} %" in screen
    assert shown(tidectl)["bytes"] is None


def test_without_a_profile_it_is_the_one_that_ran_last(tidectl, model):
    missing = tidectl("tide", "show")
    assert missing.exit_code == 3
    assert "name a PROFILE" in missing.stderr


def test_an_export_moves_to_another_machine(tidectl, model, tmp_path, monkeypatch):
    learn(model)
    file = tmp_path / "learned.json"
    assert tidectl("tide", "export", str(file), str(MINI)).exit_code == 0
    assert file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("TIDE_STATE_DIR", str(tmp_path / "other"))
    result = tidectl("tide", "import", str(file), str(MINI), "--json")
    assert json.loads(result.stdout) == {"schema": "tidectl.tide.import/1", "requests": 6, "aside": None}
    assert requests_of(model_of(MINI)) == 6


def test_an_import_over_a_history_must_say_what_becomes_of_it(tidectl, model, tmp_path):
    learn(model)
    file = tmp_path / "learned.json"
    tidectl("tide", "export", str(file), str(MINI))
    refused = tidectl("tide", "import", str(file), str(MINI))
    assert refused.exit_code == 2
    assert "--merge" in refused.stderr
    assert requests_of(model) == 6
    assert tidectl("tide", "import", str(file), str(MINI), "--merge", "--replace").exit_code == 2
    assert tidectl("tide", "import", str(file), str(MINI), "--merge").exit_code == 0
    assert requests_of(model) == 12
    replaced = tidectl("tide", "import", str(file), str(MINI), "--replace")
    assert requests_of(model) == 6
    assert "set-aside" in replaced.stderr
    assert len(list(model.history.parent.glob("*.set-aside-*Z"))) == 1


def test_a_history_of_another_model_is_refused_by_name(tidectl, model, tmp_path):
    learn(model)
    file, other = tmp_path / "learned.json", tmp_path / "other.json"
    tidectl("tide", "export", str(file), str(MINI))
    foreign = {
        "identity": {"identity": "c" * 64},
        "shape": {"experts": 47, **{k: [[1.0] * 47] * LAYERS for k in ("counts", "mass")}},
    }
    for name, change in foreign.items():
        other.write_text(json.dumps(json.loads(file.read_text()) | change))
        for command in (("import", str(other), str(MINI), "--merge"), ("merge", str(file), str(other), "out.json")):
            result = tidectl("tide", *command)
            assert result.exit_code == 65, (name, command)
            assert model.identity[:16] in result.stderr
    assert requests_of(model) == 6


def test_two_exports_merge_into_a_third(tidectl, model, tmp_path):
    one, other, out = (tmp_path / f"{name}.json" for name in ("one", "other", "out"))
    learn(model)
    tidectl("tide", "export", str(one), str(MINI))
    learn(model, 4, expert=3)
    tidectl("tide", "export", str(other), str(MINI))
    assert tidectl("tide", "merge", str(one), str(other), str(out)).exit_code == 0
    assert json.loads(out.read_text())["requests"] == 16
    again = tidectl("tide", "merge", str(one), str(other), str(out))
    assert again.exit_code == 2
    assert "is there already" in again.stderr


def test_a_reset_asks_and_sets_aside(tidectl, model):
    learn(model)
    refused = tidectl("tide", "reset", str(MINI))
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    assert requests_of(model) == 6
    assert tidectl("tide", "reset", str(MINI), "--yes").exit_code == 0
    assert not model.history.exists()
    (aside,) = model.history.parent.glob("*.set-aside-*Z")
    assert aside.stat().st_size > 0
    assert "there was no history" in tidectl("tide", "reset", str(MINI), "--yes").stderr


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory of another user, who can reach it."""
    if os.geteuid() != 0:
        pytest.skip("only root acts for others")
    with tempfile.TemporaryDirectory(prefix="tidelm-test-") as place:
        Path(place).chmod(0o755)
        path = Path(place) / "state"
        path.mkdir(mode=0o700)
        os.chown(path, 1234, 1235)
        monkeypatch.setenv("TIDE_STATE_DIR", str(path))
        yield path


def owners(directory: Path) -> set[tuple[int, int]]:
    return {(path.lstat().st_uid, path.lstat().st_gid) for path in (directory, *directory.iterdir())}


def test_what_root_imports_belongs_to_whom_the_state_directory_does(tidectl, model, tmp_path, services):
    learn(model)
    file, history = tmp_path / "learned.json", services / "history"
    assert tidectl("tide", "export", str(file), str(MINI)).exit_code == 0
    for path in (*history.iterdir(), history):
        os.chown(path, 1234, 1235)
    for options in (["--replace"], ["--merge"]):
        assert tidectl("tide", "import", str(file), str(MINI), *options).exit_code == 0
    assert tidectl("tide", "reset", str(MINI), "--yes").exit_code == 0
    assert tidectl("tide", "import", str(file), str(MINI)).exit_code == 0
    assert owners(history) == {(1234, 1235)}
    assert os.geteuid() == 0


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_link_in_the_services_directory_leads_root_nowhere(tidectl, model, tmp_path, services, mode):
    learn(model)
    file, history, elsewhere = tmp_path / "learned.json", services / "history", services.parent / "etc"
    assert tidectl("tide", "export", str(file), str(MINI)).exit_code == 0
    history.rename(elsewhere)
    elsewhere.chmod(mode)
    history.symlink_to(elsewhere)
    before = {path: path.read_bytes() for path in elsewhere.iterdir()}
    for command in (("import", str(file), str(MINI), "--replace"), ("reset", str(MINI), "--yes")):
        refused = tidectl("tide", *command)
        assert refused.exit_code in (65, 77), refused.output
    assert owners(elsewhere) == {(0, 0)}
    assert {path: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_a_history_that_a_daemon_records_into_is_read_and_not_changed(tidectl, model, tmp_path):
    learn(model)
    file = tmp_path / "learned.json"
    owner = History.open(model.history.parent, model.identity, model.shape, record=True)
    assert shown(tidectl)["requests"] == 6
    assert tidectl("tide", "export", str(file), str(MINI)).exit_code == 0
    for command in (("reset", str(MINI), "--yes"), ("import", str(file), str(MINI), "--merge"),
                    ("import", str(file), str(MINI), "--replace")):  # fmt: skip
        result = tidectl("tide", *command)
        assert result.exit_code == 69, command
        assert "another process records" in result.stderr
    owner.close()
    assert requests_of(model) == 6


def test_nothing_recorded_is_nothing_to_export(tidectl, model, tmp_path):
    result = tidectl("tide", "export", str(tmp_path / "learned.json"), str(MINI))
    assert result.exit_code == 65
    assert not (tmp_path / "learned.json").exists()


def test_a_damaged_history_is_told_of_and_not_exported(tidectl, model, tmp_path):
    learn(model)
    model.history.write_bytes(b"noise" * 999)
    assert "not used" in shown(tidectl)["note"]
    assert tidectl("tide", "export", str(tmp_path / "learned.json"), str(MINI)).exit_code == 65


def test_no_command_of_the_tide_waits_for_torch(server: Canned):
    import subprocess

    code = "import sys, tidectl.tide.show, tidectl.tide.histories; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
