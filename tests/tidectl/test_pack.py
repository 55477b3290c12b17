"""`tidectl pack` on a small checkpoint: written, written again, verified, refused."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from packers.packs import Pack
from packers.shards import Checkpoint
from tests.tidectl.canned import Tidectl
from tidectl import waiting

GOLDEN = Path(__file__).parents[1] / "golden" / "deepseek-v41"
NAMES = ["experts-rank-0-of-2.mxfp4", "experts-rank-1-of-2.mxfp4"]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "p.toml"
    path.write_text(
        f"[model]\npath = '{GOLDEN}'\nserved_name = 'a'\n[experts]\nresident = 80\nsource = 'pack'\n"
        "pack_dir = 'packs'\n[cache]\ncontext_tokens = 64\npool_tokens = 64\n[parallel]\nranks = 2\n"
    )
    return path


def test_a_profile_says_where_to_and_over_how_many_ranks(
    tidectl: Tidectl, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LINE_EVERY_S", 0)
    ran = tidectl("pack", str(profile))
    assert (ran.exit_code, ran.stdout) == (0, "")
    assert "packing 80 of 80 experts" in ran.stderr
    packs = profile.parent / "packs"
    assert sorted(path.name for path in packs.iterdir()) == NAMES
    for rank, name in enumerate(NAMES):
        assert f"{packs / name}: {(packs / name).stat().st_size} bytes" in ran.stderr
        header = Pack.open(packs / name).header
        assert (header.rank, header.ranks, header.layers, header.experts) == (rank, 2, 10, 8)
        assert header.model == Checkpoint.open(GOLDEN).identity()


def test_one_rank_alone_gets_the_same_bytes(tidectl: Tidectl, profile: Path, tmp_path: Path) -> None:
    assert tidectl("pack", str(profile)).exit_code == 0
    alone = tmp_path / "alone"
    common = ["--checkpoint", str(GOLDEN), "--ranks", "2", "--out", str(alone)]
    ran = tidectl("pack", *common, "--rank", "1", "--json")
    size = (alone / NAMES[1]).stat().st_size
    assert json.loads(ran.stdout) == {
        "schema": "tidectl.pack/1",
        "packs": [{"path": str(alone / NAMES[1]), "bytes": size}],
    }
    assert sorted(path.name for path in alone.iterdir()) == NAMES[1:]
    assert (alone / NAMES[1]).read_bytes() == (tmp_path / "packs" / NAMES[1]).read_bytes()


def test_verify_tells_an_intact_pack_from_a_damaged_one(tidectl: Tidectl, profile: Path) -> None:
    assert tidectl("pack", str(profile)).exit_code == 0
    path = profile.parent / "packs" / NAMES[1]
    ran = tidectl("pack", "--verify", str(path))
    assert (ran.exit_code, ran.stdout) == (0, "")
    assert f"{path}: intact; rank 1 of 2, 10 layers of 8" in ran.stderr
    found = json.loads(tidectl("pack", "--verify", str(path), "--json").stdout)
    assert (found["schema"], found["intact"], found["rank"], found["records"]) == ("tidectl.pack-verify/1", True, 1, 80)
    offset = Pack.open(path).header.offset(13)
    data = bytearray(path.read_bytes())
    data[offset + 5] ^= 1
    path.write_bytes(data)
    ran = tidectl("pack", "--verify", str(path))
    assert (ran.exit_code, ran.stdout) == (65, "")
    assert f"expert 5 of layer 1 is damaged: its checksum differs ({path}:{offset})" in ran.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["mini-deepseek", "--checkpoint", "c"],
        ["--checkpoint", "c", "--out", "x"],
        ["--checkpoint", "c", "--ranks", "2"],
        ["mini-deepseek"],
        ["mini-deepseek", "--rank", "2", "--out", "x"],
        ["--verify", "x", "--ranks", "2"],
        ["mini-deepseek", "--verify", "x"],
    ],
)
def test_wrong_usage(tidectl: Tidectl, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = tidectl("pack", *arguments)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_packed(tidectl: Tidectl, tmp_path: Path) -> None:
    common = ["pack", "--out", str(tmp_path / "x"), "--checkpoint"]
    assert tidectl(*common, str(tmp_path / "none"), "--ranks", "2").exit_code == 65
    assert tidectl(*common, str(GOLDEN), "--ranks", "64").exit_code == 78  # experts that cannot be cut so
    assert tidectl("pack", "--verify", str(tmp_path / "none")).exit_code == 65
    assert not (tmp_path / "x").exists()


EXL3 = GOLDEN.parent / "exl3-checkpoint"


def test_exl3_experts_are_packed_beside_their_checkpoint(tidectl: Tidectl, tmp_path: Path) -> None:
    (tmp_path / "glm").symlink_to(EXL3)
    ran = tidectl("pack", "--exl3", str(tmp_path / "glm"), "--rank", "1", "--ranks", "2", "--json")
    path = tmp_path / "glm-packs" / "experts-rank-1-of-2.exl3"
    assert json.loads(ran.stdout)["packs"] == [{"path": str(path), "bytes": path.stat().st_size}]
    header = Pack.open(path).header
    assert (header.rank, header.ranks, header.layers, header.experts) == (1, 2, 2, 8)
    assert tidectl("pack", "--verify", str(path)).exit_code == 0
    both = tidectl("pack", "--exl3", str(EXL3), "--ranks", "2", "--out", str(tmp_path / "both"))
    assert both.exit_code == 0
    assert (tmp_path / "both" / path.name).read_bytes() == path.read_bytes(), "one pass over all ranks, the same bytes"


def test_what_is_no_exl3_checkpoint_is_refused_as_such(tidectl: Tidectl, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    ran = tidectl("pack", "--exl3", str(GOLDEN), "--ranks", "2", "--out", out)
    assert ran.exit_code != 0
    assert "its routed experts are MXFP4, not EXL3" in ran.stderr
    ran = tidectl("pack", "--exl3", str(EXL3), "--ranks", "4", "--out", out)
    assert "whole blocks of 128 weights" in ran.stderr
    ran = tidectl("pack", "--exl3", str(EXL3), "--checkpoint", str(EXL3), "--ranks", "2", "--out", out)
    assert "name either a profile or a checkpoint" in ran.stderr
    assert not Path(out).exists()


def test_a_rank_sliced_export_is_refused_by_name(tidectl: Tidectl, tmp_path: Path) -> None:
    tensors = load_file(EXL3 / "model.safetensors")
    sliced = {
        name.replace("gate_proj.", "gate_proj.rank0.") if ".experts.3." in name else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(sliced, tmp_path / "model.safetensors")
    shutil.copyfile(EXL3 / "config.json", tmp_path / "config.json")
    ran = tidectl("pack", "--exl3", str(tmp_path), "--rank", "0", "--ranks", "2")
    assert ran.exit_code != 0
    assert "rank-sliced export" in " ".join(ran.stderr.split())
    assert "experts.3.gate_proj.rank0" in ran.stderr
