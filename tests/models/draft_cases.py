"""Proposals of fixed shape against the eager form: run by `test_drafts.py` in Triton's interpreter, and on a GPU, where
they are captured too.

python tests/models/draft_cases.py cpu|cuda [name of a case]"""

import statistics
import sys
from typing import Any

import torch

from kernels.device import INTERPRETED
from tests.models import decode_cases, glm53_step_cases
from tests.models.decode_cases import error
from tests.models.rig import CPU
from tided.engine.drafting import Chooser
from tided.engine.types import Sampling
from tided.models.base import Draft

DEVICE = torch.device(sys.argv[1] if __name__ == "__main__" else "cpu")
GREEDY = Sampling(temperature=0.0)
SAMPLINGS = [GREEDY, Sampling(seed=7), Sampling(seed=9, temperature=0.7, top_p=0.9, top_k=40, min_p=0.01)]
NEAR = 0.02
LENGTHS = [3, 101] if INTERPRETED else [3, 60, 101]


def chooser(lanes: list[Any], samplings: list[Sampling]) -> Chooser:
    return Chooser(samplings[: len(lanes)], [lane.position + 1 for lane in lanes])


def proposed(model: Any, lanes: list[Any], samplings: list[Sampling], places: int = 0) -> Draft:
    choose = chooser(lanes, samplings)
    anchors = torch.tensor([9 + lane.index for lane in lanes], device=model.norm.device)
    draft: Draft = model.propose(lanes, anchors, choose, places)
    choose.check()
    return draft


def check_near(reference: Any, lanes: list[Any], model: Any, others: list[Any]) -> None:
    """One after another and together, with tokens that the choice gives, as long as both choose alike; nothing of a
    lane changes. A place whose router chooses otherwise is another one, and so are those behind it."""
    parts = [{name: part.clone() for name, part in model.lane_parts(lane).items()} for lane in others]
    pages = [model.page_parts(lane, 0, len(lane.pages)) for lane in others]
    far = list[float]()
    for which in ([0, 1],) if INTERPRETED else ([0], [1], [2], [2, 0], [0, 1, 2]):
        mine, other = [lanes[i] for i in which], [others[i] for i in which]
        wanted, got = (proposed(*one, [GREEDY] * 3) for one in ((reference, mine), (model, other)))
        for lane in range(len(which)):
            for place, (token, own) in enumerate(zip(got.ids[lane].tolist(), wanted.ids[lane].tolist(), strict=True)):
                far.append(error(got.logits[lane, place], wanted.logits[lane, place]))
                far.append(abs(float(got.confidence[lane, place]) - float(wanted.confidence[lane, place])))
                assert token == got.logits[lane, place].argmax()
                if token != own:
                    break
    print(f"  {[round(one, 4) for one in far]}")
    assert statistics.median(far) < NEAR
    if INTERPRETED:  # whose roundings are the reference's: few routers choose otherwise
        assert statistics.quantiles(far)[2] < 2 * NEAR
    assert len(far) >= (8 if INTERPRETED else 20)
    for lane, before, page in zip(others, parts, pages, strict=True):
        now, then = model.lane_parts(lane), model.page_parts(lane, 0, len(lane.pages))
        assert all(torch.equal(part, before[name]) for name, part in now.items())
        assert all(torch.equal(part, page[name]) for name, part in then.items())


def case_block() -> None:
    reference, model = decode_cases.loaded(CPU, False), decode_cases.loaded(DEVICE, True)
    lanes, others = decode_cases.opened(reference, model, LENGTHS)
    check_near(reference, lanes, model, others)


def check_captured(eager: Any, own: list[Any], captured: Any, others: list[Any]) -> None:
    """A replayed proposal has the bits of an eager one, whatever lanes, laws and places come one after another; between
    them contexts grow, over the end of a page too."""
    for proposals, captures in ((eager.drafter.proposals, False), (captured.drafter.proposals, True)):
        proposals.captures = captures
    for turn in range(3):
        for which in ([0], [1, 2], [2, 0], [0, 1, 2]):
            for samplings in ([GREEDY] * 3, SAMPLINGS[1:2] * 3, SAMPLINGS):
                for places in (0, 1, 3):
                    wanted, got = (
                        proposed(model, [lanes[i] for i in which], samplings, places)
                        for model, lanes in ((eager, own), (captured, others))
                    )
                    assert torch.equal(got.ids, wanted.ids), (turn, which, places)
                    assert torch.equal(got.logits, wanted.logits), (turn, which, places)
                    assert torch.equal(got.confidence, wanted.confidence), (turn, which, places)
        for _ in range(11):
            ids = decode_cases.tokens(3)
            assert torch.equal(eager.decode(own, ids), captured.decode(others, ids))
    graphs = {
        (lanes, law): len(kept.graphs)
        for lanes, made in captured.drafter.proposals._prepared.items()
        for law, kept in made.laws.items()
    }
    print(f"  graphs: {graphs}")
    assert len(graphs) == 7, "top-p is in the mixture of three lanes alone"


def case_block_captured() -> None:
    if DEVICE.type != "cuda":
        return
    reference = decode_cases.loaded(CPU, False)
    eager, captured = decode_cases.loaded(DEVICE, True), decode_cases.loaded(DEVICE, True)
    _, own = decode_cases.opened(reference, eager, LENGTHS)
    pages = [[(0, eager.page_parts(lane, 0, len(lane.pages)))] for lane in own]
    others = [
        captured.restore_lane(lane.index, lane.position, eager.lane_parts(lane), page)
        for lane, page in zip(own, pages, strict=True)
    ]
    check_captured(eager, own, captured, others)


def case_chain() -> None:
    """Contexts shorter and longer than what is chosen, in both forms of the cache, and experts of several sizes."""
    glm = glm53_step_cases
    forms = ((glm.GLM, {}), (glm.GLM, {"dtype": "fp8"}), (glm.EXL3, {"dtype": "fp8"}))
    for path, cache in forms[2:] if INTERPRETED else forms:
        reference, model = glm.loaded(CPU, False, path, **cache), glm.loaded(DEVICE, True, path, **cache)
        lanes, others = glm.opened(reference, model, LENGTHS)
        check_near(reference, lanes, model, others)


def case_chain_captured() -> None:
    if DEVICE.type != "cuda":
        return
    glm = glm53_step_cases
    for path, cache in ((glm.EXL3, {}), (glm.EXL3, {"dtype": "fp8"})):
        reference = glm.loaded(CPU, False, path, **cache)
        eager, captured = glm.loaded(DEVICE, True, path, **cache), glm.loaded(DEVICE, True, path, **cache)
        _, own = glm.opened(reference, eager, LENGTHS)
        check_captured(eager, own, captured, [glm.copied(eager, lane, captured) for lane in own])


CASES = {name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")}

if __name__ == "__main__":
    decode_cases.DEVICE = glm53_step_cases.DEVICE = DEVICE
    for name in sys.argv[2:] or CASES:
        print(name)
        CASES[name]()
    print("ok")
