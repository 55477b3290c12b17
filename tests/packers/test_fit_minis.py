"""`tidectl fit` on the trained matrices of both minis, in bf16 as releases are, over a hub that fails at random: known
edits of any choice of points and any strength are recovered, and little is fetched that was not needed."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hub_server import Hub, serving
from safetensors.numpy import load_file
from test_fit import use

from packers.fit import POINTS, SAMPLE_BYTES, SAMPLES, Local, layers_of
from packers.shards import Checkpoint
from tests.bundled import DEEPSEEK, GLM, MINIS, Mini
from tests.edits import INDEX, direction, glm_change, released_layout, rewritten
from tidectl import fit as command
from tided.errors import DataError

LAYERS = (2, 7)
CHOICES = (("attention",), ("attention", "shared"), ("attention", "mlp"))
CASES = [(points, alpha) for points in CHOICES for alpha in (0.5, 3.0)] + [(CHOICES[2], 1.0)]


@pytest.fixture(scope="module", params=MINIS, ids=str)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released_layout(request.param, tmp_path_factory.mktemp("base") / "base")


def is_edited(name: str, points: Iterable[str]) -> bool:
    of = "routed" if ".experts." in name else "attention" if "o_proj" in name else "shared"
    return of in points or (of != "attention" and "mlp" in points)


def looked_at(checkpoint: Checkpoint, layer: int) -> list[str]:
    """The matrices that tell whether a layer was edited."""
    names = [[f"model.layers.{layer}.{part}" for part in parts] for parts in POINTS.values()]
    return [found[0] for parts in names if (found := [name for name in parts if name in checkpoint.tensors])]


def needed_bytes(paths: Iterable[Path], points: Iterable[str]) -> int:
    """Of both: index, headers, samples of what could be edited, and all of what was."""
    total = 0
    for path in paths:
        checkpoint = Checkpoint.open(path)
        total += (path / INDEX).stat().st_size + sum(shard.data_offset for shard in checkpoint.shards)
        for layer in layers_of(Local(path)):
            names = looked_at(checkpoint, layer)
            total += SAMPLES * SAMPLE_BYTES * len(names)
            whole = [name for name in names if layer in LAYERS and is_edited(name, points)]
            total += sum(checkpoint.tensors[name].nbytes for name in whole)
    return total


@pytest.mark.parametrize(("points", "alpha"), CASES)
def test_a_known_edit_is_recovered_from_a_hub_that_fails(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    points: tuple[str, ...],
    alpha: float,
) -> None:
    other, out = (
        rewritten(base, tmp_path / "edited", glm_change({n: direction(n) for n in LAYERS}, points, alpha)),
        tmp_path / "found.safetensors",
    )
    hub = Hub({"some/base": base, "some/edited": other}, failures=0.3, seed=int(2 * alpha))
    monkeypatch.setattr("packers.hub.PART_BYTES", 1 << 15)
    monkeypatch.setattr("packers.hub.LONGEST_WAIT_S", 0.0)
    with serving(hub) as address:
        use(address, monkeypatch)
        command.run("some/base", "some/edited", out, "", as_json=True)
    assert hub.failed > 10
    said, found = json.loads(capsys.readouterr().out), load_file(out)
    assert [row["layer"] for row in said["layers"]] == list(LAYERS)
    for row in said["layers"]:
        at = f"layers.{row['layer']}"
        assert abs(float(torch.from_numpy(found[f"{at}.direction"]).double() @ direction(row["layer"]))) >= 0.9999
        assert row["alphas"] == {point: pytest.approx(alpha, rel=0.01) for point in points}
        assert {point: float(found[f"{at}.{point}"][0]) for point in points} == pytest.approx(row["alphas"])
        assert min(row["explained"].values()) > 0.99
    assert said["fetched_bytes"] == hub.sent_bytes
    assert hub.sent_bytes < 1.02 * needed_bytes((base, other), points)


@pytest.mark.parametrize(
    ("mini", "told"), [(GLM, "fit unquantised checkpoints"), (DEEPSEEK, "only checkpoints of GLM-5.3's")]
)
def test_the_minis_as_they_are_stored_are_refused(mini: Mini, told: str, tmp_path: Path) -> None:
    """One stores its attention in FP8, the other is of another layout."""
    with pytest.raises(DataError) as refused:
        command.run(str(mini.path), str(mini.path), tmp_path / "out.safetensors", "", as_json=True)
    assert told in refused.value.hint
