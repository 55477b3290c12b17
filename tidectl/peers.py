"""A node on another machine, asked over ssh.

An ssh connection runs `tidectl.node` by the same interpreter path as here, so TideLM is installed alike on all nodes.
Which user, port and key ssh takes is ~/.ssh/config's business; it may ask nothing. Every answer has a deadline.
"""

import os
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from tidectl.node_messages import MARK, MAX_LINE_BYTES, PROTOCOL, About, Failed, Hello, Reply, Request
from tidectl.nodes import Node
from tided.errors import (
    ConfigError,
    DataError,
    NotRunningError,
    PairError,
    PermissionError_,
    TideError,
    UnavailableError,
    UsageError,
)

CONNECT_S = 5
HELLO_S = 20.0  # ssh, a login shell, and Python's start on a busy machine
ANSWER_S = 20.0
SSH = (
    "ssh",
    "-T",
    "-oBatchMode=yes",
    f"-oConnectTimeout={CONNECT_S}",
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=3",
)
NODE = (sys.executable, "-P", "-m", "tidectl.node")
SSH_FAILED, NOT_FOUND = 255, (126, 127)  # exit codes: of ssh itself, of the shell there
SAID_LINES = 3
MOST_SKEW_S = 0.5  # of clocks: logs of several nodes are merged by time
MAX_UNMARKED_BYTES = 1 << 20  # what a login shell may say

Kind = TypeVar("Kind", bound=Reply)
_ERRORS: dict[int, type[TideError]] = {
    kind.exit_code: kind
    for kind in (
        UsageError, ConfigError, NotRunningError, UnavailableError, DataError, PairError, PermissionError_
    )
}  # fmt: skip


class Peer:
    """Another machine. Connected at the first question, and again after a connection was lost. `command`: how, instead
    of by ssh."""

    def __init__(self, node: Node, command: Sequence[str] = ()) -> None:
        self.node = node
        self._command = command or [*SSH, "--", node.host, shlex.join(NODE)]
        self._asking = threading.RLock()  # `close` comes from within a question too
        self.about: About | None = None
        self.skew_s = (0.0, 0.0)  # its clock against ours, and how far off that may be
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def ask(self, request: Request, kind: type[Kind], timeout_s: float = ANSWER_S) -> Kind:
        with self._asking:
            if self._process is None:
                self._connect()
            return of_kind(self._exchange(request, time.monotonic() + timeout_s), kind, self.node)

    def connect(self) -> About:
        """Also measures its clock. Raises ConfigError for another protocol."""
        with self._asking:
            return self._connect()

    def _connect(self) -> About:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=self._said, start_new_session=True
            )
        except OSError as error:
            self._said.close()
            hint = "install an ssh client (openssh-client)"
            raise UnavailableError(f"ssh cannot be run: {error.strerror}", where=str(self.node), hint=hint) from error
        deadline = time.monotonic() + HELLO_S
        found = self._hello(deadline)
        asked_s = time.time()
        again = self._hello(deadline)  # the first answer's time is that of a shell and an interpreter too
        trip_s = time.time() - asked_s
        self.about, self.skew_s = found, (again.time_s - asked_s - trip_s / 2, trip_s / 2)
        return found

    def _hello(self, deadline: float) -> About:
        found = of_kind(self._exchange(Hello(), deadline), About, self.node)
        if found.protocol != PROTOCOL:
            raise self._other_build(found.version)
        return found

    def _other_build(self, found: str) -> ConfigError:
        self.close()
        hint = "install the same version on all nodes"
        return ConfigError(f"TideLM there is another version: {found}", where=str(self.node), hint=hint)

    def _exchange(self, request: Request, deadline: float) -> Reply:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # why is told by how it ended
                self._process.stdin.write(msgspec.json.encode(request) + b"\n")
                self._process.stdin.flush()
            return msgspec.json.decode(self._line(deadline), type=Reply)
        except msgspec.MsgspecError as error:
            raise self._other_build(str(error)) from error
        except BaseException:
            self.close()  # an answer that comes late must not be taken for that of the next question
            raise

    def _line(self, deadline: float) -> bytes:
        """The next answer. What stands before `MARK` comes from a login shell."""
        begun, begun_bytes, unmarked_bytes = list[bytes](), 0, 0
        fresh, self._buffer = self._buffer, b""
        while True:
            end, *others = fresh.split(b"\n")
            begun, begun_bytes = [*begun, end], begun_bytes + len(end)
            for place, other in enumerate(others):
                line = b"".join(begun)
                if MARK in line:
                    self._buffer = b"\n".join(others[place:])
                    return line.partition(MARK)[2]
                unmarked_bytes += len(line)
                begun, begun_bytes = [other], len(other)
            if unmarked_bytes > MAX_UNMARKED_BYTES or begun_bytes > MAX_LINE_BYTES:
                raise UnavailableError("it writes without end", where=str(self.node))
            fresh = self._read(deadline)

    def _read(self, deadline: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        left_s = deadline - time.monotonic()  # looked at where there is something to read too
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if left_s <= 0 or not selector.select(left_s):
                hint = f"try `ssh -oBatchMode=yes {self.node.host} true`"
                raise UnavailableError("it does not answer in time", where=str(self.node), hint=hint)
        if data := os.read(self._process.stdout.fileno(), 1 << 20):
            return data
        raise self._ended()

    def _ended(self) -> TideError:
        """Why there is no connection, from how ssh ended and what was said."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CONNECT_S)
        code, host = self._process.returncode, self.node.host
        self._said.seek(0)
        said = "; ".join(self._said.read().decode(errors="replace").split("\n")[-SAID_LINES - 1 :]).strip("; \r")
        if code == SSH_FAILED:
            hint = f"`ssh -oBatchMode=yes {host} true` must work without a question: keys and names are ssh's business"
            what = f"ssh does not get there: {said or 'no reason given'}"
            return UnavailableError(what, where=str(self.node), hint=hint)
        if code in NOT_FOUND or "No module named" in said:
            hint = "install TideLM at the same path on all nodes"
            return ConfigError(f"there is no TideLM at {NODE[0]}: {said}", where=str(self.node), hint=hint)
        what = f"the connection ended (exit code {code}): {said or 'nothing said'}"
        return UnavailableError(what, where=str(self.node))

    def close(self) -> None:
        """The ranks that were started there go on. A question that is under way in another thread ends by an error."""
        process = self._process
        if process is None:
            return
        _end(process)  # which wakes who waits for an answer
        with self._asking:
            if self._process is process:
                self._process, self._buffer = None, b""
                for pipe in (process.stdin, process.stdout):
                    with suppress(OSError):
                        if pipe is not None:
                            pipe.close()
                self._said.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """ssh, and what it may have started of its own (ProxyCommand)."""
    for number, wait_s in ((signal.SIGTERM, 1.0), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return


def is_late(skew_s: tuple[float, float]) -> bool:
    """Whether a clock, by `Peer.skew_s`, is surely off."""
    return abs(skew_s[0]) > MOST_SKEW_S + skew_s[1]


def of_kind(reply: Reply, kind: type[Kind], node: Node) -> Kind:
    if isinstance(reply, Failed):
        where = f"{node}: {reply.where}" if reply.where else str(node)
        error = _ERRORS.get(reply.exit_code, TideError)(reply.what, where=where, hint=reply.hint)
        raise error
    if not isinstance(reply, kind):
        raise UnavailableError(f"it answered a question by {type(reply).__name__}", where=str(node))
    return reply
