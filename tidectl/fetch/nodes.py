"""The same fetch on other nodes: each runs `tidectl fetch` itself, over ssh, pinned to the same commit. So a node
checks its own bytes, and goes on where it was. They come from this node, or from the hub, by the node's own token."""

import random
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

import msgspec

from tidectl.fetch.lender import Lender, Loan
from tidectl.peers import NOT_FOUND, SSH
from tidectl.waiting import Item
from tided.errors import UnavailableError

TIDECTL = (sys.executable, "-P", "-m", "tidectl.main")  # TideLM is installed at one path on all nodes
THERE = (20_000, 32_000)  # a port of the node's loopback address, below those of outgoing connections
POLL_S = 0.25
END_S = 5.0
TAIL_LINES = 6


class _Told(msgspec.Struct):
    what: str
    where: str = ""
    hint: str = ""


class _Failed(msgspec.Struct):
    """What a command prints that failed, of `--json`."""

    error: _Told


class Node:
    """One node's fetch: the newest lines that it said, to people and to programs. `command`: tidectl and its words.
    `lender`: whom it has the files from; None: from the hub."""

    def __init__(self, name: str, command: Sequence[str], lender: Lender | None) -> None:
        self.name, self._words, self._data = name, deque[str](maxlen=TAIL_LINES), deque[str](maxlen=1)
        port = random.randrange(*THERE)
        tunnel = ["-oExitOnForwardFailure=yes", f"-R{port}:127.0.0.1:{lender.port}"] if lender else []
        words = [*TIDECTL, *command[1:], "--json", *(["--lent"] if lender else [])]
        line, pipe = [*SSH, *tunnel, "--", name, shlex.join(words)], subprocess.PIPE
        self._process = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace")
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # why is told by how it ended
            if lender:
                stdin.write(msgspec.json.encode(Loan(f"http://127.0.0.1:{port}", lender.token)).decode() + "\n")
        streams = ((self._process.stdout, self._data), (self._process.stderr, self._words))
        self._threads = [threading.Thread(target=_read, args=ends, daemon=True) for ends in streams]
        for thread in self._threads:
            thread.start()

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def item(self) -> Item:
        last = self._words[-1] if self._words else "asking"
        return Item(self.name, "whole" if self.exit_code == 0 else last, ready=self.exit_code == 0)

    def refuse_failure(self) -> None:
        """Raises UnavailableError where it has ended, and not well."""
        code = self.exit_code
        if not code:
            return
        for thread in self._threads:
            thread.join(END_S)
        with suppress(IndexError, msgspec.DecodeError):
            told = msgspec.json.decode(self._data[-1], type=_Failed).error
            where = f"{self.name}, {told.where}" if told.where else self.name
            raise UnavailableError(told.what, where=where, hint=told.hint)
        absent = code in NOT_FOUND or any("No module named" in line for line in self._words)
        hint = f"install TideLM there too, at the same path ({sys.executable})" if absent else ""
        raise UnavailableError(
            "\n  ".join(self._words) or f"ended with {code}",
            where=self.name,
            hint=hint or f"`ssh -oBatchMode=yes {self.name} true` must work; then run the same command again",
        )

    def end(self) -> None:
        self._process.kill()
        self._process.wait(END_S)


def _read(stream: IO[str], into: "deque[str]") -> None:
    for line in stream:
        if text := line.strip():
            into.append(text[:4000])


class Nodes:
    """`commands`: by node, tidectl and its words."""

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        self._commands = commands
        self.nodes: list[Node] = []

    @contextmanager
    def running(self, lender: Lender | None) -> Iterator["Nodes"]:
        """Starts them; at the end none is left of ours. What runs there goes on until it says something to nobody."""
        try:
            self.nodes = [Node(name, command, lender) for name, command in self._commands.items()]
            yield self
        except FileNotFoundError as error:
            raise UnavailableError("there is no ssh here, which --to-node needs", where=str(error.filename)) from error
        finally:
            for node in self.nodes:
                with suppress(subprocess.TimeoutExpired):
                    node.end()

    def items(self) -> list[Item]:
        for node in self.nodes:
            node.refuse_failure()
        return [node.item() for node in self.nodes]

    def wait(self, tick: Callable[[], None]) -> None:
        """Until each has ended well. Raises UnavailableError for one that did not."""
        over = threading.Event()
        while any(node.exit_code is None for node in self.nodes):
            tick()
            over.wait(POLL_S)
        self.items()
