"""When a rank gives memory up, and when it ends: by what is free and since when, and by nothing else."""

import asyncio
import itertools
import threading

from hypothesis import given
from hypothesis import strategies as st

from tided.control.memory import Limits, Watch, available_bytes, total_bytes, watch

LIMITS = st.builds(Limits, st.integers(0, 40), st.integers(0, 30), st.sampled_from([0.0, 0.5, 3.0]))
LOOKS = st.lists(st.tuples(st.none() | st.integers(0, 50), st.sampled_from([0.0, 0.25, 0.5, 2.0])), max_size=40)


@given(LIMITS, LOOKS)
def test_it_ends_when_all_looks_of_a_while_were_low_and_only_then(limits, looks):
    one, now_s, seen = Watch(limits), 0.0, []
    for free, after_s in looks:
        now_s += after_s
        seen.append((now_s, free))
        low = []  # the looks since the last that was not low
        for at_s, told in reversed(seen):
            if told is None or told >= limits.exit_below_bytes:
                break
            low.append(at_s)
        expected = bool(low) and now_s - low[-1] >= limits.exit_after_s
        verdict = one.look(free, now_s)
        assert (verdict == "end") == expected
        if verdict != "end":
            short = free is not None and free < max(limits.shed_below_bytes, limits.exit_below_bytes)
            assert verdict == ("shed" if short else "fine")


@given(st.integers(0, 50))
def test_a_watch_without_thresholds_does_nothing(free):
    assert Watch(Limits(0, 0, 0.0)).look(free, 1.0) == "fine"


async def test_it_sheds_while_it_is_low_and_ends_once():
    looks, shed, ended = [], [], []

    def give() -> int:
        shed.append(looks[-1])
        return 7

    def free() -> int:
        looks.append(100 if len(looks) < 3 else 40 if len(shed) < 2 else 9)
        return looks[-1]

    await asyncio.wait_for(watch(Limits(50, 10, 0.02), give, ended.append, free, every_s=0.005), 20)
    assert ended == [9]
    assert shed[0] == 40
    assert looks[:3] == [100, 100, 100]
    assert set(shed) <= {40, 9}


async def test_what_gives_memory_up_may_hang_and_the_rank_ends_all_the_same():
    """It waits for a lock, say, whose holder waits for memory."""
    going_on, begun, ended = threading.Event(), [], []

    def hangs() -> int:
        begun.append(True)
        going_on.wait(30)
        return 0

    try:
        await asyncio.wait_for(watch(Limits(50, 10, 0.02), hangs, ended.append, lambda: 9, every_s=0.005), 20)
        assert not going_on.is_set()
    finally:
        going_on.set()
    assert ended == [9]
    assert begun == [True], "one at a time"


async def test_what_cannot_give_memory_up_ends_no_watch(caplog):
    tries, ended = [], []

    def fails() -> int:
        tries.append(True)
        raise RuntimeError("can't start new thread")

    free = itertools.chain([40] * 20, itertools.repeat(9))
    await asyncio.wait_for(watch(Limits(50, 10, 0.02), fails, ended.append, lambda: next(free), every_s=0.005), 20)
    assert ended == [9]
    assert len(tries) > 1
    assert caplog.text.count("none can be given up") == 1


def test_this_machine_tells():
    assert 0 < available_bytes() < total_bytes()


def test_a_file_that_says_nothing_is_nothing(tmp_path):
    file = tmp_path / "meminfo"
    assert available_bytes(file) is None
    file.write_text("MemAvailable: many kB\n")
    assert available_bytes(file) is None
