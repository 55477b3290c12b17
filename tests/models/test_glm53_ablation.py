"""Directions that are projected out at run time: the model is the one whose weights were edited, but for rounding."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from packers.ablation import write
from packers.shards import Checkpoint
from tided.engine.offline import logits, settings_of
from tided.errors import ConfigError, DataError, TensorError
from tided.models.families import open_checkpoint
from tided.models.glm53.ablation import Projection
from tided.settings import Model

GLM = Path(__file__).parents[1] / "golden" / "glm53"
DEEPSEEK = GLM.parent / "deepseek-v41"
IDS = list(range(5, 60))
CONFIG: dict[str, Any] = json.loads((GLM / "config.json").read_text("utf-8"))
HIDDEN, LAYERS = CONFIG["hidden_size"], range(CONFIG["num_hidden_layers"])
ATTENTION, SHARED, DENSE = "self_attn.o_proj.", "mlp.shared_experts.down_proj.", "mlp.down_proj."
EDITED = (0, LAYERS[-1])


def direction(layer: int) -> Tensor:
    found = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(layer), dtype=torch.float64)
    return found / found.norm()


def file(path: Path, alphas: dict[str, float], layers: tuple[int, ...] = EDITED) -> Path:
    write(path, [(layer, np.asarray(direction(layer)), alphas) for layer in layers])
    return path


def under(path: Path, numerics: str = "fp32") -> Any:
    settings = settings_of(GLM)
    return replace(settings, model=replace(settings.model, ablation=str(path), numerics=numerics))


def edited_checkpoint(directory: Path, parts: tuple[str, ...], alpha: float) -> Path:
    """Edited matrices are kept in fp32, but for routed experts, which are served in bf16."""
    shutil.copytree(GLM, directory)
    edited = 0
    for shard in directory.glob("*.safetensors"):
        if not shard.name.startswith("model"):
            continue
        tensors = load_file(shard)
        for name, weight in tensors.items():
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
            if layer in EDITED and any(part in name for part in parts):
                d, dtype = direction(layer), torch.bfloat16 if ".experts." in name else torch.float32
                tensors[name] = (weight.double() - alpha * d[:, None] * (d @ weight.double())).to(dtype)
                edited += 1
        save_file(tensors, shard)
    assert edited
    return directory


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


CASES: dict[str, Any] = {  # the points of the file, the matrices of the edited checkpoint, what rounding explains
    "attention": ({"attention": 3.0}, (ATTENTION,), 1e-4),
    "with the shared expert": ({"attention": 2.0, "shared": 2.0}, (ATTENTION, SHARED, DENSE), 1e-4),
    "with routed experts": ({"attention": 1.0, "mlp": 1.0}, (ATTENTION, "down_proj."), 1e-2),  # kept as bf16
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_at_run_time_as_in_the_weights(tmp_path: Path, case: str, ranks: int) -> None:
    alphas, parts, tolerance = CASES[case]
    found = logits(under(file(tmp_path / "d.safetensors", alphas)), IDS, ranks=ranks, decode=3)
    alpha = next(iter(alphas.values()))
    wanted = logits(edited_checkpoint(tmp_path / "edited", parts, alpha), IDS, ranks=ranks, decode=3, numerics="fp32")
    stock = logits(GLM, IDS, ranks=ranks, decode=3, numerics="fp32")
    assert error(found, wanted) < tolerance
    assert error(stock, wanted) > 20 * tolerance


def test_each_point_of_one_projection() -> None:
    """alpha 1 takes the direction out, 2 mirrors it, 0 changes nothing; a row does not depend on its company."""
    d, y = direction(1).float(), torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9))
    assert (Projection(d, 1.0)(y) @ d).abs().max() < 1e-5
    assert torch.allclose(Projection(d, 2.0)(y) @ d, -(y @ d), atol=1e-5)
    assert Projection(d, 0.0)(y).equal(y)
    assert Projection(d, 1.5)(y)[2:3].equal(Projection(d, 1.5)(y[2:3].clone()))


class Summed(TorchDispatchMode):
    """The shapes of what is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "sum" in str(func):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_a_row_of_a_step_does_not_depend_on_its_company(rows: int) -> None:
    """Alone and beside others the same bits; and on devices where the order of a sum depends on its shape there is one
    shape."""
    wide = torch.Generator().manual_seed(rows)
    d, y = torch.randn(6144, generator=wide), torch.randn(rows, 6144, generator=wide)
    edit = Projection(d / d.norm(), 1.5)
    with Summed() as summed:
        together = edit(y)
    assert summed.shapes == [(1, 6144)] * rows
    for row in range(rows):
        assert edit(y[row : row + 1].clone()).equal(together[row : row + 1])


def test_the_drafter_is_left_alone_and_its_layer_is_none_of_the_file_s(tmp_path: Path) -> None:
    path = file(tmp_path / "d.safetensors", {"attention": 1.0}, (len(LAYERS),))
    with pytest.raises(TensorError, match=f"no tensor of an ablation of {len(LAYERS)} layers"):
        open_checkpoint(Model(path=str(GLM), served_name="m", ablation=str(path)))


def tensors() -> dict[str, Tensor]:
    return {"layers.1.direction": direction(1).float(), "layers.1.attention": torch.tensor([1.0])}


WRONG = {
    "no direction": (tensors() | {"layers.2.mlp": torch.ones(1)}, "layers.2 needs a direction"),
    "no point": (tensors() | {"layers.2.direction": direction(2).float()}, "layers.2 needs a direction and a point"),
    "two points that overlap": (
        tensors() | {"layers.1.mlp": torch.ones(1), "layers.1.shared": torch.ones(1)},
        "layers.1 names mlp, which holds shared",
    ),
    "another point": (tensors() | {"layers.1.head": torch.ones(1)}, "layers.1.head is no tensor"),
    "another width": (tensors() | {"layers.1.direction": torch.ones(HIDDEN + 1)}, "must be F32 ["),
    "another dtype": (tensors() | {"layers.1.direction": direction(1)}, "is F64"),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_file_is_refused_saying_what_is_wrong(tmp_path: Path, which: str) -> None:
    made, told = WRONG[which]
    save_file(made, tmp_path / "wrong.safetensors")
    with pytest.raises(TensorError) as refused:
        open_checkpoint(Model(path=str(GLM), served_name="m", ablation=str(tmp_path / "wrong.safetensors")))
    assert told in str(refused.value)


@pytest.mark.parametrize(
    "change", [{"layers.1.direction": torch.ones(HIDDEN)}, {"layers.1.attention": torch.tensor([float("nan")])}]
)
def test_numbers_that_are_no_projection_are_refused(tmp_path: Path, change: dict[str, Tensor]) -> None:
    save_file(tensors() | change, tmp_path / "wrong.safetensors")
    with pytest.raises(DataError, match="length 1 and finite alphas"):
        logits(under(tmp_path / "wrong.safetensors"), IDS[:4])


def test_what_is_told_of_it(tmp_path: Path) -> None:
    path = file(tmp_path / "d.safetensors", {"attention": 3.0, "shared": 2.5})
    opened = open_checkpoint(Model(path=str(GLM), served_name="m", ablation=str(path)))
    assert opened.overlay
    assert opened.overlay.points == f"2 layers (0-{LAYERS[-1]}), attention, shared, alpha 2.500-3.000"
    assert opened.served_identity() != Checkpoint.open(GLM).served_identity()


def test_another_family_and_two_edits_are_refused(tmp_path: Path) -> None:
    path = str(file(tmp_path / "d.safetensors", {"attention": 1.0}))
    with pytest.raises(ConfigError, match="takes no projection"):
        open_checkpoint(Model(path=str(DEEPSEEK), served_name="m", ablation=path))
    with pytest.raises(ConfigError, match="only one edit"):
        open_checkpoint(Model(path=str(GLM), served_name="m", ablation=path, overlay=path))
