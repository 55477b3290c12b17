"""What must have come before a freed slot is written to."""

import pytest
import torch

from tided.experts.landing import Fences


class Event:
    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.come, self.records = False, 0

    def record(self, stream) -> None:
        self.come, self.records = False, self.records + 1

    def query(self) -> bool:
        return self.come


@pytest.fixture
def fences(monkeypatch) -> Fences:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Event, "made", 0)
    return Fences(torch.device("cuda"))


def test_slots_of_one_change_wait_for_one_event_each_once(fences):
    fences.put([3, 4])
    event = fences.take(3)
    assert event is not None
    assert fences.take(3) is None
    assert fences.take(5) is None
    assert fences.take(4) is event
    assert (event.records, Event.made) == (1, 1)


def test_while_the_oldest_has_not_come_another_is_made(fences):
    fences.put([3])
    fences.put([4])
    first, second = fences.take(3), fences.take(4)
    assert first is not second
    assert (first.records, second.records) == (1, 1)


def test_one_that_has_come_is_set_again_and_what_it_stood_for_is_over(fences):
    fences.put([3, 5])
    event = fences.take(3)
    event.come = True
    fences.put([4])
    assert fences.take(5) is None, "it would wait for work that never read it"
    assert fences.take(4) is event
    assert (event.records, Event.made) == (2, 1)


def test_a_slot_that_is_freed_again_waits_for_the_last_time(fences):
    fences.put([3])
    first = fences._marks[0].event
    fences.put([3])
    first.come = True
    assert fences.take(3) not in (None, first)


def test_they_are_set_again_in_the_order_they_come_in(fences):
    for slot in range(3):
        fences.put([slot])
    events = [mark.event for mark in fences._marks]
    for slot in range(3, 6):
        events[slot - 3].come = True
        fences.put([slot])
    assert [fences.take(slot) for slot in range(3, 6)] == events
    assert Event.made == 3
