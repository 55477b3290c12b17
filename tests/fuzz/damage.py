"""How what comes from outside differs from what was written: bytes that changed, values of other kinds and sizes."""

import os
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("TIDE_FUZZ_EXAMPLES", "60"))
FUZZ = settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))

NUMBERS = (0, 1, -1, 7, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
NESTED: list[Any] = []
for _ in range(200):
    NESTED = [NESTED]
ODD: tuple[Any, ...] = (
    *NUMBERS, None, True, False, 0.5, -0.0, 1e300, "", "x", "../../x", "\0", "\ud800", "ü" * 300, [], {}, [0], ["x"],
    [[]], {"": 0}, {"x": {}}, b"", NESTED,
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """One to five changes: a bit, a byte, a number in little-endian, a part that is cut, doubled, swapped or put in."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, max(len(found) - 1, 0)))
        end = min(at + draw(st.sampled_from((1, 2, 4, 8, 16, 100))), len(found))
        match draw(st.integers(0, 6)):
            case 0 if found:
                found[at] ^= 1 << draw(st.integers(0, 7))
            case 1 if found:
                found[at] = draw(st.integers(0, 255))
            case 2:
                size = draw(st.sampled_from((2, 4, 8)))
                number = draw(st.sampled_from((*NUMBERS, len(data), len(data) + 1))) % (1 << 8 * size)
                found[at : at + size] = number.to_bytes(size, "little")
            case 3:
                del found[at:end]
            case 4:
                found[at:at] = found[at:end] * draw(st.sampled_from((1, 3, 50)))
            case 5:
                found[at:at] = draw(st.binary(max_size=16))
            case _:
                del found[at:]
    return bytes(found)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, inner in below:
        yield (*at, name)
        yield from places(inner, (*at, name))


@st.composite
def altered(draw: st.DrawFn, value: Any) -> Any:
    """A copy of a tree of plain values with one to three places gone, doubled, or of another value."""
    found = {"": _copied(value)}
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(list(places(found))))
        holder: Any = found
        for name in at[:-1]:
            holder = holder[name]
        name = at[-1]
        match draw(st.integers(0, 3)):
            case 0 if len(at) > 1:
                del holder[name]
            case 1 if isinstance(holder, list):
                holder.insert(name, holder[name])
            case 2 if isinstance(holder, dict) and len(at) > 1:
                holder[draw(st.text(max_size=5))] = holder.pop(name)
            case _:
                holder[name] = _copied(draw(st.sampled_from(ODD)))
    return found[""]


def _copied(value: Any) -> Any:
    """Lists, objects and plain values of their own; nothing shared with `ODD` is changed later."""
    if isinstance(value, dict):
        return {name: _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list | tuple) else value
