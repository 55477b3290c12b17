"""Messages between ranks: whatever arrives is one of them, or ends the pair in words."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.damage import FUZZ, altered, damaged
from tided.control import messages as m
from tided.control.wire import decode, encode
from tided.engine.types import ImageSpan, Request, Sampling
from tided.errors import PairError

REQUEST = Request(
    request_id="a", prompt_ids=[1, 2, 3], sampling=Sampling(seed=7, logit_bias={5: 1.0}), max_tokens=9, stop_ids=(1,),
    images=(ImageSpan(1, 1, 14, 14, b"ab" * 8),),
)  # fmt: skip
STEP = m.Step(
    seq=7, plan_version=1, release=[1], admit=[m.Admission(0, REQUEST, m.Restore(3, 2))],
    change=m.Change(publish=[1], promote=[m.Swap((0, 1), (0, 2))], withdraw=[(1, 2)], load=[m.Load(4, (1, 1), None)]),
    work=m.Decode([0, 1], [2, 0], True), recall=[m.Recall(1, ["k"])], masks=[m.Mask(0, b"\x05")],
)  # fmt: skip
MESSAGES: list[m.ControlMessage] = [
    m.Hello(1, {"a": "b"}), m.Welcome("s", [(0, 1)]), m.Refused([("a", "b", "c")]), m.Ready(1, "d"), STEP,
    m.Step(seq=1, plan_version=0, work=m.Prefill(0, 0, 3)), m.Landed(1, [2], [3]), m.Recalled(1, 2, [0], 0),
    m.Digest(1, 7, "d"), m.Stop("s"), m.Heartbeat(1, 7, "s", 5), m.Fault(1, "x"),
]  # fmt: skip
KINDS = tuple(type(message) for message in MESSAGES)


def heard(frames: list[bytes]) -> m.ControlMessage | None:
    try:
        found = decode(frames, "a rank")
    except PairError:
        return None
    assert isinstance(found, KINDS)
    return found


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_a_message(message):
    """Bytes that changed on the way, and fields of other kinds and sizes under a right name."""
    whole = encode(message)
    assert heard([whole]) == message
    fields = msgspec.msgpack.decode(whole)

    @FUZZ
    @given(damaged(whole) | altered(fields).map(packed))
    def tried(data: bytes) -> None:
        found = heard([data])
        if found is not None:
            assert decode([encode(found)], "a rank") == found

    tried()


def packed(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError, UnicodeEncodeError, ValueError):
        return msgspec.msgpack.encode(None)


@FUZZ
@given(st.lists(st.binary(max_size=40), max_size=3))
def test_frames(frames):
    heard(frames)


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 100_000,
        b"\x81\xa4type" * 50_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=["deep arrays", "deep maps", "a long array", "a long map"],
)
def test_what_only_claims_to_be_large(data):
    assert heard([data]) is None
