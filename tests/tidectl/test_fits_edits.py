"""Edits of a model that a profile names wrongly are told with their line, before a rank is started."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tidectl.fits import misfits
from tidectl.status import health_rows
from tided.errors import DataError
from tided.profile import load, load_for_start
from tided.profile.start import _packs_fault

ROOT = Path(__file__).parents[2]
GLM, DEEPSEEK = ROOT / "minis" / "glm", ROOT / "minis" / "deepseek"
PROFILE = """
[model]
path = "{path}"
served_name = "m"
{key} = "{edit}"
[experts]
resident = 200
[cache]
context_tokens = 512
pool_tokens = 512
"""


def profile(folder: Path, path: Path, key: str, edit: Path) -> Path:
    found = folder / "p.toml"
    found.write_text(PROFILE.format(path=path, key=key, edit=edit))
    return found


@pytest.mark.parametrize("key", ["overlay", "ablation"])
def test_a_file_that_is_not_there(tmp_path: Path, key: str) -> None:
    with pytest.raises(DataError, match=r"p\.toml:5:\d+: error: there is no file of edits at .*none.safetensors"):
        load_for_start(profile(tmp_path, GLM, key, tmp_path / "none.safetensors"))


@pytest.mark.parametrize(
    ("path", "key", "told"),
    [
        (DEEPSEEK, "ablation", "this model takes no projection at run time"),
        (GLM, "overlay", "this model takes no file of edited weights"),
        (GLM, "ablation", "layers.1 needs a direction and a point"),
    ],
)
def test_one_that_this_model_does_not_take(tmp_path: Path, path: Path, key: str, told: str) -> None:
    save_file({"layers.1.direction": torch.zeros(256)}, tmp_path / "e.safetensors")
    source = profile(tmp_path, path, key, tmp_path / "e.safetensors")
    problems = [problem for problem in misfits(load(source), source) if told in problem.message]
    assert [problem.line for problem in problems] == [5]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "e.safetensors").write_bytes(b"no file")
    source = profile(tmp_path, GLM, "ablation", tmp_path / "e.safetensors")
    assert "no room for a safetensors header" in misfits(load(source), source)[0].message


def test_status_says_what_is_edited() -> None:
    overlay = {"sha256": "ab", "changes": "layers 10-35 attn.wo_b"}
    assert ("edited", "layers 10-35 attn.wo_b") in health_rows({"overlay": overlay})
    assert ("edited", "") in health_rows({"overlay": None})


@pytest.mark.parametrize("name", ["experts-rank-0-of-2.mxfp4", "experts-rank-0-of-2.exl3"])
def test_packs_of_both_kinds_are_packs(tmp_path: Path, name: str) -> None:
    assert _packs_fault(str(tmp_path))
    (tmp_path / name).touch()
    assert _packs_fault(str(tmp_path)) == ""
