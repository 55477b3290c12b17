"""`tidectl synth`: headers in the real shapes, which any command then opens; refusals before anything is written."""

import json
from pathlib import Path

import pytest

from packers.shards import Checkpoint
from tests.tidectl.canned import Tidectl


def test_headers_alone_are_a_checkpoint(tidectl: Tidectl, tmp_path: Path) -> None:
    out = tmp_path / "two"
    ran = tidectl("synth", str(out), "--layers", "2", "--experts", "6", "--in-memory", "--json")
    assert ran.exit_code == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["schema"] == "tidectl.synth/1"
    checkpoint = Checkpoint.open(out)
    assert said["bytes"] == sum(shard.size_bytes for shard in checkpoint.shards) > 100e9
    assert sum(path.stat().st_blocks * 512 for path in out.iterdir()) < 10 << 20
    assert checkpoint.read("layers.1.ffn.experts.5.w2.weight").shape == (5120, 1152)


def test_glm53_s_shapes(tidectl: Tidectl, tmp_path: Path) -> None:
    out = tmp_path / "four"
    ran = tidectl("synth", str(out), "--like", "glm53", "--layers", "4", "--experts", "8", "--in-memory", "--json")
    assert ran.exit_code == 0, ran.stderr
    checkpoint = Checkpoint.open(out)
    assert json.loads(ran.stdout)["bytes"] == sum(shard.size_bytes for shard in checkpoint.shards) > 3e9
    assert checkpoint.read("model.layers.3.mlp.experts.7.down_proj.trellis").shape == (128, 384, 48)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--layers", "1"],
        ["--layers", "0"],
        ["--experts", "5"],
        ["--like", "nobody"],
        ["--like", "glm53", "--layers", "3"],
        ["--like", "glm53", "--engram-vocabulary", "500"],
    ],
)
def test_what_there_is_not(tidectl: Tidectl, tmp_path: Path, wrong: list[str]) -> None:
    ran = tidectl("synth", str(tmp_path / "a"), "--in-memory", *wrong)
    assert ran.exit_code == 2
    assert not (tmp_path / "a").exists()
