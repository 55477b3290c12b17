"""Who may send a body: places and bytes are taken before it is read, so that refusing costs neither."""

from collections.abc import Iterator
from contextlib import contextmanager

from tided.api.errors import TooLargeError
from tided.api.ports import Engine
from tided.api.slots import SHORT_BYTES
from tided.errors import RequestError

# Long bodies that may be held at once, in bodies of the largest size. Short ones are bounded by their places.
_LARGEST_BODIES = 4
_DESKS = 64

_NOT_READY = {"starting": "the model is still being loaded", "draining": "the server is shutting down"}


class Admission:
    """Requests between their headers and the engine's queue. With those that the engine has there are never more than
    `lanes` + `queue`: who is admitted finds a place at the end."""

    def __init__(self, engine: Engine, queue: int, body_bytes: int) -> None:
        self._engine, self._queue, self._body_bytes = engine, queue, body_bytes
        self.preparing = self.at_desks = self.held_bytes = 0

    @contextmanager
    def place(self, declared_bytes: int | None) -> Iterator["Place"]:
        """Raises RequestError 503, 429 or 413 when the body is not worth sending."""
        self.check(declared_bytes)
        place = Place(self)
        self.preparing += 1
        try:
            place.hold(declared_bytes or 0)
            yield place
        finally:
            self.preparing -= 1
            self.held_bytes -= place.held_bytes

    @contextmanager
    def desk(self, declared_bytes: int | None) -> Iterator["Place"]:
        """A place for work that needs no lane. Raises RequestError 429 or 413."""
        self._check_size(declared_bytes)
        if self.at_desks >= _DESKS:
            raise _busy(f"{_DESKS} requests of this kind are on their way")
        place = Place(self)
        self.at_desks += 1
        try:
            place.hold(declared_bytes or 0)
            yield place
        finally:
            self.at_desks -= 1
            self.held_bytes -= place.held_bytes

    def check(self, declared_bytes: int | None) -> None:
        health = self._engine.health()
        if (state := health["state"]) != "ready":
            what = _NOT_READY.get(state, f"the engine stopped: {health.get('fault', '')}")
            raise RequestError(what, status=503, kind="server_error", code=state)
        lanes = health["lanes"]
        if lanes["busy"] + health["queue"] + self.preparing >= lanes["total"] + self._queue:
            raise _busy(f"all places are taken ({lanes['total']} lanes, {self._queue} in the queue)")
        self._check_size(declared_bytes)

    def _check_size(self, declared_bytes: int | None) -> None:
        if (declared_bytes or 0) > self._body_bytes:
            raise TooLargeError(self._body_bytes)
        self.check_bytes(declared_bytes or 0)

    def check_bytes(self, more_bytes: int) -> None:
        if more_bytes > SHORT_BYTES and self.held_bytes + more_bytes > _LARGEST_BODIES * self._body_bytes:
            raise _busy("too many long requests are on their way")


class Place:
    """One request's place. It holds bytes from when its body is known to be long until the engine has the prompt."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.held_bytes = 0

    def hold(self, body_bytes: int) -> None:
        """Of a body whose size was not declared: called with what it may become once it is no longer short."""
        if body_bytes > SHORT_BYTES and not self.held_bytes:
            self._admission.check_bytes(body_bytes)
            self.held_bytes = body_bytes
            self._admission.held_bytes += body_bytes


def _busy(what: str) -> RequestError:
    return RequestError(f"{what}; try again in a moment", status=429, kind="rate_limit_error", code="queue_full")
