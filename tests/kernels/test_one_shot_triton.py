"""Collectives by one launch: in Triton's interpreter over shared memory, and on GPUs over each other's memory."""

import pytest
import torch

from tests.kernels.cases import PATIENT, run

pytestmark = PATIENT


def test_in_the_interpreter_ranks_that_share_memory_add_as_torch_does():
    assert run("one_shot_cases.py", "interpreter", TRITON_INTERPRET="1").endswith("ok\n")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", ["streams", "processes"])
def test_on_one_gpu_launches_are_as_torch_s_and_replayed(ranks):
    assert run("one_shot_cases.py", ranks).endswith("ok\n")


@pytest.mark.gpu
def test_on_two_gpus_a_group_has_the_same_bits_with_and_without_nccl():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL takes one for each rank")
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("these two GPUs do not read each other's memory")
    assert run("one_shot_cases.py", "groups").endswith("ok\n")
