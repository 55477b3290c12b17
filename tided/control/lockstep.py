"""One decision a step: rank 0 sends, the others replay (contracts C1, C3). Used by the engine thread alone.

    rank 0 (Leader)                      rank n (Follower)
    gather   <------- Hello -----------  join          facts of the boot guard
             -------- Welcome -------->                session, residents; or Refused, and both end
    ready    <------- Ready -----------  ready         digest of what was really loaded
    send     -------- Step ----------->  receive       seq rises by one; nothing is skipped or repeated
    landed   <------- Landed ----------  landed        reads of experts that ended, whenever they do
    recalled <------- Recalled --------  recalled      snapshots and parked lanes that were read, whenever they are
    compare  <------- Digest ----------  report        every `guard_every_steps` steps
    stop     -------- Stop ----------->  receive

Liveness is the heartbeats' business: an idle pair is silent here for hours.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from tided import guard
from tided.control import wire
from tided.control.keys import Keys
from tided.control.messages import ControlMessage, Digest, Hello, Landed, Ready, Recalled, Refused, Step, Stop, Welcome
from tided.errors import GuardError, PairError, PermissionError_, UnavailableError
from tided.settings import Settings

HANDSHAKES = 10  # that fail one after the other are no accident of a rank 0 that just starts or ends
MEANWHILE_S = 1.0  # between two looks at what else there is, while a message is waited for
Meanwhile = Callable[[], None]
Pair = tuple[int, int]
Reply = TypeVar("Reply", Ready, Digest)


def nothing() -> None:
    """Nothing else is looked at."""


class Solo:
    """The leader of one rank: nobody to ask, nobody to tell."""

    followers = 0

    def gather(self, facts: Mapping[str, str], residents: Sequence[Pair]) -> str:
        return secrets.token_hex(8)

    def ready(self, residents_digest: str, wait_s: float = 0.0, meanwhile: Meanwhile = nothing) -> None: ...

    def send(self, step: Step) -> None: ...

    def landed(self) -> list[int]:
        return []

    def failed(self) -> list[int]:
        return []

    def recalled(self) -> list[Recalled]:
        return []

    def compare(self, seq: int, digest: str) -> dict[int, float]:
        return {}

    def stop(self, reason: str) -> None: ...

    def close(self) -> None: ...


class Leader:
    """Rank 0's end. Listens from its creation on, so that a busy port is found before anything is loaded."""

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self._settings = settings
        self._rank_of: dict[bytes, int] = {}  # connection -> rank, of those that were let in
        self._landed: list[int] = []
        self._failed: list[int] = []
        self._recalled: list[Recalled] = []
        self._seq = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = ThreadAuthenticator(self._context)
        self._zap.start()
        wire.allow_followers(self._zap, keys)
        try:
            self._socket = wire.listen(
                self._context.socket(zmq.ROUTER), keys, wire.endpoint(settings.parallel, offset=0)
            )
        except BaseException:
            self._end_context()
            raise
        self._socket.sndtimeo = int(settings.parallel.peer_timeout_s * 1000)

    @property
    def followers(self) -> int:
        return self._settings.parallel.ranks - 1

    def gather(self, facts: Mapping[str, str], residents: Sequence[Pair]) -> str:
        """Waits for every rank, compares its facts, lets all in together. Returns the session.
        Raises GuardError for a difference, UnavailableError for a rank that does not come."""
        deadline = time.monotonic() + self._settings.parallel.start_timeout_s
        while missing := self._missing(self._rank_of.values()):
            if not self._poll(deadline):
                raise UnavailableError(
                    f"{missing} did not come within {self._settings.parallel.start_timeout_s:g} s",
                    hint="is it running, with the same key file, and can it reach "
                    f"{wire.endpoint(self._settings.parallel, offset=0)}?",
                )
            self._admit(*self._receive(), facts)
        session = secrets.token_hex(8)
        self._send_all(Welcome(session, list(residents)))
        return session

    def _admit(self, connection: bytes, message: ControlMessage, facts: Mapping[str, str]) -> None:
        if not isinstance(message, Hello):
            raise PairError(f"a rank sent {type(message).__name__} before it was let in")
        if message.rank in self._rank_of.values():
            return self._refuse(connection, [("rank", "in use", str(message.rank))])
        differences = guard.compare(facts, message.facts)
        if not 0 < message.rank < self._settings.parallel.ranks:
            differences.append(("rank", f"1 to {self._settings.parallel.ranks - 1}", str(message.rank)))
        if differences:
            self._refuse(connection, differences)
            raise _refusal(differences, message.rank)
        self._rank_of[connection] = message.rank
        return None

    def _refuse(self, connection: bytes, differences: list[guard.Difference]) -> None:
        self._send_to(connection, wire.encode(Refused(differences)))

    def ready(self, residents_digest: str, wait_s: float | None = None, meanwhile: Meanwhile = nothing) -> None:
        """Waits until every rank has loaded, at most `wait_s` (None: the start's own limit) for all together;
        `meanwhile` is called all the time, and ends the wait by what it raises. Raises GuardError when one holds other
        residents than rank 0."""
        limit_s = self._settings.parallel.start_timeout_s if wait_s is None else wait_s
        for connection, reply in self._replies(Ready, limit_s, meanwhile):
            if reply.residents_digest != residents_digest:
                differences = [("residents", residents_digest, reply.residents_digest)]
                self._refuse(connection, differences)
                raise _refusal(differences, self._rank_of[connection])

    def send(self, step: Step) -> None:
        """To every rank, at the cost of one encoding. Raises PairError when a rank hung up or reads no more."""
        if step.seq != self._seq + 1:
            raise ValueError(f"step {step.seq} cannot follow step {self._seq}")
        self._seq = step.seq
        self._send_all(step)

    def landed(self) -> list[int]:
        """Tickets of reads that ended well on other ranks since the last call, one mention a rank. Never waits."""
        self._collect()
        landed, self._landed = self._landed, []
        return landed

    def failed(self) -> list[int]:
        """The same of reads that did not end well."""
        self._collect()
        failed, self._failed = self._failed, []
        return failed

    def recalled(self) -> list[Recalled]:
        """What other ranks answered to recalls since the last call. Never waits."""
        self._collect()
        recalled, self._recalled = self._recalled, []
        return recalled

    def _collect(self) -> None:
        while self._socket.poll(0):
            connection, message = self._receive()
            if (rank := self._rank_of.get(connection)) is None:
                self._refuse_late(connection, message)
            elif not self._keep(rank, message):
                raise PairError(f"rank {rank} sent an unexpected {type(message).__name__}")

    def _keep(self, rank: int, message: ControlMessage) -> bool:
        """Whether the message is about reads of the rank that sent it."""
        if not isinstance(message, Landed | Recalled) or message.rank != rank:
            return False
        if isinstance(message, Landed):
            self._landed += message.tickets
            self._failed += message.failed
        else:
            self._recalled.append(message)
        return True

    def _refuse_late(self, connection: bytes, message: ControlMessage) -> None:
        self._refuse(connection, [("session", "closed to new ranks", type(message).__name__)])

    def compare(self, seq: int, digest: str) -> dict[int, float]:
        """Waits for the other ranks' digests of step `seq`; how long for each, in seconds. Raises PairError for a
        difference or a silence (C3)."""
        began_s, waited_s = time.monotonic(), dict[int, float]()
        for connection, reply in self._replies(Digest, self._settings.parallel.step_timeout_s):
            rank = self._rank_of[connection]
            if reply.seq != seq:
                raise PairError(f"rank {rank} is at step {reply.seq}, rank 0 at step {seq}")
            if reply.digest != digest:
                raise PairError(
                    f"rank {rank} differs from rank 0 after step {seq}: digest {reply.digest}, not {digest}",
                    hint="mask, chosen experts or sampled tokens are not the same; nothing more is served",
                )
            waited_s[rank] = time.monotonic() - began_s
        return waited_s

    def stop(self, reason: str) -> None:
        """Tells every rank that is still there. Also the right last word after an error."""
        payload = wire.encode(Stop(reason))
        for connection in self._rank_of:
            with suppress(PairError):
                self._send_to(connection, payload)

    def close(self) -> None:
        """Last words leave within a second, or are lost."""
        self._socket.close(wire.LINGER_MS)
        self._end_context()

    def _end_context(self) -> None:
        self._zap.stop()
        self._context.destroy(wire.LINGER_MS)

    def _replies(
        self, kind: type[Reply], timeout_s: float, meanwhile: Meanwhile = nothing
    ) -> Iterator[tuple[bytes, Reply]]:
        """One message of `kind` from every rank, in the order they come."""
        deadline, heard = time.monotonic() + timeout_s, set[int]()
        while missing := self._missing(heard):
            meanwhile()
            if not self._poll(min(deadline, time.monotonic() + MEANWHILE_S)):
                if time.monotonic() < deadline:
                    continue
                raise PairError(f"{missing} sent no {kind.__name__} within {timeout_s:g} s")
            connection, message = self._receive()
            if (rank := self._rank_of.get(connection)) is None:
                self._refuse_late(connection, message)
                continue
            if self._keep(rank, message):
                continue
            if not isinstance(message, kind) or message.rank != rank or rank in heard:
                raise PairError(f"rank {rank} sent an unexpected {type(message).__name__}")
            heard.add(rank)
            yield connection, message

    def _missing(self, present: Iterable[int]) -> str:
        """The ranks that are not in `present`, as text; empty when all are."""
        have = set(present)
        return ", ".join(f"rank {n}" for n in range(1, self._settings.parallel.ranks) if n not in have)

    def _poll(self, deadline: float) -> bool:
        return bool(self._socket.poll(max(0, int((deadline - time.monotonic()) * 1000))))

    def _receive(self) -> tuple[bytes, ControlMessage]:
        connection, *payload = self._socket.recv_multipart()
        rank = self._rank_of.get(connection)
        return connection, wire.decode(payload, "a rank" if rank is None else f"rank {rank}")

    def _send_all(self, message: ControlMessage) -> None:
        payload = wire.encode(message)
        for connection in self._rank_of:
            self._send_to(connection, payload)

    def _send_to(self, connection: bytes, payload: bytes) -> None:
        try:
            self._socket.send_multipart([connection, payload])
        except zmq.ZMQError as error:
            rank = self._rank_of.get(connection)
            if rank is None:
                return  # it was to be refused, and is gone already
            verb = "reads nothing any more" if error.errno == zmq.EAGAIN else "hung up"
            raise PairError(f"rank {rank} {verb}") from None


class Follower:
    """The end of every other rank."""

    def __init__(self, settings: Settings, rank: int, keys: Keys) -> None:
        self._settings, self._rank, self._seq = settings, rank, 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = wire.connect(
            self._context.socket(zmq.DEALER),
            keys,
            wire.endpoint(settings.parallel, offset=0),
            # A connection of its own, not the rank alone: a leftover of an earlier start must not hold the name.
            identity=f"{rank}.{secrets.token_hex(8)}".encode(),
            limit_bytes=wire.step_limit_bytes(settings),
        )
        self._socket.sndtimeo = int(settings.parallel.peer_timeout_s * 1000)

    def join(self, facts: Mapping[str, str]) -> Welcome:
        """Asks to be let in. Raises GuardError when refused, PermissionError_ when rank 0 has other keys,
        UnavailableError when it does not answer."""
        self._send(Hello(self._rank, dict(facts)))
        timeout_s = self._settings.parallel.start_timeout_s
        message = self._answer(timeout_s)
        if isinstance(message, Welcome):
            return message
        if message is None:
            raise UnavailableError(
                f"rank 0 did not answer at {wire.endpoint(self._settings.parallel, offset=0)} within {timeout_s:g} s",
                hint="is rank 0 running, and are all the other ranks?",
            )
        raise self._unexpected(message)

    def _answer(self, timeout_s: float) -> ControlMessage | None:
        """The first message of rank 0. A stranger is not answered but hung up on: that is heard here."""
        deadline, failures = time.monotonic() + timeout_s, 0
        monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                ready = dict(poller.poll(int(left_s * 1000)))
                if self._socket in ready:
                    return self._receive(0)
                if monitor in ready:
                    event = parse_monitor_message(monitor.recv_multipart())["event"]
                    failures += HANDSHAKES if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH else 1
                if failures >= HANDSHAKES:
                    raise self._other_keys()
            return None
        finally:
            self._socket.disable_monitor()

    def _other_keys(self) -> PermissionError_:
        return PermissionError_(
            f"rank {self._rank} and rank 0 have different keys",
            hint="copy the key file (parallel.key_file, or curve.key in the state directory) from rank 0's node",
        )

    def ready(self, residents_digest: str) -> None:
        self._send(Ready(self._rank, residents_digest))

    def still_welcome(self) -> None:
        """Before the first step: raises GuardError when rank 0 found that this rank loaded something else, PairError
        when it has ended."""
        message = self._receive(0)
        if message is not None:
            raise self._unexpected(message)

    def receive(self, timeout_s: float) -> Step | Stop | None:
        """The next step in order, the end, or None after `timeout_s` without either. Raises PairError for a gap or a
        repetition, GuardError when rank 0 found that this rank loaded something else."""
        message = self._receive(timeout_s)
        if isinstance(message, Step):
            if message.seq != self._seq + 1:
                raise PairError(f"rank {self._rank} was sent step {message.seq} after step {self._seq}")
            self._seq = message.seq
        elif not (message is None or isinstance(message, Stop)):
            raise self._unexpected(message)
        return message

    def landed(self, tickets: Sequence[int], failed: Sequence[int] = ()) -> None:
        """Tells rank 0 that these reads have ended here, well or not."""
        self._send(Landed(self._rank, list(tickets), list(failed)))

    def recalled(self, ticket: int, held: Sequence[int], loaded: int) -> None:
        """Tells rank 0 what is here of a recall."""
        self._send(Recalled(self._rank, ticket, list(held), loaded))

    def report(self, seq: int, digest: str) -> None:
        self._send(Digest(self._rank, seq, digest))

    def close(self) -> None:
        self._socket.close(wire.LINGER_MS)
        self._context.destroy(wire.LINGER_MS)

    def _receive(self, timeout_s: float) -> ControlMessage | None:
        if not self._socket.poll(max(0, int(timeout_s * 1000))):
            return None
        return wire.decode(self._socket.recv_multipart(), "rank 0")

    def _send(self, message: ControlMessage) -> None:
        try:
            self._socket.send(wire.encode(message))
        except zmq.Again:
            raise PairError("rank 0 reads nothing any more") from None

    def _unexpected(self, message: ControlMessage) -> GuardError | PairError:
        if isinstance(message, Refused):
            return _refusal(message.differences, self._rank)
        if isinstance(message, Stop):
            return PairError(f"rank 0 ended: {message.reason}")
        return PairError(f"rank 0 sent an unexpected {type(message).__name__}")


def _refusal(differences: list[guard.Difference], rank: int) -> GuardError:
    """The same words on both sides."""
    return GuardError(
        f"rank {rank} differs from rank 0 in {', '.join(name for name, _, _ in differences)}\n"
        + guard.describe(differences, "rank 0", f"rank {rank}"),
        hint="every rank needs the same profile (but for paths and addresses), code and checkpoint",
    )
