"""Who is alive (contract C10): every rank's loop beats, and a silent, failed or vanished peer ends the pair in seconds.

Starts when the handshake is done, so that a rank that dies while it loads is seen too. Rank 0 hears all, the others
hear rank 0; rank 0 passes a failure on to the rest. The loop beats, not the engine: an engine that computes for long is
alive, one that ended says so by a Fault. (An engine that hangs is found by the steps that it does not make:
`tided.control.progress`.)
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from tided.control import wire
from tided.control.keys import Keys
from tided.control.memory import available_bytes
from tided.control.messages import ControlMessage, Fault, Heartbeat, Stop
from tided.errors import PairError, told
from tided.settings import Settings

log = logging.getLogger("heartbeat")

FAULT_CHARACTERS = 2000
STOP_GRACE_S = 15.0

OnFailure = Callable[[PairError], None]
OnStop = Callable[[], None]


class Heartbeats:
    """One rank's beats and its watch over its peers. Lives in the loop.

    `engine_seq` is asked at each beat; `on_failure` is called once, with the first failure, and watching ends.
    `on_stop` is called when another rank says that the ranks end in order.
    `peer_seq`: the last step that each peer's engine reported; `peer_bytes`: the memory that its node could still give.
    """

    def __init__(
        self,
        settings: Settings,
        rank: int,
        keys: Keys,
        session: str,
        engine_seq: Callable[[], int],
        on_failure: OnFailure,
        on_stop: OnStop,
    ) -> None:
        parallel = settings.parallel
        self._interval_s, self._timeout_s = parallel.heartbeat_s, parallel.peer_timeout_s
        self._rank, self._session = rank, session
        self._engine_seq, self._on_failure, self._on_stop = engine_seq, on_failure, on_stop
        self._context = zmq.asyncio.Context()
        self._connection_of: dict[int, bytes] = {}  # rank 0 only: followers that beat, and by which connection
        self._zap: AsyncioAuthenticator | None = None
        self._monitor: zmq.asyncio.Socket | None = None  # others only: tells when rank 0 hangs up
        self._connected = False
        self._socket = self._listen(settings, keys) if rank == 0 else self._connect(settings, keys)
        self._socket.sndtimeo = 0  # the loop never waits for a peer
        others = range(1, parallel.ranks) if rank == 0 else range(1)
        self.peer_seq = dict.fromkeys(others, 0)
        self.peer_bytes: dict[int, int] = {}
        self._heard = dict.fromkeys(others, time.monotonic())
        self._task: asyncio.Task[None] | None = None

    def _listen(self, settings: Settings, keys: Keys) -> zmq.asyncio.Socket:
        self._zap = AsyncioAuthenticator(self._context)
        self._zap.start()
        wire.allow_followers(self._zap, keys)
        return wire.listen(self._context.socket(zmq.ROUTER), keys, wire.endpoint(settings.parallel, offset=1))

    def _connect(self, settings: Settings, keys: Keys) -> zmq.asyncio.Socket:
        dealer = self._context.socket(zmq.DEALER)
        self._monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        identity = f"{self._rank}.{secrets.token_hex(8)}".encode()
        return wire.connect(dealer, keys, wire.endpoint(settings.parallel, offset=1), identity, wire.SMALL_BYTES)

    def start(self) -> None:
        self._heard = dict.fromkeys(self._heard, time.monotonic())
        self._task = asyncio.create_task(self._watch(), name="heartbeats")

    async def fault(self, message: str) -> None:
        """This rank's last word: its engine ended by an error. Others end at once instead of waiting for silence."""
        await self._end_task()
        await self._send(Fault(self._rank, message[:FAULT_CHARACTERS]))

    async def stop(self, reason: str) -> None:
        """An orderly end: what the peers no longer send from here on is no failure, nor is this rank's own silence one
        to them. Once they serve, rank 0 alone says it, and the others never end before it does; a rank that is stopped
        while it loads says it too, and rank 0 passes it on by stopping."""
        await self._end_task()
        await self._send(Stop(reason))

    async def close(self) -> None:
        await self._end_task()
        if self._monitor is not None:
            self._socket.disable_monitor()
        self._socket.close(wire.LINGER_MS)
        if self._zap is not None:
            self._zap.stop()
        # term() waits for last words; the loop must not
        await asyncio.to_thread(self._context.destroy, wire.LINGER_MS)

    async def _end_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _watch(self) -> None:
        """A watch that fails by itself is a failure too: unwatched ranks would hang unseen."""
        try:
            while True:
                memory = available_bytes() or 0
                gone = await self._send(Heartbeat(self._rank, self._engine_seq(), self._session, memory))
                if not await self._listen_for(0.0 if gone else self._interval_s):
                    self._on_stop()
                    await asyncio.sleep(STOP_GRACE_S)  # in which this rank ends too, and this task with it
                    raise PairError("another rank stopped, and this rank's engine did not")
                if gone:
                    raise gone
                self._check_silence()
        except PairError as failure:
            await self._fail(failure)
        except Exception as error:
            log.exception("the heartbeats failed")
            await self._fail(PairError(f"the heartbeats failed: {told(error)}", hint="the log has the trace"))

    async def _fail(self, failure: PairError) -> None:
        self._on_failure(failure)
        if self._rank == 0:
            await self._send(Fault(0, str(failure)[:FAULT_CHARACTERS]))

    async def _listen_for(self, seconds: float) -> bool:
        """Reads what comes until the time is over, and whatever waits by then: silence is judged after reading, so a
        pause of this process is not mistaken for one of its peers. False when the pair ends in order."""
        deadline = time.monotonic() + seconds
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            if not await self._readable(left_s):
                if left_s == 0.0:
                    return True
                continue
            if not self._take(await self._socket.recv_multipart()):
                return False

    async def _readable(self, timeout_s: float) -> bool:
        poller = zmq.asyncio.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if self._monitor is not None:
            poller.register(self._monitor, zmq.POLLIN)
        ready = dict(await poller.poll(int(timeout_s * 1000)))
        if self._socket in ready:
            return True  # last words before the news that the speaker has gone
        if self._monitor in ready:
            await self._read_monitor()
        return False

    async def _read_monitor(self) -> None:
        assert self._monitor is not None
        event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
        if event == zmq.EVENT_DISCONNECTED and self._connected:
            raise PairError("rank 0 hung up")
        self._connected |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def _take(self, frames: list[bytes]) -> bool:
        connection, payload = (frames[0], frames[1:]) if self._rank == 0 else (b"", frames)
        message = wire.decode(payload, "a rank" if self._rank == 0 else "rank 0")
        if isinstance(message, Heartbeat):
            self._note(connection, message)
        elif isinstance(message, Fault):
            raise PairError(f"rank {message.rank} ended: {message.message}")
        elif isinstance(message, Stop):
            return False
        else:
            raise _unexpected(message)
        return True

    def _note(self, connection: bytes, beat: Heartbeat) -> None:
        if beat.session != self._session:
            return  # of an earlier start; it will notice that its own peers are gone
        if beat.rank not in self._heard:
            raise PairError(f"a heartbeat names rank {beat.rank}")
        self._heard[beat.rank], self.peer_seq[beat.rank] = time.monotonic(), beat.engine_seq
        self.peer_bytes[beat.rank] = beat.available_bytes
        if self._rank == 0:
            self._connection_of[beat.rank] = connection

    def _check_silence(self) -> None:
        now = time.monotonic()
        for rank, heard in self._heard.items():
            if now - heard > self._timeout_s:
                raise PairError(f"rank {rank} is silent for {now - heard:.1f} s", hint="it hangs, or the link is down")

    async def _send(self, message: ControlMessage) -> PairError | None:
        """Returns what a peer's absence means: its last words may wait to be read, and count for more."""
        payload = wire.encode(message)
        if self._rank:
            with suppress(zmq.Again):  # rank 0 reads nothing: its silence will tell
                await self._socket.send(payload)
            return None
        gone = None
        for rank, connection in list(self._connection_of.items()):
            try:
                await self._socket.send_multipart([connection, payload])
            except zmq.Again:
                pass
            except zmq.ZMQError:
                del self._connection_of[rank]
                gone = PairError(f"rank {rank} hung up")
        return gone


def _unexpected(message: ControlMessage) -> PairError:
    return PairError(f"an unexpected {type(message).__name__} came by way of the heartbeats")
