"""The one-shot collectives against torch's own sums: run by `test_one_shot_triton.py`.

python tests/kernels/one_shot_cases.py interpreter   ranks are processes, their regions shared memory
                                       streams       ranks are streams of one process, on one GPU
                                       processes     ranks are processes that lend each other memory by CUDA IPC, on a
                                                     GPU each where there are as many, else all on one
                                       groups        ranks are `TorchGroup`s, on a GPU each"""

import multiprocessing
import os
import statistics
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing import shared_memory

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from kernels.one_shot_triton import ADDED, BLOCK, REGION_BYTES, STACKED
from tided.engine.dataplane import TorchGroup
from tided.engine.link_probe import measure
from tided.engine.local_ranks import free_port
from tided.engine.one_shot import OneShot, opened
from tided.errors import PairError
from tided.settings import Cache, Engine, Experts, Model, Parallel, Settings

KINDS = (ADDED, STACKED)
FEW = ((1, 7), (5, 300), (1, 3 * BLOCK + 1))
MANY = (*FEW, (3, 5), (2, BLOCK), (1, 5120), (6, 5120), (16, 5120), (129, BLOCK), (16, 64640), (1024, 1024))
WAIT_S = 60.0


def awkward(rank, shape, seed):
    """fp32 of very different sizes: another order of addition gives other bits."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=random) * 10.0 ** torch.randint(-6, 7, shape, generator=random)


def joined(parts, kind):
    if kind == STACKED:
        return torch.stack(parts)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def same_bits(found, expected):
    return torch.equal(found.view(torch.int32), expected.to(found.device).view(torch.int32))


def equals_torch(one, shapes, device, rounds):
    """A rank's part of the first case: sums in the order of the ranks, and integers untouched, call after call."""
    for seed in range(rounds):
        for shape in shapes:
            parts = [awkward(rank, shape, seed) for rank in range(one.ranks)]
            mine = parts[one.rank].to(device)
            for kind in KINDS:
                assert one.takes(mine)
                assert same_bits(one(mine, kind), joined(parts, kind)), (one.rank, seed, shape, kind)
            assert same_bits(mine, parts[one.rank]), "what was given in is left alone"
        numbers = [torch.arange(12, dtype=torch.int32).view(3, 4) - 5 * rank for rank in range(one.ranks)]
        assert same_bits(one(numbers[one.rank].to(device), STACKED), joined(numbers, STACKED))
    one.check()


class Replayed:
    """Launches in a graph whose parts change with each replay; what is wrong is counted on the device."""

    def __init__(self, one, shape):
        self.one, (rows, width) = one, shape
        self.count = torch.zeros((), device="cuda")
        self.base = torch.arange(rows * width, device="cuda", dtype=torch.float32).view(shape) % 1021
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.graph = torch.cuda.CUDAGraph()

    def capture(self, stream):
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.count += 1.0
            parts = [self.base * (rank + 1) + self.count for rank in range(self.one.ranks)]
            for kind in (*KINDS, ADDED, ADDED):
                self.wrong += (self.one(parts[self.one.rank], kind) != joined(parts, kind)).sum()


def regions_here(ranks, device):
    """Every rank's region in memory of this process; -> what each is told of them, and what must stay alive."""
    memory = [torch.zeros(REGION_BYTES, dtype=torch.uint8, device=device) for _ in range(ranks)]
    words = [torch.zeros(1, dtype=torch.int64, pin_memory=device != "cpu") for _ in range(ranks)]
    addresses = [region.data_ptr() for region in memory]
    return [torch.tensor([*addresses, word.data_ptr()], device=device) for word in words], words, memory


# Streams of one process


def streams():
    began_s = time.monotonic()
    torch.cuda.init()
    regions, words, memory = regions_here(2, "cuda")
    for rank in range(2):  # compiled and loaded before anybody waits: a load would wait for who waits
        lost = OneShot(rank, regions[rank], words[rank], 1e-3)
        for kind in KINDS:
            for shape in MANY:
                lost(awkward(rank, shape, 0).cuda(), kind)
        torch.cuda.synchronize()
        expect_error(lost)
        words[rank].zero_()
        for region in memory:
            region.zero_()
    print(f"compiled, and nobody came: {time.monotonic() - began_s:.1f} s", flush=True)
    ones = [OneShot(rank, regions[rank], words[rank], 10.0) for rank in range(2)]
    sides = [torch.cuda.Stream() for _ in ones]
    for side in sides:  # so that nothing is asked of the driver while one waits for the other
        with torch.cuda.stream(side):
            _ = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (64 << 20, *[512 << 10] * 8)]
    for seed in range(3):
        for shape in MANY:
            parts = [awkward(rank, shape, seed) for rank in range(2)]
            there = [part.cuda() for part in parts]
            torch.cuda.synchronize()
            for kind in KINDS:
                found = []
                for one, side in zip(ones, sides, strict=True):
                    with torch.cuda.stream(side):
                        found.append(one(there[one.rank], kind))
                torch.cuda.synchronize()
                assert all(same_bits(each, joined(parts, kind)) for each in found), (seed, shape, kind)
    for one in ones:
        one.check()
    print(f"eager: as torch's: {time.monotonic() - began_s:.1f} s", flush=True)
    for shape in ((1, 5120), (6, 5120), (16, 5120), (7, 333)):
        steps = [Replayed(one, shape) for one in ones]
        for step, side in zip(steps, sides, strict=True):
            step.capture(side)
        torch.cuda.synchronize()
        for _ in range(1000):
            for step, side in zip(steps, sides, strict=True):
                with torch.cuda.stream(side):
                    step.graph.replay()
        torch.cuda.synchronize()
        assert [int(step.count) for step in steps] == [1000, 1000]
        assert [int(step.wrong) for step in steps] == [0, 0], shape
    print(f"replayed: {time.monotonic() - began_s:.1f} s", flush=True)
    for kind, shape in ((STACKED, (1, 5120)), (STACKED, (6, 5120)), (ADDED, (16, 5120))):
        print(f"kind {kind} of {list(shape)}: {launch_us(ones, sides, kind, shape):.2f} us", flush=True)
    late_s = missing(ones[0])
    print(f"a peer that does not come ends it after {late_s:.2f} s of 0.3", flush=True)


def launch_us(ones, sides, kind, shape, launches=20, rounds=20):
    """Of one launch among several in a graph, on both streams at once."""
    graphs, part, times = [torch.cuda.CUDAGraph() for _ in ones], torch.ones(shape, device="cuda"), []
    for one, side, graph in zip(ones, sides, graphs, strict=True):
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            for _ in range(launches):
                one(part, kind)
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for side, graph in zip(sides, graphs, strict=True):
            with torch.cuda.stream(side):
                begin.record()
                graph.replay()
                end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / launches)
    return statistics.median(times)


def expect_error(one):
    missed = 0 if one.rank else 1
    with pytest.raises(PairError, match=f"rank {one.rank} waited .* for rank {missed}, in a collective"):
        one.check()


def missing(one):
    """Five launches whose peer never comes: the first waits, the others know."""
    one._patience_s, part = 0.3, torch.ones(6, 5120, device="cuda")
    began_s = time.monotonic()
    for _ in range(5):
        one(part, ADDED)
    torch.cuda.synchronize()
    took_s = time.monotonic() - began_s
    expect_error(one)
    assert 0.25 < took_s < 10.0, took_s
    return took_s


# Processes


def process_of_a_gpu(rank, ranks, port, rounds):
    torch.set_num_threads(1)
    torch.cuda.set_device(rank if torch.cuda.device_count() >= ranks else 0)
    store = TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, timeout=timedelta(seconds=WAIT_S))
    began_s = time.monotonic()
    one = opened(store, rank, ranks, WAIT_S, WAIT_S)
    print(f"rank {rank} of {torch.cuda.device_count()} devices: {time.monotonic() - began_s:.1f} s to open", flush=True)
    equals_torch(one, MANY[:8], "cuda", rounds)
    print(f"rank {rank}: as torch's after {time.monotonic() - began_s:.1f} s", flush=True)
    side, step = torch.cuda.Stream(), Replayed(one, (6, 5120))
    step.capture(side)
    replays = 1000 if torch.cuda.device_count() >= ranks else 100  # slices of time on one device are long
    for _ in range(replays):
        step.graph.replay()
    torch.cuda.synchronize()
    assert (int(step.count), int(step.wrong)) == (replays, 0)
    one.check()
    print(f"rank {rank}: replayed after {time.monotonic() - began_s:.1f} s", flush=True)
    if rank == 0:
        print(f"a peer that has gone ends it after {missing(one):.2f} s of 0.3", flush=True)
    store.set(f"end-{rank}", "")
    store.wait([f"end-{number}" for number in range(ranks)], timedelta(seconds=WAIT_S))
    os._exit(0)


def process_with_nccl(rank, ranks, port):
    torch.cuda.set_device(rank)
    group = TorchGroup(make_settings(Parallel(ranks=ranks, data_port=port, one_shot=True)), rank)
    equals_torch(group.one_shot, MANY, "cuda", 2)
    for shape in (*MANY, (1025, 1024)):
        part = awkward(rank, shape, 1).cuda()
        for work in (group.sum, group.gather, group.concat):
            found = work(part)
            with group.by_library():
                assert same_bits(work(part), found), shape
    side, step = torch.cuda.Stream(), Replayed(group.one_shot, (6, 5120))
    step.capture(side)
    for _ in range(1000):
        step.graph.replay()
    torch.cuda.synchronize()
    assert (int(step.count), int(step.wrong)) == (1000, 0)
    print(measure(group, torch.device("cuda")), flush=True)
    group.check()
    group.meet("done", WAIT_S, lambda: None)
    group.close()
    sys.stdout.flush()
    os._exit(0)


def make_settings(parallel):
    return Settings(
        model=Model(path="none", served_name="none"),
        experts=Experts(resident=8),
        cache=Cache(context_tokens=64, pool_tokens=64),
        engine=Engine(device="cuda"),
        parallel=parallel,
    )


def process_of_a_cpu(rank, ranks, names):
    torch.set_num_threads(1)
    memory = [shared_memory.SharedMemory(name) for name in names]
    views = [np.frombuffer(each.buf, np.uint8) for each in memory]
    word = torch.zeros(1, dtype=torch.int64)
    regions = torch.tensor([*(view.ctypes.data for view in views), word.data_ptr()])
    one = OneShot(rank, regions, word, 1e9)
    equals_torch(one, FEW, "cpu", 2)
    if rank == ranks - 1:
        one._patience_s = 1e-6  # in polls there
        for _ in range(3):  # the first waits, the others know
            one(torch.ones(1, 7), ADDED)
        expect_error(one)
    os._exit(0)


def interpreter(ranks):
    with ExitStack() as stack:
        memory = [shared_memory.SharedMemory(create=True, size=REGION_BYTES) for _ in range(ranks)]
        for each in memory:
            stack.callback(each.unlink)
        run(process_of_a_cpu, ranks, [each.name for each in memory], start="fork")  # imports once, and no threads yet


def run(work, ranks, *arguments, start="spawn"):
    context = multiprocessing.get_context(start)
    processes = [context.Process(target=work, args=(rank, ranks, *arguments)) for rank in range(ranks)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(4 * WAIT_S)
        assert [process.exitcode for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    if sys.argv[1] == "interpreter":
        interpreter(3)  # a sum of two has no order
    elif sys.argv[1] == "streams":
        streams()
    elif sys.argv[1] == "groups":
        run(process_with_nccl, 2, free_port())
    else:
        run(process_of_a_gpu, 2, free_port(), 1)
    print("ok")
