"""Decode steps of fixed shape against the CPU's: run by `test_decode_steps.py` in Triton's interpreter, and on a GPU,
where they are captured too.

python tests/models/decode_cases.py cpu|cuda [name of a case]"""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.device import INTERPRETED
from kernels.hyper_triton import Mixed
from kernels.numerics import NATIVE
from packers.shards import Checkpoint
from tests.models.rig import CPU, GOLDEN, load_model, settings
from tided.models import runs
from tided.models.deepseek_v41 import load
from tided.models.deepseek_v41.load import with_drafter
from tided.models.deepseek_v41.step import Pass

DEVICE = torch.device(sys.argv[1] if __name__ == "__main__" else "cpu")
draw = torch.Generator().manual_seed(3)
NEAR = 0.05
# Where one row's one rounding falls to the other side, a model this small makes much of it: the bound that holds the
# CPU itself to the reference vectors.
FLIPPED = 0.25


def loaded(device: torch.device, packed: bool) -> Any:
    """The golden model, whose contexts pass its top-k and its candidate pool within a hundred tokens."""
    load.has_kernels = lambda _: packed
    config = settings(GOLDEN, pool_tokens=4096, context_tokens=512)
    model = load_model(GOLDEN, config=config, device=device)
    return with_drafter(model, Checkpoint.open(GOLDEN), device)


def error(got: Tensor, wanted: Tensor) -> float:
    assert torch.isfinite(got).all()
    return float((got.cpu() - wanted).norm() / wanted.norm())


def kept_pages(model: Any, lane: Any) -> list[tuple[int, dict[str, Tensor]]]:
    return [(0, model.page_parts(lane, 0, len(lane.pages)))]


def opened(reference: Any, model: Any, lengths: list[int]) -> tuple[list[Any], list[Any]]:
    """Lanes of the reference, and the same contexts to the bit in the model."""
    mine, others = [], []
    for index, length in enumerate(lengths):
        lane = reference.open_lane(index)
        reference.prefill(lane, torch.randint(3, 500, (length,), generator=draw), "none")
        pages = kept_pages(reference, lane)
        others.append(model.restore_lane(index, lane.position, reference.lane_parts(lane), pages))
        mine.append(lane)
    return mine, others


def tokens(count: int) -> Tensor:
    return torch.randint(3, 500, (count,), generator=draw)


def check_contexts(reference: Any, lanes: list[Any], model: Any, others: list[Any]) -> None:
    """Rings (the drafter's too), open groups, tails, and what was written to the pages."""
    for lane, other in zip(lanes, others, strict=True):
        assert (lane.position, lane.tail.tolist()) == (other.position, other.tail.tolist())
        wanted, got = reference.lane_parts(lane), model.lane_parts(other)
        wanted |= {f"page.{k}": v for k, v in reference.page_parts(lane, 0, len(lane.pages)).items()}
        got |= {f"page.{k}": v for k, v in model.page_parts(other, 0, len(other.pages)).items()}
        assert wanted.keys() == got.keys()
        for name, part in wanted.items():
            assert name == "tail" or error(got[name].float(), part.float()) < NEAR, f"{name} of lane {lane.index}"


def case_steps() -> None:
    reference, model = loaded(CPU, False), loaded(DEVICE, True)
    lanes, others = opened(reference, model, [3, 101] if INTERPRETED else [3, 60, 101])
    for one in (reference, model):
        one.blocks[0].moe.bank.tap.counts.zero_()  # of the prompts
        one.blocks[0].moe.bank.tap.totals.zero_()
    for step in range(2 if INTERPRETED else 8):
        ids = tokens(len(lanes))
        wanted, got = reference.decode(lanes, ids), model.decode(others, ids)
        print(f"  step {step}: {[round(error(got[i], wanted[i]), 4) for i in range(len(lanes))]}")
        assert error(got, wanted) < NEAR
    check_contexts(reference, lanes, model, others)
    demand = [
        (one.blocks[0].moe.bank.tap.counts.cpu(), one.blocks[0].moe.bank.tap.totals.cpu()) for one in (reference, model)
    ]
    assert (demand[0][0] - demand[1][0]).abs().sum() <= demand[0][0].sum() * 5 * NEAR  # one rounding, other experts
    assert torch.equal(demand[0][1][:, 0], demand[1][1][:, 0])


def case_blocks() -> None:
    """Several rows of a lane in one step are as many steps, to the bit, and rows taken back leave no trace."""
    reference, model = loaded(CPU, False), loaded(DEVICE, True)
    lanes, others = opened(reference, model, [95])
    twin = model.restore_lane(1, lanes[0].position, reference.lane_parts(lanes[0]), kept_pages(reference, lanes[0]))
    truth, wrong = tokens(5), tokens(2)
    each = range(0 if INTERPRETED else 5)  # in the interpreter a step takes ten seconds
    stepped = [model.decode([twin], truth[i : i + 1]) for i in each]
    model.decode(others, torch.cat([truth[:2], wrong]), [4])
    model.keep(others[0], 2)
    rows = model.decode(others, truth[2:], [3])
    model.keep(others[0], 3)
    wanted = torch.cat([reference.decode(lanes, truth[i : i + 1]) for i in range(5)])
    drafts = [
        one.propose([own[0]], torch.tensor([9], device=one.norm.device), lambda _, logits: logits.argmax(-1))
        for one, own in ((reference, lanes), (model, others))
    ]
    far = [round(error(row, own), 4) for row, own in zip(rows, wanted[2:], strict=True)]
    print(f"  {far}, drafts {error(drafts[1].logits, drafts[0].logits):.4f}")
    assert all(torch.equal(row, step[0]) for row, step in zip(rows, stepped[2:], strict=bool(stepped)))
    assert error(drafts[1].logits, drafts[0].logits) < NEAR
    assert error(rows, wanted[2:]) < FLIPPED
    check_contexts(reference, lanes, model, others)


def case_waiting() -> None:
    """A step in two runs of as many rows, beside a request that may wait for experts: each lane has its own demand."""
    reference, model = loaded(CPU, False), loaded(DEVICE, True)
    _, others = opened(reference, model, [3, 5])
    bank, count = model.blocks[0].moe.bank, 1 if INTERPRETED else runs.ROWS // 2 + 1
    object.__setattr__(bank, "urgent", SimpleNamespace(active=True, allowed=lambda *_: None))
    with patch.object(runs, "ROWS", count):
        model.decode(others, tokens(2 * count), [count, count])
    demand = bank.tap.counts.sum((1, 2)).tolist()
    print(f"  picks by lane: {demand[:2]}")
    assert demand[:2] == [count * len(model.blocks) * model.blocks[0].moe.top_k] * 2


class Waiting:
    """Reads before use, from slots that hold what was withdrawn: of a layer's, two at a time."""

    def __init__(self, bank: Any, exact_lane: int) -> None:
        self.bank, self.exact_lane, self.active, self.reads = bank, exact_lane, True, 0
        self.kept: dict[tuple[int, int], int] = {}

    def withdraw(self, layer: int, expert: int) -> None:
        if (layer, expert) not in self.kept:
            self.kept[layer, expert] = int(self.bank.tables.slot_of[layer, expert])
            self.bank.tables.withdraw(layer, expert)

    def allowed(self, layer: int, lanes: Tensor, routed: Any) -> Tensor | None:
        exact = (lanes == self.exact_lane)[:, None]
        return self.bank.tables.routable[layer] | exact if bool((routed.missed & exact).any()) else None

    def serve(self, layer: int, experts: list[int], _users: Any) -> Any:
        self.reads += len(experts)
        for first in range(0, len(experts), 2):
            yield {expert: self.kept[layer, expert] for expert in experts[first : first + 2]}


def case_layer() -> None:
    """The experts of a layer: a row has the same bits alone, beside one that waits, and waiting for what others have
    here; its demand as well, where so small a model's outputs hide a router's last bit."""
    model = loaded(DEVICE, True)
    moe = model.blocks[1].moe
    bank, every = moe.bank, range(6)  # of two lanes, one row each in turn
    x = (2 * torch.randn(len(every), model.shape.hidden_size, generator=draw)).to(DEVICE, torch.bfloat16)
    waiting = Waiting(bank, exact_lane=1)

    def step(waits: bool, *rows: int) -> tuple[Tensor, Tensor]:
        made = model.steps._prepare(model, len(rows)).step
        lanes = torch.tensor(rows, device=DEVICE) % 2
        object.__setattr__(bank, "urgent", waiting if waits else None)
        made.waiting = Pass([], lanes, lanes, lanes, lanes) if waits else None
        mixed = Mixed(x, x, x, x[list(rows)], NATIVE.activation(x[list(rows)].float()).to(torch.bfloat16))
        out, routed = made._moe(moe, mixed).clone(), made.inputs.routed_of(1)
        return out, (bank.tap._seen[-1].scores if waits else routed.wanted_scores.clone())

    whole, scores = step(False, *every)
    waits, demand = step(True, *every)
    assert torch.equal(waits, whole), "where nobody misses anything, a step that may wait is another"
    assert torch.equal(demand, scores)
    wanted = bank.tap._seen[-1].wanted
    for expert in {*wanted[0, :1].tolist(), *wanted[1].tolist()}:
        waiting.withdraw(1, expert)
    bank.tap.take(0)
    bank.tap.take(1)
    alone = step(False, 0)[0][0]
    assert not torch.equal(alone, whole[0])
    both, demand = step(True, *every)
    assert waiting.reads >= moe.top_k
    assert torch.equal(both[0], alone), "a fast row depends on who is beside it"
    assert torch.equal(both[1::2], whole[1::2]), "what is read before use leaves a trace"
    assert torch.equal(step(True, 1)[0][0], both[1]), "a row that waits depends on who is beside it"
    assert torch.equal(demand, scores)
    (_, _, fast), (_, _, exact) = bank.tap.take(0), bank.tap.take(1)
    assert fast[1] > 0 == fast[4], "fast rows miss, and nothing is read for them"
    assert exact[1] == exact[4] >= 2 * moe.top_k, "exact rows get what they miss"


def case_company() -> None:
    """The same of whole steps."""
    if INTERPRETED:
        return  # minutes
    reference, model = loaded(CPU, False), loaded(DEVICE, True)
    lanes = [reference.open_lane(0), reference.open_lane(1)]
    for lane in lanes:
        reference.prefill(lane, tokens(3), "none")
    parts = [(lane.position, reference.lane_parts(lane), kept_pages(reference, lane)) for lane in lanes]
    ids, bank = tokens(2), model.blocks[0].moe.bank

    def step(*which: int) -> Tensor:
        own = [model.restore_lane(i, *parts[i]) for i in which]
        logits = model.decode(own, ids[list(which)]).clone()
        for lane in own:
            model.close_lane(lane)
        return logits

    whole = step(0, 1)
    wanted = model.steps.prepared[2].step.inputs.routed.wanted.tolist()
    waiting = Waiting(bank, exact_lane=1)
    object.__setattr__(bank, "urgent", waiting)
    assert torch.equal(step(0, 1), whole), "where nobody misses anything, a step that may wait is another"
    for layer, rows in enumerate(wanted):
        for expert in (rows[0][0], *rows[1]):
            waiting.withdraw(layer, expert)
    bank.tap.take(0), bank.tap.take(1)
    both = step(0, 1)
    assert torch.equal(both[1], whole[1]), "what was read before use leaves a trace"
    (_, _, fast), (_, _, exact) = bank.tap.take(0), bank.tap.take(1)
    assert fast[1] > 0 == fast[4], "fast rows miss, and nothing is read for them"
    assert exact[1] == exact[4] > len(wanted), "exact rows get what they miss"
    object.__setattr__(bank, "urgent", None)
    assert torch.equal(step(0)[0], both[0]), "a fast row depends on who is beside it"
    assert not torch.equal(both[0], whole[0])
    print(f"  {waiting.reads} reads")


def case_captured() -> None:
    """A replayed step has the bits of an eager one, whatever the lanes; its demand too."""
    if DEVICE.type != "cuda":
        return
    reference = loaded(CPU, False)
    eager, captured = loaded(DEVICE, True), loaded(DEVICE, True)
    eager.steps.captures = False
    _, own = opened(reference, eager, [3, 60, 101, 127])
    contexts = [
        captured.restore_lane(
            lane.index, lane.position, eager.lane_parts(lane), [(0, eager.page_parts(lane, 0, len(lane.pages)))]
        )
        for lane in own
    ]
    taps = [one.blocks[0].moe.bank.tap for one in (eager, captured)]
    for which in ([0], [1, 2, 3], [0], [2, 0, 3], [1], [3, 2, 1], [0, 1, 2, 3], [3, 1, 0, 2]):
        ids = tokens(len(which))
        for tap in taps:
            tap.begin_step()
        wanted, got = (
            one.decode([lanes[i] for i in which], ids) for one, lanes in ((eager, own), (captured, contexts))
        )
        assert torch.equal(wanted, got), f"lanes {which}"
    for rows in ([3, 1], [2, 2], [1, 3]):
        ids = tokens(4)
        for one, lanes, tap in ((eager, own, taps[0]), (captured, contexts, taps[1])):
            tap.begin_step()
            one.decode(lanes[:2], ids, rows)
            for lane, count in zip(lanes, rows, strict=False):
                one.keep(lane, 1 + (count > 2))
                tap.keep(lane.index, 1 + (count > 2))
    ids = tokens(4)
    assert torch.equal(eager.decode(own, ids), captured.decode(contexts, ids))
    for one, other in zip(own, contexts, strict=True):
        for name, part in eager.lane_parts(one).items():
            assert torch.equal(part, captured.lane_parts(other)[name]) or name == "tail", name
    assert torch.equal(taps[0].counts, taps[1].counts)
    assert torch.equal(taps[0].totals, taps[1].totals)
    assert taps[1].totals_here().tolist() == taps[0].totals.tolist(), "totals that were sent along with a graph"
    for mine, other in zip(taps[0].take_wanted(), taps[1].take_wanted(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-5), "wishes of rows that were taken back"
    bank = captured.blocks[0].moe.bank  # beside a request that may wait a step runs eagerly; graphs go on behind it
    object.__setattr__(bank, "urgent", SimpleNamespace(active=True, allowed=lambda *_: None))
    for active in (True, False):
        bank.urgent.active, ids = active, tokens(4)
        wanted, got = eager.decode(own, ids), captured.decode(contexts, ids)
        assert error(got, wanted.cpu()) < 2 * NEAR, "logits of another step"
    graphs = [made.captured for made in captured.steps.prepared.values()]
    assert all(graphs), "a number of rows was never captured"
    print(f"  row counts in graphs: {list(captured.steps.prepared)}, pieces: {len(graphs[0].pieces)}")


CASES = {name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")}

if __name__ == "__main__":
    for name in sys.argv[2:] or CASES:
        print(name)
        CASES[name]()
    print("ok")
