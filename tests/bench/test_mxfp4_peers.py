"""Other people's kernels get our weights as they are, and one that computes something else is no peer."""

from pathlib import Path
from zipfile import ZipFile, ZipInfo

import pytest
import torch
from torch import Tensor

from bench import gpu_experts
from bench.mxfp4_peers import Humming, Layer, by_expert, in_parts, layer_of, unpack
from kernels.experts import decode
from kernels.experts_triton import Tiles
from kernels.formats import fp4_rows
from kernels.record import ExpertRecord

RECORD = ExpertRecord(64, 128, 2)


def slots(count: int) -> Tensor:
    made = torch.randint(
        0, 256, (count, RECORD.slot_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    for part in RECORD.parts[3:]:
        made[:, part.offset : part.offset + part.nbytes] = 120
    return made


def test_a_layer_is_what_the_records_hold():
    held = slots(3)
    layer = layer_of(held, RECORD, 2, 10.0)
    for expert in range(3):
        w13, w2 = decode(held[expert], RECORD)
        assert torch.equal(fp4_rows(layer.w13[expert], layer.s13[expert]), w13)
        assert torch.equal(fp4_rows(layer.w2[expert], layer.s2[expert]), w2)


@pytest.mark.parametrize("change", [lambda part: part * 2, lambda part: (part.mT.contiguous() * 2).mT])
def test_a_layout_changed_in_parts_is_that_of_the_whole(change):
    whole = torch.randn(70, 4, 6)
    found = in_parts(change, whole)
    assert torch.equal(found, change(whole))
    assert found.stride() == change(whole).stride()


def test_picks_by_expert_are_in_their_order():
    order, counts = by_expert(torch.tensor([[3, 1], [1, 0]]), 5)
    assert (order.tolist(), counts.tolist()) == ([3, 1, 2, 0], [1, 2, 0, 1, 0])


def test_blocks_of_one_expert_are_padded_with_the_number_of_all_picks():
    peer = Humming.__new__(Humming)
    peer._layer = layer_of(slots(5), RECORD, 2, 10.0)
    peer._tile = lambda product, rows: [0, 9, {"block_shape": [(2, 3)[product], 128, 64]}]  # type: ignore[method-assign]
    peer._rounded = lambda product, rows: (rows, None)  # type: ignore[method-assign,assignment]
    picks = torch.tensor([[3, 1], [1, 0], [1, 3]], dtype=torch.int32)
    _, (first, second), _, _, _ = peer.ready(torch.zeros(3, 64).bfloat16(), picks, torch.rand(3, 2))
    assert first["sorted_ids"].tolist() == [3, 6, 1, 2, 4, 6, 0, 5]
    assert first["expert_ids"].tolist() == [0, 1, 1, 3]
    assert second["sorted_ids"].tolist() == [3, 6, 6, 1, 2, 4, 0, 5, 6]
    assert (second["expert_ids"].tolist(), second["num_tokens_padded"].tolist()) == ([0, 1, 3], [9])


def test_programs_of_a_wheel_may_be_run(tmp_path: Path):
    program = ZipInfo("a/run")
    program.external_attr = 0o755 << 16
    with ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr(program, "x")
        archive.writestr("a/text", "x")
    unpack(tmp_path / "a.whl", tmp_path)
    assert [bool((tmp_path / "a" / name).stat().st_mode & 0o111) for name in ("run", "text")] == [True, False]


class Told:
    what = "nothing"

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def ready(self, x: Tensor, picks: Tensor, weights: Tensor) -> Tensor:
        return x

    def __call__(self, ready: Tensor) -> Tensor:
        if self._factor == 0:
            raise RuntimeError("first line\nno kernel image")
        return ready * self._factor


def test_who_computes_something_else_or_fails_is_left_out_aloud(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    x = torch.randn(2, 64)
    peers = {"right": Told(2.0), "wrong": Told(3.0), "failing": Told(0)}
    kept = gpu_experts.right(peers, x, torch.zeros(2, 1), torch.zeros(2, 1), 2 * x)
    said = capsys.readouterr().out
    assert list(kept) == ["right"]
    assert "wrong: computes something else" in said
    assert "failing: 2 rows: does not run here: RuntimeError: no kernel" in said


def test_our_forms_are_held_to_the_same(capsys, monkeypatch):
    def computed(x: Tensor, *_: object, tiles: Tiles | None) -> Tensor:
        if tiles is None:
            raise RuntimeError("out of resource")
        return x * tiles.half / 16

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_experts.experts_triton, "grouped_experts", computed)
    x, given = torch.randn(2, 64), (torch.zeros(2, 1), [torch.zeros(2, 1)], torch.zeros(2, 1))
    works = gpu_experts.ours(x, *given, {"right": Tiles(), "wrong": Tiles(half=64)}, 2 * x)
    assert list(works) == ["right"], "who fails or computes something else is timed"
    assert "ours: 2 rows: does not run here" in capsys.readouterr().out
    assert gpu_experts.times_ours({"right": [2.0]}, [2.0]) == "ours did not run"
    assert gpu_experts.times_ours({"ours": [4.0]}, [2.0]) == "0.50"


def test_a_fault_of_the_device_ends_the_run(monkeypatch):
    def fault() -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", fault)
    with pytest.raises(RuntimeError, match="illegal"):
        gpu_experts.sound("one", 1, lambda: torch.ones(1), torch.ones(1))


def test_who_cannot_be_made_is_said(capsys):
    def make(layer: Layer) -> Told:
        raise ModuleNotFoundError("No module named 'triton_kernels'")

    peers = gpu_experts.made(
        [("missing", make), ("there", lambda layer: Told(1.0))], layer_of(slots(1), RECORD, 1, 1.0)
    )
    said = capsys.readouterr().out
    assert list(peers) == ["there"]
    assert "missing: does not run here: ModuleNotFoundError: No module named 'triton_kernels'" in said


def test_the_exact_sum_is_that_of_the_products(monkeypatch):
    monkeypatch.setattr(gpu_experts, "RECORD", RECORD)
    held, x = slots(4), torch.randn(3, 64)
    picks, weights = torch.tensor([[0, 2], [2, 3], [1, 0]]), torch.rand(3, 2)
    for row in range(3):
        total = torch.zeros(64)
        for k in range(2):
            w13, w2 = decode(held[picks[row, k]], RECORD)
            gate, up = (w13 @ x[row]).chunk(2)
            gate, up = gate.clamp(max=10.0), up.clamp(-10.0, 10.0)
            total += weights[row, k] * (w2 @ (gate / (1 + torch.exp(-gate)) * up))
        torch.testing.assert_close(gpu_experts.exact(x, held, picks, weights)[row], total, rtol=1e-4, atol=1e-4)
