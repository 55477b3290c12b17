"""The flight recorder of a rank: its last steps, written to the state directory when the rank ends by a fault.

One JSON object a line, the oldest first. It holds numbers, request ids and expert ids: no token and no text.
"""

import json
import logging
import threading
from collections import deque
from pathlib import Path
from typing import Any

from tided.control.files import write_private
from tided.control.messages import Admission, Decode, Prefill, Step
from tided.engine.executor import Executor

log = logging.getLogger("tided.engine")

STEPS = 256


class Flight:
    """`path` None: nothing is ever written. `begin` and `end` are the engine's; `dump` may be called by any thread."""

    def __init__(self, path: Path | None = None, steps: int = STEPS) -> None:
        self.path = path
        self._steps: deque[dict[str, Any]] = deque(maxlen=steps)
        self._lock = threading.Lock()
        self._dumped = False

    def begin(self, step: Step) -> None:
        """Before anything of the step is done: one that never ends is seen as well."""
        self._steps.append({"seq": step.seq, **_work(step), **_contexts(step), **_change(step), "done": False})

    def end(self, executor: Executor, digest: str) -> None:
        """The step that was begun last is done on this rank."""
        residents = executor.residents
        self._steps[-1] |= {
            "done": True,
            "generation": executor.plan_version,
            "mask_hash": f"{residents.mask_hash:016x}",
            "reading": residents.reading,
            "digest": digest,
            "ms": {name: round(value, 3) for name, value in executor.parts_ms.items()},
        }

    def lines(self) -> list[dict[str, Any]]:
        return [dict(line) for line in self._steps.copy()]

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


def _work(step: Step) -> dict[str, Any]:
    """`rows`: of the forward, drafts included. `drafts` by lane and `propose` only where there are any."""
    shown: dict[str, Any] = {"work": None, "rows": 0, "release": step.release}
    match step.work:
        case Prefill(lane=lane, start=start, count=count):
            shown |= {"work": "prefill", "rows": count, "lanes": [lane], "start": start}
        case Decode(lanes=lanes, drafts=drafts):
            shown |= {"work": "decode", "rows": len(lanes) + sum(drafts), "lanes": lanes}
            shown |= {"drafts": drafts} if drafts else {}
    if step.work is not None and step.work.propose:
        shown["propose"] = True
    shown["admit"] = [
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
    return shown


def _restored(admission: Admission) -> dict[str, Any]:
    """Ticket and tokens of the snapshot that the lane begins with."""
    restore = admission.restore
    return {"restore": [restore.ticket, restore.tokens]} if restore else {}


def _contexts(step: Step) -> dict[str, Any]:
    """What happens to contexts beside the work; what is empty is left out. Recalls as [ticket, how many keys, lane]."""
    shown = {
        "park": step.park,
        "resume": step.resume,
        "recall": [[recall.ticket, len(recall.keys), recall.lane] for recall in step.recall],
        "forget": step.forget,
        "save": step.save,
    }
    return {name: value for name, value in shown.items() if value}


def _change(step: Step) -> dict[str, Any]:
    """Loads as [ticket, pair, outgoing pair]; what is empty is left out."""
    change = step.change
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
