"""The flight recorder of a rank: its last steps, written to the state directory when the rank ends by a fault.

One JSON object a line, the oldest first. It holds numbers, request ids and expert ids: no token and no text.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tided.control.messages import Admission, Change, Decode, Prefill, Step
from tided.engine.executor import Executor
from tided.files import write_private

log = logging.getLogger("tided.engine")

STEPS = 256


class Begun(NamedTuple):
    """What a step was to do. Of most steps that is their work alone, which is put into words when somebody reads it;
    `more`, the rest, is told at once, and the step let go: it may hold a prompt, or what a grammar allows."""

    seq: int
    work: Prefill | Decode | None
    release: list[int]
    more: dict[str, Any]


class Ended(NamedTuple):
    """What a step left behind."""

    generation: int
    mask_hash: int
    reading: int
    digest: str
    parts_ms: Mapping[str, float]


class Flight:
    """`path` None: nothing is ever written. `begin` and `end` are the engine's; `dump` may be called by any thread."""

    def __init__(self, path: Path | None = None, steps: int = STEPS) -> None:
        self.path = path
        self._steps: deque[tuple[Begun, Ended | None]] = deque(maxlen=steps)
        self._lock = threading.Lock()
        self._dumped = False

    def begin(self, step: Step) -> None:
        """Before anything of the step is done: one that never ends is seen as well."""
        more = _contexts(step) | _admitted(step) | (_change(step.change) if step.change else {})
        self._steps.append((Begun(step.seq, step.work, step.release, more), None))

    def end(self, executor: Executor, digest: str) -> None:
        """The step that was begun last is done on this rank."""
        residents = executor.residents
        ended = Ended(executor.plan_version, residents.mask_hash, residents.reading, digest, executor.parts_ms)
        self._steps[-1] = self._steps[-1][0], ended

    def lines(self) -> list[dict[str, Any]]:
        return [_line(begun, ended) for begun, ended in self._steps.copy()]

    def dump(self, fault: str) -> None:
        """Once. Never raises: it must not hide the fault that it tells of."""
        with self._lock:
            if self.path is None or self._dumped or not self._steps:
                return
            self._dumped = True
            text = "".join(f"{json.dumps(line)}\n" for line in [*self.lines(), {"fault": fault}])
            try:
                write_private(self.path, text.encode())
            except OSError as error:
                log.error("the flight recorder cannot be written to %s: %s", self.path, error)
            else:
                log.info("the last %d steps are in %s", len(self._steps), self.path)


def flight_path(state_dir: Path, rank: int) -> Path:
    return state_dir / f"flight-{rank}.jsonl"


def _line(begun: Begun, ended: Ended | None) -> dict[str, Any]:
    shown = {"seq": begun.seq, **_work(begun.work), "release": begun.release, **begun.more, "done": ended is not None}
    if ended is None:
        return shown
    return shown | {
        "generation": ended.generation,
        "mask_hash": f"{ended.mask_hash:016x}",
        "reading": ended.reading,
        "digest": ended.digest,
        "ms": {name: round(value, 3) for name, value in ended.parts_ms.items()},
    }


def _work(work: Prefill | Decode | None) -> dict[str, Any]:
    """`rows`: of the forward, drafts included. `drafts` by lane and `propose` only where there are any."""
    match work:
        case Prefill(lane=lane, start=start, count=count):
            shown: dict[str, Any] = {"work": "prefill", "rows": count, "lanes": [lane], "start": start}
        case Decode(lanes=lanes, drafts=drafts):
            shown = {"work": "decode", "rows": len(lanes) + sum(drafts), "lanes": lanes}
            shown |= {"drafts": drafts} if drafts else {}
        case None:
            shown = {"work": None, "rows": 0}
    return shown | ({"propose": True} if work is not None and work.propose else {})


def _admitted(step: Step) -> dict[str, Any]:
    if not step.admit:
        return {}
    admitted = [
        {
            "lane": admission.lane,
            "request": admission.request.request_id,
            "prompt_tokens": len(admission.request.prompt_ids),
            "max_tokens": admission.request.max_tokens,
            "fidelity": admission.request.fidelity,
            **_restored(admission),
        }
        for admission in step.admit
    ]
    return {"admit": admitted}


def _restored(admission: Admission) -> dict[str, Any]:
    """Ticket and tokens of the snapshot that the lane begins with."""
    restore = admission.restore
    return {"restore": [restore.ticket, restore.tokens]} if restore else {}


def _contexts(step: Step) -> dict[str, Any]:
    """What happens to contexts beside the work; what is empty is left out. Recalls as [ticket, how many keys, lane]."""
    if not (step.park or step.resume or step.recall or step.forget or step.save):
        return {}
    shown = {
        "park": step.park,
        "resume": step.resume,
        "recall": [[recall.ticket, len(recall.keys), recall.lane] for recall in step.recall],
        "forget": step.forget,
        "save": step.save,
    }
    return {name: value for name, value in shown.items() if value}


def _change(change: Change) -> dict[str, Any]:
    """Loads as [ticket, pair, outgoing pair]; what is empty is left out."""
    shown = {
        "load": [[load.ticket, load.pair, load.out] for load in change.load],
        "publish": change.publish,
        "promote": [[swap.out, swap.in_] for swap in change.promote],
        "withdraw": change.withdraw,
        "give_up": change.give_up,
        "adopt": change.adopt,
        "resize": [change.resize.residents, change.resize.evict] if change.resize else [],
    }
    return {name: value for name, value in shown.items() if value}
