"""The loop's side of a rank: HTTP, heartbeats, signals, the service manager. The engine thread's side is `tided.boot`.

    checking -> loading -> joining -> loading -> ready -> draining -> stopped, or failed from anywhere

What happens first ends the rank: the engine's own end, a lost peer, or a request to stop.
"""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from tided.control.heartbeat import Heartbeats
from tided.control.keys import Keys
from tided.control.memory import Limits, watch
from tided.control.notify import Notifier
from tided.control.operator import AskBudget, OperatorSocket
from tided.control.progress import Progress
from tided.control.state import Phase, StateFile
from tided.engine.types import Event
from tided.errors import PairError, TideError, UnavailableError, told
from tided.settings import Settings

if TYPE_CHECKING:  # at run time they are imported when they are needed: torch takes seconds
    from tided.engine.budget import Forecast
    from tided.engine.core import Engine
    from tided.engine.leader import LeaderEngine
    from tided.front import Front

log = logging.getLogger("daemon")

FAULT_SHOWN_S = 1.0  # how long /health tells of a fault before the process ends
CLOSE_S = 3.0  # for replies under way
ENGINE_END_S = 10.0  # for the step in progress
WATCH_S = 1.0  # longest between two looks at the engine
START_MORE_S = 60.0  # asked of the service manager at each sign of progress, beside the longest wait for other ranks
TURN_S = 5.0  # an engine's loop comes round every second when it has nothing to do, and may be late
STOP_MORE_S = 10.0  # the same at a stop, beside all that is waited for


class Daemon:
    """The loop's side of a rank. Made and run on the loop; `LoopSide` of `tided.boot` for the engine thread."""

    def __init__(self, settings: Settings, rank: int, keys: Keys | None, state: StateFile, profile: str = "") -> None:
        """`profile`: its name, for who asks."""
        self._settings, self._rank, self._keys, self._state, self._profile = settings, rank, keys, state, profile
        self._notifier = Notifier()
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[TideError | None] = self._loop.create_future()
        self._stop = asyncio.Event()
        self._engine: Engine | None = None
        self._leader: LeaderEngine | None = None  # the same, on rank 0
        self._heartbeats: Heartbeats | None = None
        self._front: Front | None = None
        self._operator: OperatorSocket | None = None
        self._thread: threading.Thread | None = None
        self._progress = Progress(time.monotonic())

    # Called by the engine thread

    def tell(self, message: str, done: int = 0, total: int = 0) -> None:
        self._soon(self._show, "joining" if message == "handshake" else "loading", message, done, total)

    def joined(self, session: str) -> None:
        if self._keys is not None:
            start = asyncio.run_coroutine_threadsafe(self._start_heartbeats(session, self._keys), self._loop)
            start.result(ENGINE_END_S)

    def ready(self, engine: "Engine") -> None:
        self._soon(self._serve, engine)

    def events(self, events: Sequence[Event]) -> None:
        if self._front is not None:
            self._front.client.post(events)

    def ended(self, error: TideError | None) -> None:
        self._soon(self._conclude, error)

    def _soon(self, function: object, *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]

    # On the loop

    async def run(self) -> TideError | None:
        """Until the rank ends: by request (None) or by an error."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        watches = [
            asyncio.create_task(self._whole("the watch over the engine", self._watch_engine)),
            asyncio.create_task(self._whole("the watch over this node's memory", self._watch_memory)),
        ]
        await self._whole("the loop", self._live)
        for task in watches:
            task.cancel()
        error = self._outcome.result() if self._outcome.done() else None
        await self._end(error)
        return error

    async def _whole(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """What a rank does not live without: an error of it ends the rank. A watch that failed would see nothing."""
        try:
            await work()
        except TideError as fault:
            self._conclude(fault)
        except Exception as fault:
            log.exception("%s failed", what)
            self._conclude(TideError(f"{what} failed: {told(fault)}", hint="the log has the trace"))

    @property
    def engine_is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    async def _live(self) -> None:
        if self._rank == 0:
            from tided.front import Front

            self._front = await Front.open(self._settings, self._profile)
            self._operator = await self._open_operator()
            self._show("loading", "libraries")
        self._start_engine()
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((self._outcome, stop), return_when=asyncio.FIRST_COMPLETED)
        if not self._outcome.done():
            await self._stop_in_order()
        stop.cancel()

    async def _open_operator(self) -> OperatorSocket:
        try:
            return await OperatorSocket.open(self._state.path.parent, self._answer_operator)
        except OSError as error:
            where = str(self._state.path.parent)
            raise UnavailableError(f"no control socket can be made ({error.strerror})", where=where) from error

    async def _answer_operator(self, asked: AskBudget) -> "Forecast":
        assert self._front is not None
        return await self._front.client.budget(asked.resident, asked.nbytes, asked.apply)

    def _start_engine(self) -> None:
        self._thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        self._thread.start()

    def _run_engine(self) -> None:
        """torch and all that computes with it take seconds to import: here, off the loop."""
        try:
            from tided.boot import LoopSide, run_rank
        except ImportError as error:
            log.exception("a library cannot be loaded")
            which = error.name or told(error)  # its own words hold paths
            return self.ended(UnavailableError(f"a library cannot be loaded: {which}", hint="install TideLM again"))
        loop_side: LoopSide = self
        return run_rank(self._settings, self._rank, self._keys, self._state.path.parent, loop_side)

    async def _start_heartbeats(self, session: str, keys: Keys) -> None:
        self._heartbeats = Heartbeats(
            self._settings,
            self._rank,
            keys,
            session,
            lambda: self._engine.seq if self._engine else 0,
            self._conclude,
            self._stop.set,
        )
        self._heartbeats.start()
        if self._front is not None:
            self._front.client.peer_bytes = self._heartbeats.peer_bytes

    def _serve(self, engine: "Engine") -> None:
        from tided.engine.leader import LeaderEngine

        if self._outcome.done():
            return
        self._engine = engine
        if self._front is not None and isinstance(engine, LeaderEngine):
            self._leader = engine
            self._front.client.attach(engine)
        server = self._settings.server
        self._show("ready", f"http://{server.host}:{server.port}" if self._rank == 0 else "")
        self._notifier.ready()

    def _reload(self) -> None:
        """What may change while a rank serves: rank 0's API keys. They are looked at every second anyway; here at once,
        and whether or not their file changed."""
        if self._engine is None or self._stop.is_set() or self._outcome.done():
            return log.info("asked to reload while not serving: the next start reads what is new")
        self._notifier.reloading()
        if self._front is not None:
            self._front.reload()
        log.info("reloaded; a changed profile counts from the next start on")
        return self._notifier.ready()

    def _show(self, phase: Phase, message: str, done: int = 0, total: int = 0) -> None:
        """In the state file, to the service manager; in the log when the phase is new."""
        if phase != self._state.state.phase:
            log.info("%s %s", phase, message)
        port = self._settings.server.port if self._rank == 0 else 0
        self._state.enter(phase, message, done=done, total=total, port=port)
        self._notifier.status(f"{phase} {message}")
        if phase in ("joining", "loading"):
            self._notifier.more_time(self._settings.parallel.start_timeout_s + START_MORE_S)

    def _conclude(self, error: TideError | None) -> None:
        """The first word counts: what follows is its consequence."""
        if not self._outcome.done():
            self._outcome.set_result(error)

    async def _stop_in_order(self) -> None:
        """Rank 0 lets running requests finish and takes the others along; they wait for it, or for its silence, which
        the heartbeats judge. A rank that still loads has nothing to finish: it ends, and so do the others."""
        drain_s = self._settings.server.drain_s
        self._notifier.stopping()
        self._notifier.more_time(drain_s + ENGINE_END_S + FAULT_SHOWN_S + CLOSE_S + STOP_MORE_S)
        if self._engine is None:
            if self._heartbeats is not None:
                await self._heartbeats.stop(f"rank {self._rank} was asked to stop while it was loading")
            return
        if self._front is None or self._leader is None:
            self._show("draining", "until rank 0 has finished")
            await asyncio.wait((self._outcome,))
            return
        self._show("draining", f"at most {drain_s:g} s")
        await self._or_outcome(self._front.client.drain(drain_s))
        if self._outcome.done():
            return
        if self._heartbeats is not None:
            await self._heartbeats.stop("rank 0 was asked to stop")
        self._leader.close("stopped")
        await asyncio.wait((self._outcome,), timeout=ENGINE_END_S)
        self._conclude(PairError("the engine does not end"))

    async def _or_outcome(self, work: Awaitable[None]) -> None:
        """Waits for the work, or for the end of the rank if that comes first."""
        task = asyncio.ensure_future(work)
        await asyncio.wait((task, self._outcome), return_when=asyncio.FIRST_COMPLETED)
        task.cancel()

    async def _end(self, error: TideError | None) -> None:
        if error is not None:
            log.error("%s", error)
            self._state.enter("failed", str(error), exit_code=error.exit_code)
            self._notifier.status(f"failed: {error.what}")
            if self._engine is not None:  # its thread may hang in a collective, and will not do it
                self._engine.flight.dump(error.what)
            if self._heartbeats is not None:
                await self._heartbeats.fault(error.what)
            await self._show_fault(error)
        if self._operator is not None:
            await self._operator.close()
        if self._front is not None:
            await self._front.close(CLOSE_S)
        if self._heartbeats is not None:
            await self._heartbeats.close()
        if error is None:
            self._state.enter("stopped", exit_code=0)
            log.info("stopped")

    async def _show_fault(self, error: TideError) -> None:
        """Open requests end with an error event; a moment in which clients and probes can see what happened."""
        if self._front is not None and self._front.client.state != "starting":
            self._front.client.fail_all(error.what)
            await asyncio.sleep(FAULT_SHOWN_S)

    # The node's memory

    async def _watch_memory(self) -> None:
        """From the start on: a load that takes more than was foreseen is ended too."""
        memory = self._settings.memory
        limits = Limits(memory.shed_below_bytes, memory.exit_below_bytes, memory.exit_after_s)
        await watch(limits, self._shed, self._end_for_memory)

    def _shed(self) -> int:
        return self._engine.executor.caching.prefixes.shed() if self._engine is not None else 0

    def _end_for_memory(self, free_bytes: int) -> None:
        limit = self._settings.memory
        self._conclude(
            UnavailableError(
                f"the memory of rank {self._rank}'s node runs out: {free_bytes / 1e9:.2f} GB are free, less than "
                f"{limit.exit_below_bytes / 1e9:.2f} for {limit.exit_after_s:g} s",
                hint="`ps -eo rss,args --sort -rss | head` shows who took it; lower experts.resident, or raise "
                "memory.reserve_bytes, so that there is room for both (`tidectl plan`)",
            )
        )

    # The engine's progress, and the service manager's watchdog

    async def _watch_engine(self) -> None:
        """Ends the rank when its engine hangs. The service manager hears from this task alone: while the loop runs, the
        engine's own loop comes round and, where there is work, makes steps, each within the time that a step may
        take."""
        limit_s, watchdog_s = self._settings.parallel.step_timeout_s, self._notifier.watchdog_s
        every_s = min(WATCH_S, limit_s / 4, watchdog_s / 3 or WATCH_S)
        while True:
            stalled_s = self._stalled_s()
            if stalled_s > limit_s:
                self._conclude(self._stuck(stalled_s))
            elif self._engine is None or self.engine_is_alive:
                self._notifier.alive()
            await asyncio.sleep(every_s)

    def _stalled_s(self) -> float:
        """0 before the engine serves: until then the service manager has its start limit."""
        if self._engine is None:
            return 0.0
        seq, now_s = self._engine.seq, time.monotonic()
        return max(self._progress.stalled_s(seq, self._has_work(seq), now_s), now_s - self._engine.turned_s - TURN_S)

    def _has_work(self, seq: int) -> bool:
        """On rank 0: a request is open, or another rank is behind. On the others: rank 0 is ahead."""
        peers = self._heartbeats.peer_seq if self._heartbeats is not None else {}
        if self._front is None:
            return peers.get(0, 0) > seq
        return bool(self._front.client.health()["busy"]) or any(behind < seq for behind in peers.values())

    def _stuck(self, stalled_s: float) -> PairError:
        """Names the rank that is behind. Where none is, all wait for one that hangs in the step, and only the traces
        in their logs tell which."""
        seq = self._engine.seq if self._engine is not None else 0
        peers = self._heartbeats.peer_seq if self._heartbeats is not None else {}
        rank, at = min(((rank, at) for rank, at in peers.items() if at < seq), default=(self._rank, seq))
        where = (
            f"it stands at step {at}, rank {self._rank} at step {seq}" if rank != self._rank else f"after step {seq}"
        )
        return PairError(
            f"rank {rank}'s engine makes no step since {stalled_s:.1f} s; {where}",
            hint="every rank's log shows where its threads stood; a longer step needs a longer parallel.step_timeout_s",
        )
