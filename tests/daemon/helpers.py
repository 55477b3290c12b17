"""A profile on free ports in a state directory of its own, started and ended by the real supervisor.

with running(profile_text, tmp_path) as pair:      # waits until it serves
    pair.url, pair.pids, pair.log(0), pair.state(1), pair.kill(1, signal.SIGKILL), pair.ended()
"""

import http.client
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.control.conftest import free_ports
from tidectl import supervisor
from tided.control.state import read_rank
from tided.errors import NotRunningError

FAKE = """
[model]
path = "checkpoint"
served_name = "fake"
[experts]
resident = 8
[cache]
context_tokens = 64
pool_tokens = 64
"""


class Stream:
    """A chat completion that is streamed over one connection."""

    def __init__(self, url: str, max_tokens: int, timeout_s: float = 30) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout_s)
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": max_tokens, "stream": True}
        body |= {"model": "tiny", "temperature": 0}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        self._reply = self._connection.getresponse()
        assert self._reply.status == 200, self._reply.read()

    def events(self):
        """Each `data:` line decoded, "[DONE]" as it is, until the server ends the stream."""
        for line in self._reply:
            if line.startswith(b"data: "):
                text = line[6:].strip().decode()
                yield text if text == "[DONE]" else json.loads(text)

    def first_words(self):
        """Reads until the model speaks."""
        return next(event for event in self.events() if event["choices"] and spoken(event))


def spoken(event) -> str:
    delta = event["choices"][0]["delta"]
    return (delta.get("content") or "") + (delta.get("reasoning_content") or "")


def health(url: str):
    """(status, body), or None when nobody answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except OSError:
        return None


class Running:
    def __init__(self, handle, profile, port):
        self.handle, self.profile, self.state_dir = handle, profile, handle.state_dir
        self.url = f"http://127.0.0.1:{port}"

    @property
    def run(self):
        return supervisor.status(self.state_dir).run

    @property
    def pids(self):
        return [child.process.pid for child in self.run.ranks]

    def state(self, rank):
        return read_rank(self.state_dir, rank)

    def log(self, rank):
        return (self.state_dir / "logs" / f"rank-{rank}.log").read_text()

    def kill(self, rank, number):
        os.kill(self.pids[rank], number)

    def ended(self, timeout_s=60):
        """How the run ended; fails when it does not in time."""
        self.handle.process.wait(timeout_s)
        return supervisor.status(self.state_dir).last


def write_profile(
    tmp_path: Path, text: str, ranks: int = 2, drain_s: int = 2, server: str = "", **parallel
) -> tuple[Path, int]:
    """`text` with its [parallel] and [server] tables on free ports; returns the file and the HTTP port. `server`: more
    lines of the latter."""
    first = free_ports(4)
    table = {"ranks": ranks, "control_port": first, "data_port": first + 2} | parallel
    lines = [f"{key} = {value}" for key, value in table.items()]
    body = (
        f"{text}\n[parallel]\n" + "\n".join(lines) + f"\n[server]\nport = {first + 3}\ndrain_s = {drain_s}\n{server}\n"
    )
    profile = tmp_path / "profile.toml"
    profile.write_text(body)
    return profile, first + 3


@contextmanager
def started(profile: Path, state_dir: Path, port: int = 0, program=supervisor.DAEMON) -> Iterator[Running]:
    """Whatever the test does, nothing of it is left running."""
    handle = supervisor.start(profile, state_dir, program)
    try:
        yield Running(handle, profile, port)
    finally:
        with suppress(NotRunningError):
            supervisor.stop(state_dir, 10)
        with suppress(ProcessLookupError):
            os.killpg(handle.process.pid, signal.SIGKILL)
        handle.process.wait(10)


@contextmanager
def running(text: str, tmp_path: Path, ranks: int = 2, program=supervisor.DAEMON, **parallel) -> Iterator[Running]:
    profile, port = write_profile(tmp_path, text, ranks, **parallel)
    with started(profile, tmp_path / "state", port, program) as pair:
        pair.handle.wait_ready(120)
        yield pair


def until(condition, timeout_s=60.0):
    """Polls until the condition holds; fails when it never does."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return value
