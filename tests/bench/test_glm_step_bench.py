"""The benches of GLM-5.3 on a GPU, as far as a processor takes them: the model that is made up, the table of parts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import exl3_slots, gpu_exl3, gpu_glm
from kernels.exl3_record import Exl3Record, Stored
from kernels.experts import grouped_experts
from kernels.numerics import WEIGHTS_ONLY
from tided.engine import synthetic_shapes
from tided.models.glm53.released import released

ROWS, CONTEXT, RESIDENT = 2, 40, 24


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def narrow(*args: Any) -> dict[str, Any]:
        return released(*args) | {
            "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 4,
            "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16,
            "v_head_dim": 32, "index_n_heads": 2, "index_head_dim": 64, "index_topk": 32,
            "max_position_embeddings": 1024,
        }  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic_shapes.glm53, "released", narrow)
        one = gpu_glm.made(tmp_path_factory.mktemp("glm") / "made", 5, 16, RESIDENT, CONTEXT, ROWS, "cpu")
        one.model.steps.everywhere = True
        yield one


def test_a_step_of_it_computes(small: Any) -> None:
    lanes, ids = gpu_glm.prepared(small.model, ROWS, CONTEXT)
    with torch.inference_mode():
        rows = small.model.decode(lanes, ids)
    assert torch.isfinite(rows).all()
    assert float(rows.std()) > 0.1
    assert not rows[0].equal(rows[1])
    for lane in lanes:
        small.model.close_lane(lane)


def test_its_parts_make_the_step(small: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each part takes time, none counts twice, and they are told; methods are what they were afterwards."""
    lanes, ids = gpu_glm.prepared(small.model, ROWS, CONTEXT)
    with torch.inference_mode():
        small.model.decode(lanes, ids)
    step = small.model.steps.prepared[ROWS]
    before = {part: getattr(*where) for part, where in gpu_glm.owners(step.step).items()}
    parts = gpu_glm.parts_us(small.model, step, 2)
    for lane in lanes:
        small.model.close_lane(lane)
    assert {part: getattr(*where) for part, where in gpu_glm.owners(step.step).items()} == before
    assert parts.keys() == {*before, "other"}
    assert min(parts.values()) > 0
    took = gpu_glm.times(small, ROWS, CONTEXT, 4)
    assert took.rows == ROWS
    assert min(took.whole, took.host, took.eager) > 0
    gpu_glm.table(small, took, CONTEXT, 4, 100.0)
    told = capsys.readouterr().out
    assert f"graph 0.00 ms of 0 nodes; eager {took.eager:.2f} ms" in told  # a processor has no graph
    assert f"{ROWS} rows, 5 layers, {CONTEXT} tokens of context" in told
    assert all(f"    {part:16}" in told for part in parts)
    assert small.bank.tables.routable.sum() <= RESIDENT + 4


def test_what_must_be_read_counts_distinct_experts_once(small: Any) -> None:
    """One row reads top-8 of each layer; many rows all that are resident."""
    kinds = small.opened.kinds
    mean = sum(kinds.nbytes[kind] for kind in kinds.of.ravel()) / kinds.of.size
    one, many = (gpu_glm.read_bytes(small, rows)["experts"] for rows in (1, 1000))
    assert one == pytest.approx(2 * 8 * mean)
    assert many == pytest.approx(int(small.bank.tables.routable.sum()) * mean)


def test_experts_of_random_words_are_experts() -> None:
    """Of every mix, in the order of their kinds; rows stay near one."""
    for mix in gpu_exl3.MIXES:
        stored = gpu_exl3.stored_of(mix, 16)
        record = gpu_exl3.record_of(stored, 1, 128, 128)
        slots, begins = exl3_slots.filled(record, stored, torch.device("cpu"))
        assert stored == sorted(stored)
        (sets, *_) = [gpu_exl3.picked(2, 16, torch.device("cpu"))]
        picks = torch.tensor(begins)[sets[0]].to(torch.int32)
        x = WEIGHTS_ONLY.store(torch.randn(2, 128, generator=torch.Generator().manual_seed(1)))
        out = grouped_experts(x, slots, record, picks, torch.full((2, 8), 1 / 8), math.inf, WEIGHTS_ONLY)
        assert torch.isfinite(out).all()
        assert 0.01 < float(out.std()) < 10


def test_mixed_widths_are_those_of_the_model_on_average() -> None:
    stored = gpu_exl3.stored_of("mixed, 2.75", 256)
    assert sum(sum(one.half_bits) for one in stored) / (6 * 256) == pytest.approx(2.75)
    assert all(one.half_bits[0] == one.half_bits[1] for one in stored), "the other kernel takes one width of both"


def test_the_other_kernel_is_given_the_places_of_the_same_bytes(tmp_path: Path) -> None:
    """Addresses of trellises and scales: what a record's own layout says."""
    from bench.exllamav3_kernel import _tables, written

    record, kind = Exl3Record(256, 128, 1), Stored((4, 4, 6), ("mcg", "mcg", "mcg"))
    tables = _tables(record, 1 << 20, [0, 7], kind)
    vectors = dict(
        zip(("gate suh", "up suh", "gate svh", "up svh", "down suh", "down svh"), record.offsets, strict=False)
    )
    first = [table[0] - (1 << 20) for table in tables]
    trellis = record.offsets[-1]
    assert first[1::3] == [vectors["gate suh"], vectors["up suh"], vectors["down suh"]]
    assert first[2::3] == [vectors["gate svh"], vectors["up svh"], vectors["down svh"]]
    assert first[0::3] == [trellis, trellis + 256 * 128 // 4, trellis + 256 * 128 // 2]
    assert all(table[1] - table[0] == 7 * 4096 for table in tables)
    names = [path.name for path in written(tmp_path / "native", tmp_path)]
    assert names == [
        "exl3_moe_coop.cu",
        "exl3_devctx.cu",
        "bindings.cpp",
        "others.cu",
        *(f"width_{k}.cu" for k in (2, 3, 4)),
    ]
    text = (tmp_path / "others.cu").read_text() + "".join((tmp_path / f"width_{k}.cu").read_text() for k in (2, 3, 4))
    assert all(text.count(f"kernel_{side}_k{k}(") == 1 for side in "ab" for k in range(1, 9)), "each answered once"
