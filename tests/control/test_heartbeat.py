"""Real processes, real signals."""

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import msgspec
import pytest

from tests.control.conftest import make_settings
from tided.control import wire
from tided.control.heartbeat import Heartbeats
from tided.control.messages import Digest, Fault, Heartbeat

PEER_TIMEOUT_S = 1.5


class Rank:
    def __init__(self, rank, settings, key_file):
        command = [sys.executable, "-m", "tests.control.beat", str(rank), msgspec.json.encode(settings).decode()]
        self.process = subprocess.Popen(
            [*command, str(key_file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def line(self):
        return self.process.stdout.readline().strip()

    def say(self, words):
        self.process.stdin.write(words + "\n")

    def end(self):
        self.process.kill()
        self.process.communicate(timeout=10)


@contextmanager
def pair_of(ranks, keys, tmp_path):
    settings = make_settings(ranks, heartbeat_s=0.1, peer_timeout_s=PEER_TIMEOUT_S)
    members = [Rank(rank, settings, tmp_path / "state" / "curve.key") for rank in range(ranks)]
    try:
        for member in members:
            assert member.line().startswith("up")
        yield members
    finally:
        for member in members:
            member.end()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_rank_is_seen_by_all_others(keys, tmp_path, victim, signal_number):
    with pair_of(3, keys, tmp_path) as members:
        os.kill(members[victim].process.pid, signal_number)
        words = [member.line() for rank, member in enumerate(members) if rank != victim]
    why = "hung up" if signal_number == signal.SIGKILL else "is silent"
    assert all(line.startswith("failed:") and f"rank {victim} {why}" in line for line in words), words
    silences = re.findall(r"is silent for ([0-9.]+) s", " ".join(words))
    assert len(silences) == (0 if signal_number == signal.SIGKILL else len(words))
    for silent_s in silences:  # a busy machine may look late
        assert PEER_TIMEOUT_S <= float(silent_s) < 10 * PEER_TIMEOUT_S


@pytest.mark.parametrize("victim", [0, 2])
def test_a_fault_reaches_everybody_with_its_words(keys, tmp_path, victim):
    with pair_of(3, keys, tmp_path) as members:
        members[victim].say("fault the device is gone")
        words = [member.line() for rank, member in enumerate(members) if rank != victim]
    assert all(f"rank {victim} ended: the device is gone" in line for line in words), words


def test_an_orderly_stop_is_no_failure(keys, tmp_path):
    with pair_of(3, keys, tmp_path) as members:
        members[0].say("stop maintenance")
        assert members[0].process.wait(10) == 0
        time.sleep(PEER_TIMEOUT_S * 1.2)  # by now silence or the disconnect would have been called a failure
        for member in members[1:]:
            member.say("stop")
            assert member.line() == ""
            assert member.process.wait(10) == 0


class Beats:
    """Two ends in one loop."""

    def __init__(self, keys, **parallel):
        self.settings, self.keys = make_settings(2, **parallel), keys
        self.failure = asyncio.get_running_loop().create_future()
        self.stopped = asyncio.Event()

    def rank(self, rank, session="s", on_failure=None):
        return Heartbeats(
            self.settings, rank, self.keys, session, lambda: 3, on_failure or self.failure.set_result, self.stopped.set
        )


async def test_progress_of_the_peers_is_known(keys, monkeypatch):
    monkeypatch.setattr("tided.control.heartbeat.available_bytes", lambda: 12_345)
    beats = Beats(keys)
    zero, one = beats.rank(0), beats.rank(1)
    zero.start(), one.start()
    async with asyncio.timeout(10):
        while zero.peer_seq != {1: 3} or one.peer_seq != {0: 3}:
            await asyncio.sleep(0.01)
    assert zero.peer_bytes == {1: 12_345}
    await zero.stop("over"), await zero.close(), await one.close()
    assert not beats.failure.done()


@pytest.mark.parametrize("speaker", [0, 1])
async def test_a_stop_of_any_rank_is_passed_on_and_is_no_failure(keys, speaker):
    beats = Beats(keys, peer_timeout_s=0.6)
    ranks = [beats.rank(0), beats.rank(1)]
    for rank in ranks:
        rank.start()
    async with asyncio.timeout(10):
        while not all(all(rank.peer_seq.values()) for rank in ranks):
            await asyncio.sleep(0.01)
        await ranks[speaker].stop("it was asked to stop")
        await ranks[speaker].close()  # the news that it is gone come at the same time
        await beats.stopped.wait()
    await asyncio.sleep(1.0)  # by now its silence would have been called a failure
    await ranks[1 - speaker].close()
    assert not beats.failure.done()


async def test_a_leftover_of_an_earlier_session_does_not_count_as_alive(keys):
    beats = Beats(keys, peer_timeout_s=0.6)
    zero, old = beats.rank(0), beats.rank(1, session="earlier", on_failure=lambda error: None)
    zero.start(), old.start()
    assert "rank 1 is silent" in str(await asyncio.wait_for(beats.failure, 10))
    await zero.close(), await old.close()


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"\xc1", "cannot be read"),
        (wire.encode(Digest(1, 1, "x")), "unexpected Digest"),
        (wire.encode(Heartbeat(9, 1, "s")), "names rank 9"),
        (wire.encode(Fault(1, "x" * 10)), "rank 1 ended: xxx"),
    ],
)
async def test_what_is_no_heartbeat_is_a_failure(keys, payload, words):
    beats = Beats(keys)
    zero, one = beats.rank(0), beats.rank(1)
    zero.start()
    await one._socket.send(payload)
    assert words in str(await asyncio.wait_for(beats.failure, 10))
    await zero.close(), await one.close()


async def test_a_watch_that_breaks_is_a_failure(keys, caplog):
    beats = Beats(keys)

    def broken():
        raise OSError(errno.EIO, "no engine", "/secret/x")

    zero = Heartbeats(beats.settings, 0, keys, "s", broken, beats.failure.set_result, beats.stopped.set)
    zero.start()
    failure = str(await asyncio.wait_for(beats.failure, 10))
    assert "the heartbeats failed: OSError: no engine" in failure
    assert "/secret" not in failure
    assert "/secret/x" in caplog.text
    await zero.close()


async def test_a_pause_of_this_process_is_not_taken_for_silence_of_its_peer(keys, tmp_path):
    beats = Beats(keys, heartbeat_s=0.1, peer_timeout_s=1.0)
    patient = msgspec.structs.replace(beats.settings.parallel, peer_timeout_s=60)
    peer = Rank(1, msgspec.structs.replace(beats.settings, parallel=patient), tmp_path / "state" / "curve.key")
    zero = beats.rank(0, session="session")
    try:
        async with asyncio.timeout(10):
            peer_is_up = asyncio.create_task(asyncio.to_thread(peer.line))
            zero._heard = {1: float("inf")}  # it may take long to start
            zero._task = asyncio.create_task(zero._watch())
            while not zero.peer_seq[1]:
                await asyncio.sleep(0.01)
            await peer_is_up
        time.sleep(1.5)  # the loop stands still; the peer's beats wait to be read
        await asyncio.sleep(0.3)
        assert not beats.failure.done()
    finally:
        await zero.close()
        peer.end()
