"""What comes from a device is waited for, and nobody else waits with it."""

import threading

import pytest
import torch

from tided.models.copies import Coming

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_what_is_here_already_is_what_it_was():
    ids, sure = torch.tensor([3, 5]), torch.tensor([[0.5]])
    assert [part.tolist() for part in Coming(ids, sure).here()] == [[3, 5], [[0.5]]]


@pytest.mark.gpu
@gpu
def test_what_a_device_computes_is_waited_for():
    there = torch.zeros(4, dtype=torch.int64, device="cuda")
    torch.cuda._sleep(200_000_000)
    coming = Coming(there.add_(7), there[:2].to(torch.float32))
    assert [part.tolist() for part in coming.here()] == [[7] * 4, [7.0] * 2]


@pytest.mark.gpu
@gpu
def test_who_waits_for_it_keeps_no_other_thread_from_copying():
    there = torch.zeros(4, dtype=torch.int64, device="cuda")
    source, target = torch.ones(1 << 20, pin_memory=True), torch.empty(1 << 20, device="cuda")
    stream, waits, copied = torch.cuda.Stream(), threading.Event(), threading.Event()

    def copy() -> None:
        assert waits.wait(30)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()
        copied.set()

    thread = threading.Thread(target=copy)
    thread.start()
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # some seconds
    computed = torch.cuda.Event()
    coming = Coming(there.add_(1))
    computed.record()
    waiting = threading.Thread(target=coming.here)
    waiting.start()
    waits.set()
    assert copied.wait(30)
    assert not computed.query(), "the copy came behind what the other thread waits for"
    waiting.join(30)
    thread.join(30)
