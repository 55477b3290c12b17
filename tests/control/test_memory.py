"""When a rank gives memory up, and when it ends: by what is free and since when, and by nothing else."""

import asyncio

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
    free, shed, ended = iter([100, 40, 40, 9, 9, 9, 9]), [], []
    left = [7, 0, 3, 0, 0, 0]

    def give() -> int:
        shed.append(left.pop(0))
        return shed[-1]

    await asyncio.wait_for(watch(Limits(50, 10, 0.02), give, ended.append, lambda: next(free), every_s=0.011), 20)
    assert ended == [9]
    assert shed[:3] == [7, 0, 3]


def test_this_machine_tells():
    assert 0 < available_bytes() < total_bytes()


def test_a_file_that_says_nothing_is_nothing(tmp_path):
    file = tmp_path / "meminfo"
    assert available_bytes(file) is None
    file.write_text("MemAvailable: many kB\n")
    assert available_bytes(file) is None
