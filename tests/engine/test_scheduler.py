"""The next step follows from state alone."""

import pytest
from engine_fakes import LIMITS, request

from tided.control.messages import Change, Decode, Load, Prefill, Step
from tided.engine.scheduler import Limits, Scheduler
from tided.errors import QueueFullError


def scheduler(**changes) -> Scheduler:
    return Scheduler(Limits(**({name: getattr(LIMITS, name) for name in Limits.__dataclass_fields__} | changes)))


def works(scheduler: Scheduler, steps: int) -> list[Prefill | Decode | None]:
    taken = [scheduler.next_step() for _ in range(steps)]
    return [step.work if step else None for step in taken]


def test_a_prompt_is_cut_into_chunks_then_decoded():
    s = scheduler()
    s.submit(request("a", prompt=20))
    assert works(s, 4) == [Prefill(0, 0, 8), Prefill(0, 8, 8), Prefill(0, 16, 4), Decode([0])]


def test_a_newcomer_and_a_running_answer_take_turns():
    s = scheduler()
    s.submit(request("a", prompt=3))
    assert works(s, 2) == [Prefill(0, 0, 3), Decode([0])]
    s.submit(request("b", prompt=20))
    assert works(s, 6) == [
        Prefill(1, 0, 8), Decode([0]), Prefill(1, 8, 8), Decode([0]), Prefill(1, 16, 4), Decode([0, 1]),
    ]  # fmt: skip


def test_two_newcomers_take_turns_so_that_a_long_prompt_does_not_hold_up_a_short_one():
    s = scheduler()
    s.submit(request("a", prompt=9))
    s.submit(request("b", prompt=4))
    assert works(s, 4) == [Prefill(0, 0, 8), Prefill(1, 0, 4), Decode([1]), Prefill(0, 8, 1)]


def test_admission_prices_prompt_and_answer_and_keeps_the_order():
    s = scheduler(context_tokens=100, pool_tokens=100)
    s.submit(request("big", prompt=40, max_tokens=30))
    s.submit(request("waits", prompt=30, max_tokens=10))
    s.submit(request("small", prompt=1, max_tokens=1))  # would fit, but must not overtake
    assert [a.request.request_id for a in s.next_step().admit] == ["big"]
    assert s.held_tokens == 70
    assert not s.can_admit()
    s.finish(0)
    step = s.next_step()
    assert (step.release, [a.request.request_id for a in step.admit]) == ([0], ["waits", "small"])


def test_admission_counts_whole_pages():
    s = scheduler(context_tokens=250, pool_tokens=250, page_tokens=128)  # two pages
    s.submit(request("a", prompt=120, max_tokens=9))  # 129 tokens take both
    s.submit(request("b", prompt=1, max_tokens=1))
    assert [a.request.request_id for a in s.next_step().admit] == ["a"]
    s.finish(0)
    s.submit(request("c", prompt=100, max_tokens=28))
    assert [a.request.request_id for a in s.next_step().admit] == ["b", "c"]


def test_can_admit_changes_nothing():
    s = scheduler()
    s.submit(request("a"))
    assert s.can_admit()
    assert s.can_admit()
    assert not s.running


def test_the_queue_is_bounded():
    s = scheduler(lanes=1, queue=2)
    for name in "abc":
        s.submit(request(name))
    with pytest.raises(QueueFullError):
        s.submit(request("d"))
    s.cancel("b")
    s.submit(request("d"))


def test_a_cancelled_queued_request_never_runs():
    s = scheduler(lanes=1)
    for name in "abc":
        s.submit(request(name, prompt=2))
    s.next_step()
    assert s.cancel("b") is not None
    assert s.cancel("b") is None
    s.finish(0)
    assert [a.request.request_id for a in s.next_step().admit] == ["c"]


def test_a_cancelled_running_request_leaves_with_the_next_step():
    s = scheduler()
    s.submit(request("a", prompt=30))
    s.next_step()
    s.cancel("a")
    step = s.next_step()
    assert (step.release, step.work) == ([0], None)
    assert s.held_tokens == 0
    assert s.next_step() is None


def test_a_change_of_the_routable_set_is_a_step_of_its_own_or_goes_with_work():
    s, change = scheduler(), Change(load=[Load(1, (0, 7), (0, 0))])
    assert s.next_step(change) == Step(1, 0, change=change)
    s.submit(request("a", prompt=2))
    step = s.next_step(Change(publish=[1]), moves_residents=True)
    assert (step.plan_version, step.change.publish, step.work) == (1, [1], Prefill(0, 0, 2))
    assert s.next_step().plan_version == 1


def test_digests_are_due_by_the_step_number():
    s = scheduler(guard_every_steps=3)
    s.submit(request("a", prompt=60))
    assert [s.next_step().digest_due for _ in range(6)] == [False, False, True] * 2


def test_rest_is_no_step():
    assert scheduler().next_step() is None


def test_a_pool_smaller_than_a_context_is_refused():
    with pytest.raises(ValueError, match="wait for ever"):
        scheduler(context_tokens=401)
