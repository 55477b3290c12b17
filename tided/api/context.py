"""What every handler needs, made once when the application is built."""

import time
from collections import deque
from dataclasses import dataclass, field, replace
from hashlib import sha256
from statistics import median

from aiohttp import web

from packers.overlay import Overlay
from tided.api.admission import Admission
from tided.api.answers import Answers
from tided.api.auth import KeyRing
from tided.api.generation import Generation
from tided.api.images import Images
from tided.api.ports import Engine, Limits
from tided.api.served import ServedModel
from tided.api.slots import Slots
from tided.api.viewers import Viewers

_RETRY_MOST_S, _RETRY_DRAINING_S = 60, 30


@dataclass(frozen=True)
class Context:
    """`fingerprint` changes with weights and numbers. `overlay`: under which the model is served. `profile`: its
    name, empty where there is none."""

    engine: Engine
    served: ServedModel
    keys: KeyRing
    limits: Limits
    admission: Admission
    slots: Slots
    images: Images
    viewers: Viewers
    fingerprint: str
    overlay: Overlay | None = None
    profile: str = ""
    started_s: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    request_times_s: deque[float] = field(default_factory=lambda: deque([1.0], maxlen=32))

    def served_to(self, note: "Note") -> ServedModel:
        """The model as one client knows it. With several keys each has a prompt cache of its own: how soon an answer
        begins tells what others have asked. Whose an answer is stays known when keys come and go."""
        apart = self.keys.count > 1 and not self.served.settings.server.shared_cache
        return replace(
            self.served,
            tenant=_named("prompt cache", note.key) if apart else "",
            asker=_named("answers", note.key) if note.key else "",
        )

    def retry_after_s(self) -> int:
        """When a refused client may try again: the time in which the queue before it should be done."""
        health = self.engine.health()
        if health["state"] == "draining":
            return _RETRY_DRAINING_S
        waiting_s: float = median(self.request_times_s) * (health["queue"] + 1) / health["lanes"]["total"]
        return max(1, min(_RETRY_MOST_S, round(waiting_s)))


def _named(what: str, key: str) -> str:
    return sha256(f"{what} of {key}".encode()).hexdigest()[:32]


@dataclass
class Note:
    """What the log line of a request will tell: never a text. Of `key`, the digest of its key, six digits are told."""

    request_id: str
    outcome: str = ""
    key: str = ""
    generation: Generation | Answers | None = None


CONTEXT: web.AppKey[Context] = web.AppKey("context", Context)
NOTE: web.RequestKey[Note] = web.RequestKey("note", Note)
