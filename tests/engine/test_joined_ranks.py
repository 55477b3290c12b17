"""Ranks tell each other which dense weights they have, beside those of their experts."""

from pathlib import Path

from msgspec.structs import replace
from real_pair import GLM
from safetensors.torch import load_file, save_file

from tided.engine.build import open_model
from tided.engine.facts import facts_of
from tided.engine.offline import settings_of
from tided.guard import compare


def dense_at(path: Path, factor: float) -> Path:
    path.mkdir()
    tensors = load_file(GLM / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * factor
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_bytes((GLM / "config.json").read_bytes())
    return path


def facts(dense: Path | None) -> dict[str, str]:
    settings = settings_of(GLM)
    return facts_of(open_model(replace(settings, model=replace(settings.model, dense=str(dense or "")))))


def test_ranks_with_other_dense_weights_do_not_pair(tmp_path: Path) -> None:
    one, other = dense_at(tmp_path / "one", 1.0), dense_at(tmp_path / "other", 2.0)
    found = [facts(dense) for dense in (one, one, other, None)]
    assert compare(found[0], found[1]) == []
    assert [name for name, *_ in compare(found[0], found[2])] == ["dense"]
    ((name, _, theirs),) = compare(found[0], found[3])
    assert (name, theirs) == ("dense", "none")
