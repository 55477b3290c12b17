"""How fast each lane's prompt or answer grows now: its tokens over the last seconds."""

from collections import deque
from typing import Any

SPAN_S = 3.0
Name = tuple[int, float, str]  # lane, when its request got it, phase


class LaneSpeeds:
    def __init__(self) -> None:
        self._seen: dict[Name, deque[tuple[float, int]]] = {}  # when, tokens

    def told(self, lanes: list[dict[str, Any]], now_s: float) -> list[dict[str, Any]]:
        """The lanes of `Engine.figures`, each with `age_s` and `tok_s` (None while there is too little to tell).
        `now_s` is of the clock that `admitted_s` is of."""
        seen, self._seen = self._seen, {}
        found = []
        for lane in lanes:
            name = lane["lane"], lane["admitted_s"], lane["phase"]
            points = self._seen[name] = seen.get(name, deque())
            points.append((now_s, lane["computed_tokens"] + lane["answer_tokens"]))
            while len(points) > 2 and now_s - points[0][0] > SPAN_S:
                points.popleft()
            told = {key: value for key, value in lane.items() if key != "admitted_s"}
            found.append(told | {"age_s": round(now_s - lane["admitted_s"], 1), "tok_s": _speed(points)})
        return found


def _speed(points: deque[tuple[float, int]]) -> float | None:
    (first_s, first), (last_s, last) = points[0], points[-1]
    return round((last - first) / (last_s - first_s), 1) if last_s > first_s and last > first else None
