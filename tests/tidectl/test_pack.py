"""`tidectl pack` on a small checkpoint: written, written again, verified, refused."""

import json
from pathlib import Path

import pytest

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
