"""Whatever arrives, in whatever order: each request ends once, its tokens are those it gets alone, both ranks agree."""

import threading

import pytest
from engine_fakes import LIMITS, Bench, Wire, follower, request, tokens_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tided.engine.types import Failed, Finished, Started

asked = st.tuples(st.just("ask"), st.integers(1, 40), st.integers(1, 12), st.sampled_from([0.0, 0.8]))
operations = st.lists(
    st.one_of(asked, st.tuples(st.just("cancel"), st.integers(0, 30)), st.tuples(st.just("turn"), st.integers(1, 6))),
    max_size=40,
)


def alone(one) -> list[int]:
    bench = Bench()
    bench.submit(one)
    bench.finish()
    return bench.tokens(one.request_id)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations)
def test_any_traffic(operations):
    wire, faults = Wire(), []
    other = follower(wire, faults)
    thread = threading.Thread(target=other.run, daemon=True)
    thread.start()
    bench, requests = Bench(link=wire), []
    for operation, *values in operations:
        if operation == "ask":
            prompt, answer, temperature = values
            requests.append(request(f"r{len(requests)}", prompt, answer, temperature=temperature, seed=len(requests)))
            bench.submit(requests[-1])
        elif operation == "cancel":
            bench.cancel(f"r{values[0]}")
        else:
            bench.turn(values[0])
    bench.finish()
    bench.engine.close("done")
    bench.engine.run()
    thread.join(20)
    assert not thread.is_alive()
    assert (faults, bench.faults, other.seq) == ([], [], bench.engine.seq)
    assert bench.model.open == other.executor.model.open == []
    for one in requests:
        told = [event for event in bench.events if event.request_id == one.request_id]
        assert sum(isinstance(event, Finished | Failed) for event in told) == 1
        if isinstance(told[-1], Failed):
            assert len(told) == 1
            continue
        tokens, expected = tokens_of(told, one.request_id), alone(one)
        assert tokens == (expected if told[-1].reason == "length" else expected[: len(tokens)])
        assert told[-1].completion_tokens == len(tokens)
        assert not tokens or isinstance(told[0], Started)


@pytest.mark.parametrize("lanes", [1, LIMITS.lanes])
def test_lanes_are_used_again(lanes):
    bench = Bench(limits=type(LIMITS)(**(vars(LIMITS) | {"lanes": lanes})))
    for number in range(9):
        bench.submit(request(f"r{number}", max_tokens=2))
        bench.finish()
    assert {admission.lane for step in bench.link.sent for admission in step.admit} == set(range(lanes))
