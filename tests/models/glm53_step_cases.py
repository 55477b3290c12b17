"""GLM-5.3's decode steps of fixed shape by kernels, against the CPU's: run by `test_glm53_steps.py` in Triton's
interpreter, and on a GPU, where they are captured too.

python tests/models/glm53_step_cases.py cpu|cuda [name of a case]"""

import dataclasses
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from kernels.device import INTERPRETED
from packers.shards import Checkpoint
from tests.models.rig import CPU, GLM, load_model, settings
from tided.experts.bank import ExpertBank
from tided.experts.checkpoint import described, source_of
from tided.experts.tables import DemandTap
from tided.models import runs
from tided.models.glm53 import load
from tided.models.glm53.family import Glm53Family
from tided.models.glm53.fused import FusedStep
from tided.models.own_experts import resident_bank
from tided.models.parallel import Alone, Group
from tided.settings import Engine

DEVICE = torch.device(sys.argv[1] if __name__ == "__main__" else "cpu")
EXL3 = GLM.parent / "exl3-checkpoint"
TOKENS = load_file(GLM / "golden_main.safetensors")["tokens"].long()
NEAR = 0.05
ALONE = Alone()
draw = torch.Generator().manual_seed(3)


def loaded(device: torch.device, fused: bool, path: Path = GLM, **cache: Any) -> Any:
    """With its drafter. `fused`: linear layers stay as they are stored, which the kernels want."""
    base = settings(path, pool_tokens=4096, context_tokens=512)
    asked = replace(base, cache=replace(base.cache, **cache), engine=Engine(device=device.type, draft="3"))
    with patch.object(load, "_is_widened", lambda _: not fused):
        if path == GLM:
            return load_model(path, config=asked, device=device)
        checkpoint = Checkpoint.open(path)
        return Glm53Family().load(checkpoint, asked, Alone(), trellises(checkpoint, device), device)


def trellises(checkpoint: Checkpoint, device: torch.device, group: Group = ALONE) -> ExpertBank:
    """Every expert resident, of several sizes."""
    family = Glm53Family()
    shape, record, names = (
        family.shape(checkpoint.config),
        family.expert_record(checkpoint, group.ranks),
        family.expert_names(checkpoint),
    )
    layers, experts = shape.moe_layers, shape.experts_per_layer
    mixed = described(checkpoint, names, record, layers, experts)
    assert mixed is not None
    bank = resident_bank(source_of(checkpoint, names, record, group.rank), mixed.record, layers, experts, device)
    return dataclasses.replace(bank, tap=DemandTap(32, layers, experts, device))


def error(got: Tensor, wanted: Tensor) -> float:
    assert torch.isfinite(got.float()).all()
    return float((got.float().cpu() - wanted.float().cpu()).norm() / wanted.float().norm())


def copied(model: Any, lane: Any, other: Any) -> Any:
    """The same context to the bit in another model."""
    pages = [(0, model.page_parts(lane, 0, len(lane.pages)))]
    return other.restore_lane(lane.index, lane.position, model.lane_parts(lane), pages)


def opened(reference: Any, model: Any, lengths: list[int]) -> tuple[list[Any], list[Any]]:
    mine = []
    for index, length in enumerate(lengths):
        mine.append(reference.open_lane(index))
        reference.prefill(mine[-1], TOKENS[:length], "none")
    return mine, [copied(reference, lane, model) for lane in mine]


def tokens(count: int) -> Tensor:
    return torch.randint(3, 500, (count,), generator=draw)


def check_contexts(reference: Any, lanes: list[Any], model: Any, others: list[Any]) -> None:
    """A row whose router chose otherwise is another one, and a page has its tokens in one row: of a hundred tokens
    one such is a tenth of the norm, where one written to a wrong place is 0.14."""
    for lane, other in zip(lanes, others, strict=True):
        assert lane.position == other.position
        wanted, got = reference.lane_parts(lane), model.lane_parts(other)
        wanted |= {f"page.{k}": v for k, v in reference.page_parts(lane, 0, len(lane.pages)).items()}
        got |= {f"page.{k}": v for k, v in model.page_parts(other, 0, len(other.pages)).items()}
        assert wanted.keys() == got.keys()
        for name, part in wanted.items():
            if part.numel() and part.dtype is not torch.uint8:
                rows = zip(got[name].flatten(0, -2), part.flatten(0, -2), strict=True)
                far = [error(*both) for both in rows if bool(both[1].any())]
                most = 2.5 * NEAR if name.startswith("page.") else NEAR
                assert statistics.median(far) < most, f"{name} of lane {lane.index}"


def demand(model: Any) -> tuple[Tensor, Tensor]:
    tap = model.bank.tap
    return tap.counts.cpu(), tap.totals.cpu()


def forget(*models: Any) -> None:
    for model in models:
        model.bank.tap.counts.zero_()
        model.bank.tap.totals.zero_()


def case_steps() -> None:
    """Contexts shorter and longer than what is chosen, in both forms of the cache."""
    for path, cache in ((GLM, {}), (GLM, {"dtype": "fp8"}), (EXL3, {"dtype": "fp8"})):
        reference, model = loaded(CPU, False, path, **cache), loaded(DEVICE, True, path, **cache)
        lanes, others = opened(reference, model, [3, 101] if INTERPRETED else [3, 60, 101])
        forget(reference, model)
        errors = list[float]()
        for _ in range(2 if INTERPRETED else 6):
            ids = tokens(len(lanes))
            wanted, got = reference.decode(lanes, ids), model.decode(others, ids)
            errors += [error(*rows) for rows in zip(got, wanted, strict=True)]
        print(f"  {path.name} {cache}: {[round(one, 4) for one in errors]}")
        assert statistics.median(errors) < NEAR  # a row whose router chooses otherwise is another one
        made = model.steps.prepared[len(lanes)]
        assert type(made.step) is FusedStep
        check_contexts(reference, lanes, model, others)
        mine, other = demand(reference), demand(model)
        assert (mine[0] - other[0]).abs().sum() <= mine[0].sum() / 2  # one rounding, other experts
        assert torch.equal(mine[1][:, 0], other[1][:, 0])


def case_blocks() -> None:
    """Several rows of a lane in one step are as many steps, to the bit, and rows taken back leave no trace."""
    reference, model = loaded(CPU, False), loaded(DEVICE, True)
    lanes, others = opened(reference, model, [125])
    twin = copied(reference, lanes[0], model)
    truth, wrong = tokens(5), tokens(2)
    stepped = torch.cat([model.decode([twin], truth[i : i + 1]) for i in range(5)])
    model.decode(others, torch.cat([truth[:2], wrong]), [4])
    model.keep(others[0], 2)
    rows = model.decode(others, truth[2:], [3])
    model.keep(others[0], 3)
    wanted = torch.cat([reference.decode(lanes, truth[i : i + 1]) for i in range(5)])
    far = [error(row, own) for row, own in zip(rows, wanted[2:], strict=True)]
    print(f"  {[round(one, 4) for one in far]}, from steps {error(rows, stepped[2:]):.1e}")
    assert torch.equal(rows, stepped[2:])
    assert statistics.median(far) < NEAR
    check_contexts(reference, lanes, model, others)  # what the drafter keeps is there too
    if DEVICE.type == "cuda":  # where its passes have all they need
        drafts = [
            one.propose(
                [lane], torch.tensor([9], device=one.norm.device), lambda _, logits: logits.argmax(-1)
            ).logits.clone()
            for one, lane in ((reference, lanes[0]), (model, others[0]), (model, twin))
        ]
        print(f"  drafts {error(drafts[1], drafts[0]):.4f}")
        assert torch.equal(drafts[1], drafts[2])


def case_company() -> None:
    """A row has the same bits alone, and in any company; so has its demand."""
    reference, model = loaded(CPU, False), loaded(DEVICE, True)
    lanes, others = opened(reference, model, [40, 9, 101])
    twin, ids = copied(reference, lanes[0], model), tokens(3)
    forget(model)
    alone = model.decode([twin], ids[:1])
    counted = demand(model)[0][0].clone()
    forget(model)
    beside = model.decode(others, ids)
    assert torch.equal(alone[0], beside[0])
    assert torch.equal(counted, demand(model)[0][0])


def case_waiting() -> None:
    """A step in two runs of as many rows, beside a request that may wait for experts: each lane has its own demand."""
    reference, model = loaded(CPU, False), loaded(DEVICE, True)
    _, others = opened(reference, model, [3, 5])
    bank, count = model.bank, 1 if INTERPRETED else runs.ROWS // 2 + 1
    object.__setattr__(bank, "urgent", SimpleNamespace(active=True, allowed=lambda *_: None))
    forget(model)
    with patch.object(runs, "ROWS", count):
        model.decode(others, tokens(2 * count), [count, count])
    found = bank.tap.counts.sum((1, 2)).tolist()
    print(f"  picks by lane: {found[:2]}")
    twins, ids = [copied(model, lane, model) for lane in others], tokens(2)
    beside = model.decode(others, ids)
    bank.urgent.active = False
    assert torch.equal(model.decode(twins, ids), beside), "a row that may wait has other bits"
    assert found[:2] == [count * model.shape.moe_layers * model.shape.top_k] * 2


def case_captured() -> None:
    """A replayed step has the bits of an eager one, whatever the lanes; its demand too."""
    if DEVICE.type != "cuda":
        return
    for cache in ({}, {"dtype": "fp8"}):
        reference = loaded(CPU, False, EXL3, **cache)
        eager, captured = loaded(DEVICE, True, EXL3, **cache), loaded(DEVICE, True, EXL3, **cache)
        eager.steps.captures = False
        lanes, own = opened(reference, eager, [3, 60, 101, 127])
        contexts = [copied(reference, lane, captured) for lane in lanes]
        forget(eager, captured)
        for which in ([0], [1, 2, 3], [0], [2, 0, 3], [1], [3, 2, 1], [0, 1, 2, 3], [3, 1, 0, 2]):
            ids = tokens(len(which))
            wanted, got = (
                one.decode([those[i] for i in which], ids) for one, those in ((eager, own), (captured, contexts))
            )
            assert torch.equal(wanted, got), f"lanes {which}"
        for counts in ([3, 1], [2, 2], [1, 3]):
            ids = tokens(4)
            for one, those in ((eager, own), (captured, contexts)):
                one.decode(those[:2], ids, counts)
                for lane, count in zip(those, counts, strict=False):
                    one.keep(lane, 1 + (count > 2))
        ids = tokens(4)
        assert torch.equal(eager.decode(own, ids), captured.decode(contexts, ids))
        for one, other in zip(own, contexts, strict=True):
            for name, part in eager.lane_parts(one).items():
                assert torch.equal(part, captured.lane_parts(other)[name]), name
            for name, part in eager.page_parts(one, 0, len(one.pages)).items():
                assert torch.equal(part, captured.page_parts(other, 0, len(other.pages))[name]), name
        for mine, other in zip(demand(eager), demand(captured), strict=True):
            assert torch.equal(mine, other)
        bank = captured.bank  # beside a request that may wait a step runs eagerly; graphs go on behind it
        object.__setattr__(bank, "urgent", SimpleNamespace(active=True, allowed=lambda *_: None))
        for active in (True, False):
            bank.urgent.active, ids = active, tokens(4)
            assert torch.equal(eager.decode(own, ids), captured.decode(contexts, ids))
        graphs = [made.captured for made in captured.steps.prepared.values()]
        assert all(graphs), "a number of rows was never captured"
        print(f"  {cache} row counts in graphs: {list(captured.steps.prepared)}")


CASES = {name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:] or CASES:
        print(name, flush=True)
        CASES[name]()
    print("ok")
