"""The step loop of a rank, on a thread of its own that owns the device, the model and the lanes.

Rank 0 (`LeaderEngine`, in `tided.engine.leader`): take in requests and cancellations, decide a step, send it, execute
it, tell the loop, account. Others (`FollowerEngine`): receive a step, execute it. An idle pair sends nothing and spins
nowhere: rank 0 sleeps on its inbox, the others on the link. An error anywhere in a step ends the engine: the ranks no
longer hold the same state.
"""

import logging
import threading
import time
from collections.abc import Callable

import torch

from tided.control.messages import Step, Stop
from tided.engine.executor import Executor
from tided.engine.flight import Flight
from tided.engine.lane import Outcome
from tided.engine.ports import FollowerLink
from tided.errors import PairError, RequestError, TideError, told

log = logging.getLogger("tided.engine")

IDLE_WAIT_S = 1.0  # longest sleep on an inbox or a link before the stop flag is looked at
LANDING_WAIT_S = 0.01  # the same while reads are under way
REST_AFTER_S = 1.0  # without a step: who asks again at once is not kept waiting by what is done at rest
OnFault = Callable[[TideError], None]


class Engine:
    """`run` is the thread's target. `seq`, `last_step_s` and `turned_s` (the loop came round last) are read by other
    threads. An idle loop comes round every `IDLE_WAIT_S`: what stands still is stuck, with work or without."""

    def __init__(self, executor: Executor, on_fault: OnFault, threads: int = 1) -> None:
        self.executor = executor
        self.last_step_s = self.turned_s = time.monotonic()
        self.flight = Flight()
        self._on_fault, self._threads = on_fault, threads

    @property
    def seq(self) -> int:
        """The last step this rank finished."""
        return self.executor.seq

    def run(self) -> None:
        torch.set_num_threads(self._threads)  # counts for the calling thread
        try:
            self._loop()
        except Exception as error:
            log.exception("the engine ends at step %d", self.seq + 1)
            self._end(as_fault(error, self.seq + 1))

    def _execute(self, step: Step) -> Outcome:
        self.flight.begin(step)
        outcome = self.executor.execute(step)
        self.flight.end(self.executor, outcome.digest)
        self.last_step_s = time.monotonic()
        return outcome

    def _end(self, fault: TideError) -> None:
        self.flight.dump(fault.what)
        self._on_fault(fault)

    def _loop(self) -> None:
        raise NotImplementedError


def as_fault(error: Exception, seq: int) -> TideError:
    if isinstance(error, TideError) and not isinstance(error, RequestError):
        return error
    return PairError(f"step {seq} failed: {told(error)}", hint="the log of this rank has the trace")


class FollowerEngine(Engine):
    def __init__(self, executor: Executor, link: FollowerLink, on_fault: OnFault, threads: int = 1) -> None:
        super().__init__(executor, on_fault, threads)
        self._link = link
        self._stopping = threading.Event()

    def close(self) -> None:
        """Ends the loop after the step in progress; thread-safe."""
        self._stopping.set()

    def _loop(self) -> None:
        checked = 0
        while not self._stopping.is_set():
            self.turned_s = time.monotonic()
            reading = self.executor.residents.reading or self.executor.caching.recalling
            message = self._link.receive(LANDING_WAIT_S if reading else IDLE_WAIT_S)
            if isinstance(message, Stop):
                return
            if isinstance(message, Step):
                outcome = self._execute(message)
                if message.digest_due:
                    self._link.report(message.seq, outcome.digest)
                self._tell_reads()
            elif reading:
                self._tell_reads()
            elif checked != self.seq:  # the pair rests: verify the books once
                self.executor.check()
                checked = self.seq

    def _tell_reads(self) -> None:
        for answer in self.executor.caching.answers():
            self._link.recalled(*answer)
        landed, failed = self.executor.residents.landed(), self.executor.residents.failed()
        if landed or failed:
            self._link.landed(landed, failed)
