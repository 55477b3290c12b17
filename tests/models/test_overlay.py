"""Edited weights in a file of their own: the model under them is the edited checkpoint, and a wrong file is refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from packers.overlay import Overlay
from packers.shards import Checkpoint
from tests.models.random_checkpoint import released_config
from tests.models.rig import GOLDEN
from tided.engine.offline import logits, settings_of
from tided.errors import ConfigError, TensorError
from tided.models.deepseek_v41.overlay import REAL_LAYERS, overlaid
from tided.models.families import open_checkpoint
from tided.settings import Model

GLM = GOLDEN.parent / "glm53"
LAYERS = range(2, 5)
IDS = list(range(5, 60))


def edited(layers: range = LAYERS) -> dict[str, Tensor]:
    """The output projections of some layers, turned about in every 32 rows: as sane as before, and another model."""
    checkpoint = Checkpoint.open(GOLDEN)
    names = [f"layers.{layer}.attn.wo_b.{kind}" for layer in layers for kind in ("weight", "scale")]
    tensors = {name: checkpoint.read(name) for name in names}
    return {
        name: (tensor.view(torch.uint8).flip(0) if name.endswith("weight") else tensor.view(torch.uint8).clone()).view(
            tensor.dtype
        )
        for name, tensor in tensors.items()
    }


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    save_file(edited(), tmp_path / "overlay.safetensors")
    return tmp_path / "overlay.safetensors"


def under(path: Path) -> Any:
    settings = settings_of(GOLDEN)
    return replace(settings, model=replace(settings.model, overlay=str(path)))


def edited_checkpoint(directory: Path) -> Path:
    shutil.copytree(GOLDEN, directory)
    tensors, index = edited(), json.loads((directory / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    for shard in {index[name] for name in tensors}:
        held = load_file(directory / shard)
        save_file(held | {name: tensor for name, tensor in tensors.items() if name in held}, directory / shard)
    return directory


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_model_under_it_is_the_edited_checkpoint(overlay: Path, tmp_path: Path, ranks: int) -> None:
    wanted = logits(edited_checkpoint(tmp_path / "edited"), IDS, ranks=ranks, decode=3)
    assert logits(under(overlay), IDS, ranks=ranks, decode=3).equal(wanted)
    assert not logits(GOLDEN, IDS, ranks=ranks, decode=3).equal(wanted)


def test_nothing_of_the_checkpoint_is_written_and_packs_stay_its_own(overlay: Path) -> None:
    before = Checkpoint.open(GOLDEN)
    opened = open_checkpoint(Model(path=str(GOLDEN), served_name="m", overlay=str(overlay)))
    opened.read("layers.2.attn.wo_b.weight").view(torch.uint8).zero_()
    assert opened.identity() == before.identity()
    assert opened.served_identity() != before.served_identity() == before.identity()
    assert opened.overlay
    assert opened.overlay.points == "layers 2-4 attn.wo_b"
    assert edited()["layers.2.attn.wo_b.weight"].view(torch.uint8).any()
    assert before.read("layers.2.attn.wo_b.weight").view(torch.uint8).any()


def test_every_byte_counts(overlay: Path) -> None:
    one = Overlay.open(overlay)
    raw = bytearray(overlay.read_bytes())
    raw[-1] ^= 1
    overlay.write_bytes(raw)
    assert Overlay.open(overlay).sha256 != one.sha256


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in edited().items() if key != name}


WRONG = {
    "one missing": (lambda: without("layers.3.attn.wo_b.scale"), "1 missing: layers.3.attn.wo_b.scale"),
    "a layer missing": (
        lambda: edited(range(2, 3)) | edited(range(4, 5)),
        "2 missing: layers.3.attn.wo_b.scale, layers.3.attn.wo_b.weight",
    ),
    "one more": (lambda: edited() | {"layers.3.attn.wo_a.weight": torch.zeros(2)}, "layers.3.attn.wo_a.weight"),
    "a dtype": (
        lambda: edited() | {"layers.3.attn.wo_b.weight": edited()["layers.3.attn.wo_b.weight"].to(torch.bfloat16)},
        "layers.3.attn.wo_b.weight (is BF16",
    ),
    "a shape": (
        lambda: edited() | {"layers.3.attn.wo_b.weight": edited()["layers.3.attn.wo_b.weight"][:-32].clone()},
        "layers.3.attn.wo_b.weight (is F8_E4M3",
    ),
    "a layer too far": (
        lambda: edited() | {"layers.77.attn.wo_b.weight": torch.zeros(2)},
        "1 not known to this model: layers.77.attn.wo_b.weight",
    ),
    "another model's": (lambda: {"model.layers.3.o_proj.weight": torch.zeros(2)}, "no layers.N.attn.wo_b"),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_file_is_refused_saying_what_is_wrong(tmp_path: Path, which: str) -> None:
    make, told = WRONG[which]
    save_file(make(), tmp_path / "wrong.safetensors")
    with pytest.raises(TensorError) as refused:
        open_checkpoint(Model(path=str(GOLDEN), served_name="m", overlay=str(tmp_path / "wrong.safetensors")))
    assert told in str(refused.value)
    assert "wrong.safetensors" in refused.value.where


def test_a_truncated_file_is_refused(overlay: Path) -> None:
    overlay.write_bytes(overlay.read_bytes()[:-10])
    with pytest.raises(TensorError, match="truncated"):
        open_checkpoint(Model(path=str(GOLDEN), served_name="m", overlay=str(overlay)))


def test_the_released_model_takes_its_published_layers_alone() -> None:
    """52 tensors: both of layers 10 to 35. A file that begins at 11 lacks two, one that ends at 36 holds two more; and
    a 53rd is one too many."""

    class Released:
        config = released_config()

        def spec(self, name: str) -> Any:
            return Checkpoint.open(GOLDEN).spec("layers.2.attn.wo_b." + name.rsplit(".", 1)[1])

        def under(self, overlay: Overlay) -> Overlay:
            return overlay

    like = Checkpoint.open(GOLDEN).tensors

    def file(layers: range) -> Overlay:
        kinds = ("weight", "scale")
        names = {f"layers.{n}.attn.wo_b.{kind}": like[f"layers.2.attn.wo_b.{kind}"] for n in layers for kind in kinds}
        return Overlay(Path("o"), "", names)

    found: Any = overlaid(Released(), file(REAL_LAYERS))  # type: ignore[arg-type]
    assert (len(found.replaces), found.points) == (52, "layers 10-35 attn.wo_b")
    more = {"layers.36.attn.wo_b.weight": like["layers.2.attn.wo_b.weight"]}
    one_more = Overlay(Path("o"), "", {**file(REAL_LAYERS).tensors, **more})
    assert len(one_more.tensors) == 53
    for wrong, told in (
        (file(range(11, 36)), "2 missing: layers.10"),
        (file(range(10, 37)), "2 not known to this model: layers.36"),
        (one_more, "tensors: 1 not known to this model: layers.36.attn.wo_b.weight$"),
    ):
        with pytest.raises(TensorError) as refused:
            overlaid(Released(), wrong)  # type: ignore[arg-type]
        assert re.search(told, refused.value.what)


def test_a_family_without_such_an_edit_refuses_one(overlay: Path) -> None:
    with pytest.raises(ConfigError, match="takes no overlay"):
        open_checkpoint(Model(path=str(GLM), served_name="m", overlay=str(overlay)))
