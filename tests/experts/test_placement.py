"""Where slots lie: chosen by what a device says and does, and filled without keeping its work waiting."""

import gc
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.record import ExpertRecord
from packers.memory import HUGE_PAGE_SIZE, LARGE_BYTES
from tests.mapped import flags_of
from tided.engine.devices import is_shortage
from tided.experts import placement
from tided.experts.arena import Arena
from tided.experts.landing import Mark
from tided.experts.placement import Cuda, Slots, choose, slots_on
from tided.experts.slot_classes import SlotClass

RECORD = ExpertRecord(64, 64, 1)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Fake:
    """A device whose memory is a CPU's."""

    def __init__(self, integrated=True, shared=100e9, refuses=False, blind=False):
        self.integrated, self._shared, self._refuses, self._blind = integrated, shared, refuses, blind
        self.given = []

    def mapped(self, nbytes):
        if self._refuses:
            raise RuntimeError("no such memory")
        host = torch.zeros(nbytes, dtype=torch.uint8)
        self.given.append(host)
        return host.view(-1), host

    def reserved(self, nbytes):
        raise RuntimeError("no addresses")

    def zeros(self, nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    def sees(self, data, host):
        return not self._blind

    def read_rate(self, data):
        return 100e9 if data is None else self._shared

    def copy_rate(self):
        return 50e9


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(placement, "PROBE_BYTES", 1 << 16)


@pytest.mark.parametrize(
    ("device", "direct", "why"),
    [
        (Fake(), True, "one memory"),
        (Fake(shared=96e9), True, "one memory"),
        (Fake(shared=94e9), False, "slower"),
        (Fake(integrated=False), False, "of its own"),
        (Fake(refuses=True), False, "no such memory"),
        (Fake(blind=True), False, "does not see"),
    ],
)
def test_slots_are_read_in_place_where_that_costs_nothing(device, direct, why):
    found = choose(device)
    assert (found.direct, found.copied) == (direct, 50e9)
    assert why in found.why
    assert why in str(found)
    assert not (device.given and not device.integrated), "a device with memory of its own was asked for the system's"


def test_memory_that_is_shared_is_seen_from_both_sides():
    fake = Fake()
    slots = slots_on(CUDA, 6, 4096, fake)
    slots.host[2, 5] = 9
    assert slots.data.shape == slots.host.shape == (6, 4096)
    assert int(slots.data[2, 5]) == 9
    assert slots.placement.direct


class Allows(Fake):
    """Registers what the probe asks for and no more."""

    def __init__(self, error):
        super().__init__()
        self._error = error

    def mapped(self, nbytes):
        if self.given:
            raise self._error
        return super().mapped(nbytes)


def test_slots_that_cannot_be_shared_as_the_probe_s_were_are_copied_to():
    slots = slots_on(CUDA, 6, 4096, Allows(RuntimeError("error 801")))
    assert slots.data.shape == (6, 4096)
    assert slots.host is None
    assert not slots.placement.direct
    assert "error 801" in str(slots.placement)


def test_slots_that_are_too_much_are_told_as_such():
    with pytest.raises(MemoryError, match="90 GB"):
        slots_on(CUDA, 6, 4096, Allows(MemoryError("90 GB")))


@pytest.mark.parametrize(("code", "kind"), [(2, MemoryError), (801, RuntimeError)])
def test_a_registration_that_fails_for_want_of_memory_is_a_shortage(monkeypatch, code, kind):
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: code, cudaHostUnregister=pytest.fail)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(kind, match=f"error {code}") as failed:
        Cuda(CUDA).mapped(4096)
    assert is_shortage(failed.value) == (code == 2)


class Runtime:
    """A CUDA runtime that knows what was registered."""

    def __init__(self):
        self.held = {}

    def cudaHostRegister(self, address, nbytes, flags):
        assert address not in self.held
        self.held[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        del self.held[address]
        return 0


def test_segments_are_registered_while_any_of_their_bytes_is_used(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(placement, "SEGMENT_BYTES", 1 << 16)
    memory = placement.Registered((5 << 16) + 4096)
    begin = memory.host.data_ptr()
    memory.use(0, 40_000)
    memory.use(60_000, 140_000)  # into the third
    memory.use(5 << 16, (5 << 16) + 4096)
    segments = {(address - begin) >> 16: nbytes for address, nbytes in runtime.held.items()}
    assert segments == {0: 1 << 16, 1: 1 << 16, 2: 1 << 16, 5: 4096}
    memory.host[:200_000] = 7
    memory.give_back(100_000, 140_000)
    assert sorted((address - begin) >> 16 for address in runtime.held) == [0, 1, 5]
    assert not memory.host[2 << 16 : 3 << 16].any(), "the system has its pages"
    assert memory.host[: 2 << 16].all(), "of what is used in part nothing goes"
    memory.use(130_000, 140_000)
    assert sorted((address - begin) >> 16 for address in runtime.held) == [0, 1, 2, 5]
    del memory
    gc.collect()
    assert runtime.held == {}


@pytest.mark.skipif(not HUGE_PAGE_SIZE.exists(), reason="no huge pages here")
def test_the_probe_asks_of_the_device_what_the_slots_will_be(monkeypatch):
    """Memory of one kind: the process's alone, in huge pages, none of it a child's."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "as_tensor", lambda seen, device: seen._host)
    probed, _ = Cuda(CUDA).mapped(3 * LARGE_BYTES)
    slots, _, memory = Cuda(CUDA).reserved(2 * placement.SEGMENT_BYTES)
    flags, counted = set(flags_of(probed.data_ptr())), {"ac", "nr"}  # whether addresses count as memory
    assert flags - counted == set(flags_of(slots.data_ptr())) - counted
    assert {"hg", "dc"} <= flags
    assert "sh" not in flags
    assert probed.data_ptr() % LARGE_BYTES == slots.data_ptr() % LARGE_BYTES == 0, "a segment is of whole huge pages"
    slots[:] = 7
    memory.use(0, slots.numel())
    memory.give_back(0, slots.numel())
    assert not slots.any()


@given(st.data())
def test_what_segments_take_beside_the_slots_is_bounded(data):
    """Sizes and counts of any kind, before and after changes."""
    runtime, segment = Runtime(), 1 << 16
    sizes = sorted(data.draw(st.sets(st.integers(1, 9), min_size=1, max_size=4)))
    counts = [data.draw(st.tuples(*[st.integers(0, 60)] * 2)) for _ in sizes]
    classes = [
        SlotClass(size * 4096, one, 1, 2, max(1, one, most)) for size, (one, most) in zip(sizes, counts, strict=True)
    ]
    changes = [[data.draw(st.integers(0, one.most)) for one in classes] for _ in range(3)]

    def on(_, units, unit_bytes, most_units=0):
        memory = placement.Registered(most_units * unit_bytes)
        memory.use(0, 1)
        slots = memory.host.view(-1, unit_bytes)
        return Slots(slots, slots, placement.Placement(True, "a fake"), memory)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "cudart", lambda: runtime)
        patched.setattr(placement, "SEGMENT_BYTES", segment)
        patched.setattr("tided.experts.arena.slots_on", on)
        arena = Arena.of_sizes(classes, np.zeros((1, 1), int), CPU, 2)
        for wanted in changes:
            slots = sum(end - begin for begin, end in arena._parts([one.slots for one in arena.classes]))
            assert arena.held_bytes == sum(runtime.held.values())
            assert arena.held_bytes <= slots + placement.rounding_bytes(len(sizes) + 1)
            foreseen = arena.bytes_with(wanted)
            arena.resize(wanted)
            assert foreseen == arena.held_bytes == sum(runtime.held.values())
        del arena
        assert runtime.held == {}


class Elastic(Fake):
    """Of whose addresses parts are used."""

    def reserved(self, nbytes):
        self.memory = placement.Reserved(nbytes)
        self.used = []
        monitor = SimpleNamespace(
            use=lambda *part: self.used.append(part),
            give_back=lambda *part: (self.used.append(("back", *part)), self.memory.give_back(*part)),
            held=self.memory.held,
        )
        return self.memory.host, self.memory.host, monitor


def test_slots_of_one_memory_are_used_and_given_back_in_parts(monkeypatch):
    """The arena of a device that reads the system's memory."""
    fake = Elastic()
    monkeypatch.setattr("tided.experts.arena.slots_on", lambda _, *args, **most: slots_on(CUDA, *args, fake, **most))
    arena = Arena(RECORD, 4, 2, torch.device("cpu"), urgent=1, most=20)
    size = RECORD.slot_bytes
    assert arena.data.shape == (20 + 2 + 2, size)
    assert fake.used == [(0, 6 * size), (22 * size, 24 * size)]
    assert arena.held_bytes == 8 * size
    for at in range(4):
        slot = arena.take()
        arena.load(slot, lambda out, at=at: out.__setitem__(slice(None), bytes([at + 1]) * size))
        arena.hold({(0, at): slot})
    arena.resize([10])
    assert fake.used[-1] == (6 * size, 12 * size)
    arena.drop((0, 0))
    arena.drop((0, 1))
    moved = arena.resize([2])
    assert fake.used[-1] == ("back", 4 * size, 12 * size)
    assert not moved
    arena.check()
    moved = arena.resize([1]) if arena.slot_of((0, 3)) == 3 else {}
    assert moved == {(0, 3): arena.slot_of((0, 3))}
    assert arena.data[arena.slot_of((0, 3))].eq(4).all()
    arena.check()


def test_parts_that_a_device_refuses_are_no_hindrance(monkeypatch, caplog):
    fake = Elastic()

    def refused(*part):
        raise RuntimeError("error 801")

    def on(_, *args, **most):
        slots = slots_on(CUDA, *args, fake, **most)
        return slots if slots.memory is None else slots._replace(memory=SimpleNamespace(use=refused))

    monkeypatch.setattr("tided.experts.arena.slots_on", on)
    arena = Arena(RECORD, 4, 2, torch.device("cpu"), most=20)
    assert arena.data.shape == (7, RECORD.slot_bytes)
    assert arena.most_residents is None
    assert "cannot change while serving: error 801" in caplog.text
    arena.check()


def test_an_arena_that_was_refused_is_gone_before_the_next_is_taken(monkeypatch):
    """Both are pinned memory of a machine that has room for one."""
    taken = []

    class Refusing(placement.Reserved):
        def use(self, begin, end):
            if begin:
                raise RuntimeError("error 304")

    def on(_, units, unit_bytes, most_units=0):
        assert all(one() is None for one in taken), "an arena that was refused is still there"
        memory = Refusing((most_units or units) * unit_bytes)
        taken.append(weakref.ref(memory))
        taken.append(weakref.ref(memory.host))
        slots = memory.host.view(-1, unit_bytes)
        return Slots(slots, slots, placement.Placement(True, "a fake"), memory if most_units else None)

    monkeypatch.setattr("tided.experts.arena.slots_on", on)
    gc.disable()
    try:
        arena = Arena(RECORD, 4, 2, torch.device("cpu"), most=20)
    finally:
        gc.enable()
    assert len(taken) == 4
    assert arena.most_residents is None
    arena.check()


def test_where_addresses_cannot_be_had_the_budget_stands():
    slots = slots_on(CUDA, 6, 4096, Fake(), most_units=90)
    assert slots.data.shape == (6, 4096)
    assert slots.memory is None
    assert slots.placement.direct
    own = slots_on(CUDA, 6, 4096, Fake(integrated=False), most_units=90)
    assert own.data.shape == (6, 4096)
    assert own.memory is None


class Event:
    def __init__(self, told):
        self.told = told

    def synchronize(self):
        self.told.append("waited")


def test_a_slot_is_not_read_into_before_what_reads_it_is_done():
    arena, told = Arena(RECORD, 2, 1, torch.device("cpu")), []
    slot = arena.take()
    arena._fences._of[slot] = Mark(Event(told)), 0

    def read(out):
        told.append("read")
        out[:4] = b"abcd"

    arena.load(slot, read)
    assert told == ["waited", "read"]
    assert bytes(arena.data[slot, :4].numpy()) == b"abcd"
    arena.load(slot, read)
    assert told == ["waited", "read", "read"], "a fence holds for one load"


def test_a_copied_slot_is_read_into_elsewhere(monkeypatch):
    """The device's memory never is what a read fills."""
    data = torch.zeros(4, RECORD.slot_bytes, dtype=torch.uint8)
    monkeypatch.setattr(
        "tided.experts.arena.slots_on", lambda *_, **__: Slots(data, None, placement.Placement(False, "a fake"))
    )
    arena = Arena(RECORD, 2, 1, torch.device("cpu"))
    monkeypatch.setattr(arena._staging, "of", lambda nbytes, *_: (_ for _ in ()).throw(LookupError(nbytes)))
    slot = arena.take()
    with pytest.raises(LookupError, match=str(RECORD.slot_bytes)):
        arena.load(slot, lambda out: pytest.fail("read into the device's memory"))


@pytest.mark.gpu
def test_a_record_comes_beside_the_device_s_work():
    """A load is done while a kernel that was launched before still runs, and waits for one that reads its slot."""
    arena = Arena(ExpertRecord(5120, 2304, 2), 2, 2, CUDA)
    slot, other = arena.take(), arena.take()
    content = torch.randint(0, 256, (arena.data.shape[1],), dtype=torch.uint8)

    def read(out):
        torch.frombuffer(out, dtype=torch.uint8).copy_(content[: len(out)])

    arena.load(slot, read)  # pinned memory and a stream are made
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    done.record()
    loading = threading.Thread(target=arena.load, args=(other, read))
    loading.start()
    loading.join(30)
    beside = not done.query()
    torch.cuda.synchronize()
    if arena.placement.direct:
        pytest.skip("this device reads slots in place")
    assert beside, "the copy waited for the device's work"
    assert torch.equal(arena.data[other].cpu(), content)
    torch.cuda._sleep(500_000_000)
    arena.fence(slot)
    running = torch.cuda.Event()
    running.record()
    arena.load(slot, read)
    assert running.query(), "a slot was read into while something might read it"


@pytest.mark.gpu
def test_a_device_sees_the_system_s_memory_that_is_given_to_it():
    cuda = Cuda(CUDA)
    data, host = cuda.mapped(1 << 20)
    assert data.is_cuda
    assert cuda.sees(data, host)
    assert cuda.copy_rate() > 1e9
    assert cuda.read_rate(None) > 1e9
