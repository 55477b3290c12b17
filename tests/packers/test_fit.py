"""Known edits of a small checkpoint are recovered, over a hub that fails at random; and what is none is refused."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from hub_server import Hub, serving
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import save_file
from torch import Tensor

from packers.fit import Found, Local, Work, _matrix, fit_layer, layers_of
from packers.fit import Hub as HubSource
from packers.hub import Repository
from packers.rank_one import rank_one
from packers.shards import Checkpoint
from tidectl import fit as command
from tided.errors import DataError, UnavailableError, UsageError

HIDDEN, INNER, HEADS, LAYERS, EXPERTS = 256, 128, 384, 4, 3
DENSE = 1  # layers without experts


def base_tensors(seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=made) / 16).to(torch.bfloat16)

    found = {"model.embed_tokens.weight": matrix(64, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found[f"{at}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS)
        experts = ["mlp.shared_experts", *(f"mlp.experts.{e}" for e in range(EXPERTS))] if layer >= DENSE else ["mlp"]
        for part in experts:
            found[f"{at}.{part}.down_proj.weight"] = matrix(HIDDEN, INNER)
            found[f"{at}.{part}.up_proj.weight"] = matrix(INNER, HIDDEN)
    return found


def direction(layer: int) -> Tensor:
    found = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(100 + layer), dtype=torch.float64)
    return found / found.norm()


def edited(tensors: dict[str, Tensor], layers: list[int], parts: tuple[str, ...], alpha: float) -> dict[str, Tensor]:
    found = dict(tensors)
    for name, weight in tensors.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        if layer and int(layer) in layers and any(part in name for part in parts):
            d = direction(int(layer))
            found[name] = (weight.double() - alpha * d[:, None] * (d @ weight.double())).to(torch.bfloat16)
    return found


def save(path: Path, tensors: dict[str, Tensor]) -> Path:
    """In three shards with an index, as releases come."""
    path.mkdir()
    names, index = sorted(tensors), {}
    for at in range(3):
        file = f"model-{at + 1:05}-of-00003.safetensors"
        index |= dict.fromkeys(names[at::3], file)
        save_file({name: tensors[name] for name in names[at::3]}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (path / "config.json").write_text('{"model_type": "some"}')
    return path


ATTENTION, SHARED = "self_attn.o_proj", "mlp.shared_experts.down_proj"
EDITS: dict[str, Any] = {  # the parts, the points, alphas
    "attention only": ((ATTENTION,), {"attention"}),
    "with the shared expert": ((ATTENTION, SHARED, ".mlp.down_proj"), {"attention", "shared"}),
    "with routed experts": ((ATTENTION, "down_proj"), {"attention", "mlp"}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("fit") / "base", base_tensors())


def work(base: Path, other: Path, folder: Path) -> Work:
    return Work(Local(base), Local(other), folder, lambda *_: None)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("which", EDITS)
def test_a_known_edit_is_recovered(base: Path, tmp_path: Path, which: str, alpha: float) -> None:
    parts, points = EDITS[which]
    other = save(tmp_path / "edited", edited(base_tensors(), [1, 3], parts, alpha))
    found = {layer: fit_layer(work(base, other, tmp_path), layer) for layer in layers_of(Local(base))}
    assert [layer for layer, edit in found.items() if edit] == [1, 3]
    for layer in (1, 3):
        edit = found[layer]
        assert edit is not None
        assert abs(np.array(edit.direction) @ direction(layer).numpy()) >= 0.9999
        assert set(edit.alphas) == points
        assert all(abs(one / alpha - 1) < 0.01 for one in edit.alphas.values())
        assert all(share > 0.99 for share in edit.explained.values())
    assert not list(tmp_path.glob("*.part"))


def test_a_dense_layer_s_mlp_is_its_shared_point(base: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "edited", edited(base_tensors(), [0], ("mlp.down_proj",), 1.0))
    edit = fit_layer(work(base, other, tmp_path), 0)
    assert edit is not None
    assert set(edit.alphas) == {"shared"}


def two_directions(name: str, weight: Tensor) -> Tensor:
    both = [direction(7), direction(8)]
    return (weight.double() - sum(d[:, None] * (d @ weight.double()) for d in both)).to(torch.bfloat16)


def fine_tuned(name: str, weight: Tensor) -> Tensor:
    return (weight.float() + 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))).bfloat16()


@pytest.mark.parametrize("change", [two_directions, fine_tuned])
def test_what_is_no_edit_of_one_direction_is_refused(base: Path, tmp_path: Path, change: Any) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"
    tensors = base_tensors()
    other = save(tmp_path / "edited", tensors | {name: change(name, tensors[name])})
    with pytest.raises(DataError, match="not that of one direction") as refused:
        fit_layer(work(base, other, tmp_path), 2)
    assert refused.value.where == name


def test_routed_experts_edited_alone_are_refused(base: Path, tmp_path: Path) -> None:
    stock, shared = base_tensors(), "model.layers.2.mlp.shared_experts.down_proj.weight"
    other = save(tmp_path / "edited", edited(stock, [2], ("down_proj",), 1.0) | {shared: stock[shared]})
    with pytest.raises(DataError, match=r"routed experts by 1\.000, the shared one by None"):
        fit_layer(work(base, other, tmp_path), 2)


def test_matrices_of_two_directions_are_refused(base: Path, tmp_path: Path) -> None:
    tensors = edited(base_tensors(), [2], (ATTENTION,), 1.0)
    name = "model.layers.2.mlp.shared_experts.down_proj.weight"
    d = direction(50)
    tensors[name] = (tensors[name].double() - d[:, None] * (d @ tensors[name].double())).to(torch.bfloat16)
    other = save(tmp_path / "edited", tensors)
    with pytest.raises(DataError, match="more than one direction"):
        fit_layer(work(base, other, tmp_path), 2)


def use(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_ENDPOINT does for a new process."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def opened(address: str, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[Repository]:
    use(address, monkeypatch)
    return [Repository.open(name, sleep=lambda _: None) for name in names]


def test_over_a_hub_that_fails_nothing_is_fetched_twice(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes: those of the tensors that differ, samples of those that might, headers and index; 2 % more at most."""
    other = save(tmp_path / "edited", edited(base_tensors(), [1, 3], (ATTENTION, SHARED), 3.0))
    hub = Hub({"some/base": base, "some/edited": other}, failures=0.4, seed=3)
    monkeypatch.setattr("packers.hub.PART_BYTES", 1 << 14)
    with serving(hub) as address:
        sources = [HubSource(one) for one in opened(address, monkeypatch, "some/base", "some/edited")]
        got = [
            fit_layer(Work(*sources, tmp_path, lambda *_: None), layer)  # type: ignore[arg-type]
            for layer in layers_of(sources[0])  # type: ignore[arg-type]
        ]
    assert hub.failed > 20
    assert [bool(edit) for edit in got] == [False, True, False, True]
    fetched = sum(source.fetched_bytes for source in sources)
    assert fetched == hub.sent_bytes
    assert fetched < 1.02 * needed_bytes(base, other)


def needed_bytes(*paths: Path) -> int:
    """Of both checkpoints: index, headers, the matrices that were edited, and three samples of each that could be."""
    total = 0
    for path in paths:
        checkpoint = Checkpoint.open(path)
        total += (path / "model.safetensors.index.json").stat().st_size
        total += sum(shard.data_offset for shard in checkpoint.shards)
        for layer in range(LAYERS):
            shared = "mlp.shared_experts" if layer >= DENSE else "mlp"
            parts = [ATTENTION, f"{shared}.down_proj", *(["mlp.experts.0.down_proj"] if layer >= DENSE else [])]
            names = [f"model.layers.{layer}.{part}.weight" for part in parts]
            total += 3 * 2048 * len(names)
            total += sum(checkpoint.tensors[name].nbytes for name in names[:2]) if layer in (1, 3) else 0
    return total


def test_a_hub_that_stays_away_is_told_and_the_next_run_goes_on(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = save(tmp_path / "edited", edited(base_tensors(), [1, 3], (ATTENTION, SHARED), 2.0))
    hub = Hub({"some/base": base, "some/edited": other})
    out = tmp_path / "found.safetensors"
    monkeypatch.setattr("packers.hub.PART_BYTES", 1 << 14)
    monkeypatch.setattr("packers.hub.LONGEST_WAIT_S", 0.0)
    fate = hub.fate

    def fit_until(bytes_left: int) -> None:
        sent = hub.sent_bytes
        monkeypatch.setattr(hub, "fate", lambda: "refused" if hub.sent_bytes - sent > bytes_left else fate())
        command.run("some/base", "some/edited", out, "", as_json=True)

    with serving(hub) as address:
        use(address, monkeypatch)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="503"):
                fit_until(400_000)
            assert not out.exists()
        fit_until(10_000_000)
    assert sorted(load_numpy(out)) == sorted(
        f"layers.{layer}.{part}" for layer in (1, 3) for part in ("direction", "attention", "shared")
    )
    # A run that ended costs headers, samples, and of its layer the matrices that had been compared: not the others.
    assert hub.sent_bytes < 1.9 * needed_bytes(base, other)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("some/none", "is not there"),
        ("no repository", "is no repository"),
        ("some/base@main", ""),
    ],
)
def test_what_is_asked_for(base: Path, monkeypatch: pytest.MonkeyPatch, names: str, told: str) -> None:
    hub = Hub({"some/base": base})
    with serving(hub) as address:
        use(address, monkeypatch)
        if not told:
            assert Repository.open(names).tensor("model.embed_tokens.weight").shape == (64, HIDDEN)
            return
        with pytest.raises(DataError, match=told):
            Repository.open(names)


def test_a_closed_repository_says_what_to_do(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub({"some/base": base})
    with serving(hub) as address:
        (repository,) = opened(address, monkeypatch, "some/base")
        hub.token = "secret"
        with pytest.raises(DataError, match="HF_TOKEN"):
            repository.tensor("model.embed_tokens.weight")
        monkeypatch.setenv("HF_TOKEN", "secret")
        assert repository.tensor("model.embed_tokens.weight").dtype == "BF16"


def test_a_hub_without_ranges_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub({"some/base": base})
    with serving(hub) as address:
        (repository,) = opened(address, monkeypatch, "some/base")
        hub.whole_files = True
        with pytest.raises(DataError, match="whole files only"):
            repository.tensor("model.embed_tokens.weight")


def test_a_name_that_is_neither_a_directory_nor_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Hub({})) as address:
        use(address, monkeypatch)
        with pytest.raises(DataError, match="no directory minis/nowhere either"):
            command.run("minis/nowhere", "minis/nowhere", tmp_path / "out", "", as_json=True)
    use("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(UnavailableError, match="the hub does not answer"):
        command.run("minis/nowhere", "minis/nowhere", tmp_path / "out", "", as_json=True)


def test_layers_that_there_are_not(base: Path, tmp_path: Path) -> None:
    for layers, told in (("x", "neither a layer"), ("7-9", "layers 0 to 3")):
        with pytest.raises(UsageError, match=told):
            command.run(str(base), str(base), tmp_path / "out", layers, as_json=True)


def test_a_drafter_s_layer_is_not_looked_at(tmp_path: Path) -> None:
    tensors = base_tensors() | {f"model.layers.{LAYERS - 1}.eh_proj.weight": torch.zeros(2, 2)}
    assert layers_of(Local(save(tmp_path / "drafting", tensors))) == list(range(LAYERS - 1))


def test_two_checkpoints_that_are_one(base: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="do not differ"):
        command.run(str(base), str(base), tmp_path / "out.safetensors", "", as_json=True)


def test_only_some_layers(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = save(tmp_path / "edited", edited(base_tensors(), [1, 3], (ATTENTION,), 1.0))
    command.run(str(base), str(other), tmp_path / "out.safetensors", "2-3", as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in said["layers"]] == [3]
    assert said["fetched_bytes"] == 0


def test_of_an_earlier_run_only_the_layers_that_are_asked_for_count(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, out = save(tmp_path / "edited", edited(base_tensors(), [1, 3], (ATTENTION,), 1.0)), tmp_path / "out"
    with monkeypatch.context() as broken:
        broken.setattr(command, "write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            command.run(str(base), str(other), out, "1", as_json=True)
    command.run(str(base), str(other), out, "2-3", as_json=True)
    assert sorted(load_numpy(out)) == ["layers.3.attention", "layers.3.direction"]


def test_one_run_at_a_time(base: Path, tmp_path: Path) -> None:
    other, out = save(tmp_path / "edited", edited(base_tensors(), [1], (ATTENTION,), 1.0)), tmp_path / "out"
    with command._working(tmp_path / ".out.work"), pytest.raises(UnavailableError, match="another run"):
        command.run(str(base), str(other), out, "", as_json=True)
    command.run(str(base), str(other), out, "", as_json=True)
    assert [path.name for path in tmp_path.glob(".out*")] == []


def test_a_file_that_was_cut_meanwhile(base: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ends before this tensor does"):
        _matrix(work(base, base, tmp_path), Cut(), Local(base).tensor("model.layers.1.self_attn.o_proj.weight"))


class Cut:
    """A source that has one byte, and then nothing."""

    label, fetched_bytes = "cut", 0

    def read(self, info: Any, begin: int, end: int) -> Any:
        return iter([b"x"] if begin == 0 else [])


def exact(name: str, weight: Tensor) -> Tensor:
    d = direction(2).float()
    return weight - d[:, None] * (d @ weight)


def touched(name: str, weight: Tensor) -> Tensor:
    found = exact(name, weight)
    found[17, 5] += 0.01
    return found


@pytest.mark.parametrize(("change", "holds"), [(exact, True), (touched, False)])
def test_matrices_in_fp32_are_judged_by_their_own_rounding(change: Any, holds: bool) -> None:
    for seed in range(10):
        weight = torch.randn(HIDDEN, HEADS, generator=torch.Generator().manual_seed(seed)) / 16
        found = rank_one(weight.numpy(), change("", weight).numpy(), 23)
        assert found.holds is holds
        assert found.explained <= 1 + 1e-12


def test_another_s_leftovers_are_not_used(base: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "edited", edited(base_tensors(), [1], (ATTENTION,), 1.0))
    folder = tmp_path / ".out.safetensors.work"
    folder.mkdir()
    (folder / "00.part").write_bytes(b"of another run")
    wrong = command.Kept("a", "b", {1: Found(1, [1.0], {"attention": 9.0}, {})})
    command._keep(folder, wrong)
    command.run(str(base), str(other), tmp_path / "out.safetensors", "1", as_json=True)
    assert load_numpy(tmp_path / "out.safetensors")["layers.1.attention"][0] == pytest.approx(1.0, rel=0.01)
