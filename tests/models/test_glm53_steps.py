"""GLM-5.3's decode steps of fixed shape: on a CPU those of the present path, to the bit where nothing is shared; by
kernels in Triton's interpreter and on a GPU."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kernels.cases import PATIENT, run
from tests.models.rig import GLM, Threads, load_model
from tests.models.test_glm53_cache import kept
from tests.models.test_glm53_golden import LOGITS, serve

HERE = Path(__file__).parent
pytestmark = PATIENT

GOLDEN = load_file(GLM / "golden_main.safetensors")
TOKENS = GOLDEN["tokens"].long()


def model(fixed: bool, group=None, **asked):
    one = load_model(GLM, group, kept(**asked))
    one.steps.everywhere = fixed
    return one


def served(one):
    """Logits, demand, and all that a context leaves in the pool; and whether steps of fixed shape made them."""
    logits, tap = serve(one, TOKENS), one.bank.tap
    assert list(one.steps.prepared) == ([1, 5] if one.steps.everywhere else [])
    return [logits, tap.counts, tap.mass, tap.totals, *one.pool.rows.values(), *one.pool.keys.values()]


@pytest.mark.parametrize(
    "asked", [{}, {"dtype": "fp8", "numerics": "native", "draft": "3"}], ids=["fp32", "native, FP8 rows, drafter"]
)
def test_they_are_those_of_spans(asked):
    wanted, got = (served(model(fixed, **asked)) for fixed in (False, True))
    for one, other in zip(wanted, got, strict=True):
        assert torch.equal(one, other)


def test_ranks_that_share_contexts_give_the_reference():
    found = Threads(2).run(lambda group: serve(model(True, group, split=True), TOKENS))
    for logits in found:
        assert torch.equal(logits, found[0])
        torch.testing.assert_close(logits[136:], GOLDEN["logits_tail"], rtol=0, atol=LOGITS)


def greedy(_, logits):
    return logits.argmax(1)


def test_rows_taken_back_and_other_lanes():
    """Blocks of two lanes in one step of which some rows stay, then what the drafter proposes. Of a context that is
    shorter than what is chosen sums have more zeros."""

    def proposed(fixed):
        one = model(fixed, draft="3")
        lanes = [one.open_lane(index) for index in range(2)]
        one.prefill(lanes[0], TOKENS[:126], "none")
        one.prefill(lanes[1], TOKENS[:9], "none")
        one.decode(lanes, TOKENS[126:133], [4, 3])
        one.keep(lanes[0], 2)
        one.keep(lanes[1], 1)
        logits = one.decode(lanes[::-1], TOKENS[140:142])
        draft = one.propose(lanes, TOKENS[150:152], greedy)
        return logits, draft.logits, *(lane.windows for lane in lanes), one.bank.tap.counts

    for wanted, got in zip(proposed(False), proposed(True), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=LOGITS / 4)


def test_by_kernels_blocks_are_steps_in_the_interpreter():
    assert run("glm53_step_cases.py", "cpu", "blocks", where=HERE, TRITON_INTERPRET="1").endswith("ok\n")


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["steps", "blocks", "company", "waiting", "captured"])
def test_on_a_gpu_they_are_the_cpu_s_captured_or_not(case):
    assert run("glm53_step_cases.py", "cuda", case, where=HERE).endswith("ok\n")


@pytest.mark.gpu
def test_ranks_on_two_gpus_have_the_bits_of_eager_steps():
    if torch.cuda.device_count() < 2:
        pytest.skip("two ranks want two GPUs")
    assert run("glm53_rank_cases.py", "cuda", where=HERE).strip().endswith("ok")
