"""What `profile check` says of a checkpoint and of this machine, and `start` refuses before a rank is started."""

import json
import socket
from pathlib import Path

import pytest

from tests.tidectl.canned import MODEL, Tidectl
from tests.tidectl.test_lifecycle import write_profile


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "deepseek_v41", "text_config": MODEL}))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    return write_profile(tmp_path / "p.toml")


def change(path: Path, old: str, new: str) -> int:
    """The line that was changed."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return text[: text.index(old)].count("\n") + 1


def test_a_profile_that_fits_says_nothing(tidectl: Tidectl, profile: Path, state: Path) -> None:
    ran = tidectl("profile", "check", str(profile))
    assert (ran.exit_code, ran.stderr) == (0, f"{profile}: a valid profile\n")
    assert not state.exists()


@pytest.mark.parametrize(
    ("old", "new", "column", "message"),
    [
        ("resident = 8", "resident = 17", 12, "'experts.resident' must be 6 to 16 with this checkpoint, not 17"),
        ("resident = 8", "resident = 5", 12, "'experts.resident' must be 6 to 16 with this checkpoint, not 5"),
        (
            "[experts]",
            "[tide]\nfloor_per_layer = 5\n[experts]",
            19,
            "'tide.floor_per_layer' must be 0, or 3 to 4 with 8 residents, not 5",
        ),
        ("_tokens = 64", "_tokens = 65", 18, "'cache.context_tokens' is 65, but the checkpoint reaches 64 positions"),
        (
            "[experts]",
            '[engine]\ndraft = "5"\n[experts]',
            9,
            "'engine.draft' is '5', but the checkpoint has no drafter",
        ),
        ("ranks = 2", "ranks = 4", 9, "4 ranks cannot share this checkpoint: o_groups 2"),
    ],
)
def test_what_the_checkpoint_cannot_do_is_refused_by_line(
    tidectl: Tidectl, profile: Path, state: Path, old: str, new: str, column: int, message: str
) -> None:
    line = change(profile, old, new) + (new.startswith("[") and new != old)
    for command in (["profile", "check"], ["start"]):
        ran = tidectl(*command, str(profile))
        assert ran.exit_code == 78
        assert f"{profile}:{line}:{column}: error: {message}" in ran.stderr
    assert not (state / "logs").exists()


DRAFTING = MODEL | {"num_nextn_predict_layers": 1, "dspark_block_size": 5}


@pytest.mark.parametrize(
    ("section", "line", "message"),
    [
        ("cache", 'dtype = "fp8"', "cache.dtype = 'fp8': this model has its own"),
        ("cache", "split = true", "cache.split = true: every rank of this model keeps all of a context"),
        ("engine", 'draft = "6"', "engine.draft = '6': this drafter proposes 5 tokens"),
    ],
)
def test_what_the_family_refuses_is_told_by_line(
    tidectl: Tidectl, profile: Path, tmp_path: Path, section: str, line: str, message: str
) -> None:
    """The other family takes it."""
    config = {"model_type": "deepseek_v41", "text_config": DRAFTING}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    text = profile.read_text()
    header = f"[{section}]\n"
    changed = text.replace(header, f"{header}{line}\n") if header in text else f"{text}\n{header}{line}\n"
    profile.write_text(changed)
    number = changed[: changed.index(f"\n{line}\n") + 1].count("\n") + 1
    ran = tidectl("profile", "check", str(profile))
    assert ran.exit_code == 78
    assert f"{profile}:{number}:{line.index('=') + 3}: error: {message}" in ran.stderr
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "glm_moe_dsa"} | GLM))
    assert tidectl("profile", "check", str(profile)).exit_code == 0


GLM = MODEL | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("resident = 8", "resident = 9", "'experts.resident' must be 3 to 8 with this checkpoint, not 9"),
        ("ranks = 2", "ranks = 5", "intermediate_size 96"),
        ("_tokens = 64", "_tokens = 65", "'cache.context_tokens' is 65, but the checkpoint reaches 64 positions"),
    ],
)
def test_a_model_whose_first_layers_are_dense(
    tidectl: Tidectl, profile: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    """GLM-5.3: its configuration has no parts, and layers without experts hold none."""
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "glm_moe_dsa"} | GLM))
    assert tidectl("profile", "check", str(profile)).exit_code == 0
    change(profile, old, new)
    ran = tidectl("profile", "check", str(profile))
    assert ran.exit_code == 78
    assert message in ran.stderr


def test_a_config_of_another_family_is_left_to_the_ranks(tidectl: Tidectl, profile: Path, tmp_path: Path) -> None:
    change(profile, "resident = 8", "resident = 5")
    for text in ("{", "[]", json.dumps({"model_type": "other", "text_config": MODEL})):
        (tmp_path / "model" / "config.json").write_text(text)
        assert tidectl("profile", "check", str(profile)).exit_code == 0


def test_a_port_in_use_is_a_note(tidectl: Tidectl, profile: Path) -> None:
    port = int(profile.read_text().partition("control_port = ")[2].split()[0])
    with socket.create_server(("127.0.0.1", port + 1)):
        ran = tidectl("profile", "check", str(profile))
    assert ran.exit_code == 0
    assert f"note: 127.0.0.1:{port + 1}: the port is in use" in ran.stderr
    assert "set parallel.control_port" in ran.stderr


def test_addresses_of_other_machines_are_a_note(tidectl: Tidectl, profile: Path) -> None:
    change(profile, "ranks = 2", "ranks = 2\nhosts = ['203.0.113.1', '203.0.113.2']")
    ran = tidectl("profile", "check", str(profile))
    assert ran.exit_code == 0
    assert "note: none of parallel.hosts is an address of this machine" in ran.stderr
