"""The processes that decode: limits of time and memory, and nothing of one job in the next."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.images.test_decode import GEOMETRY, GREEN, RED, file, flat, palette
from tided.images.decode import decode
from tided.images.types import Limits, RefusedImageError
from tided.images.workers import Workers
from tided.processes import read_part, write_parts

LIMITS = Limits(pixels=100_000_000)
SMALL = file(flat(RED))


@pytest.fixture
def pool() -> Iterator[Workers]:
    made = Workers(GEOMETRY, LIMITS, limit_s=60, workers=1)
    yield made
    made.close()


def process(pool: Workers) -> "subprocess.Popen[bytes]":
    (one,) = [found for found in pool._processes._running if found.poll() is None]
    return one


def refusal(pool: Workers, data: bytes) -> str:
    with pytest.raises(RefusedImageError) as refused:
        pool.decode(lambda: data).result(60)
    return str(refused.value)


def test_what_comes_back_is_what_is_decoded_here(pool):
    for data in (SMALL, file(palette(), "GIF"), file(flat(GREEN, (300, 50)), "JPEG")):
        assert pool.decode(lambda data=data: data).result(60) == decode(data, GEOMETRY, LIMITS)


def test_one_process_serves_many_jobs_refused_ones_among_them(pool):
    pool.decode(lambda: SMALL).result(60)
    first = process(pool).pid
    assert refusal(pool, b"nothing") == "not an image of a supported format (PNG, JPEG, WebP, GIF, BMP)"
    assert refusal(pool, SMALL[:60]) == "damaged or incomplete"
    pool.decode(lambda: SMALL).result(60)
    assert process(pool).pid == first


def test_a_process_that_dies_is_replaced(pool):
    pool.decode(lambda: SMALL).result(60)
    before = process(pool)
    before.kill()
    before.wait(10)
    assert pool.decode(lambda: SMALL).result(60).size == (84, 84)
    assert process(pool).pid != before.pid


def scripted(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Another program in the place of the next process."""
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", program], **options)
    )


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.stdin.buffer.read(10)",
        "import os, sys; sys.stdin.buffer.read(10); os.kill(os.getpid(), 11)",
        "import sys; sys.stdout.buffer.write(b'\\x05\\0\\0\\0abcde' + b'\\0\\0\\0\\0')",
        "import sys; sys.stdout.buffer.write(b'\\xff\\xff\\xff\\xff')",
        "import sys; sys.stdout.buffer.write(b'\\x50\\0\\0\\0short')",
    ],
    ids=["ends", "crashes", "nonsense", "too long", "half"],
)
def test_a_process_that_fails_is_no_failure_of_the_server(monkeypatch, pool, program):
    with monkeypatch.context() as patched:
        scripted(patched, program)
        assert refusal(pool, SMALL) == "it cannot be decoded"
    assert pool.decode(lambda: SMALL).result(60).size == (84, 84)


def test_a_job_has_its_time(monkeypatch):
    pool = Workers(GEOMETRY, LIMITS, limit_s=0.2, workers=1)
    with monkeypatch.context() as patched:
        scripted(patched, "import time; time.sleep(600)")
        assert refusal(pool, SMALL) == "decoding it takes longer than 0.2 s"
    pool.close()
    assert not [found for found in pool._processes._running if found.poll() is None]


def test_the_time_of_a_job_ends_with_it(monkeypatch, pool):
    """The next one's is its own, though the process is the same."""
    begun: list[threading.Timer] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            begun.append(self)
            super().start()

    monkeypatch.setattr("tided.processes.threading.Timer", Timer)
    for jobs in (1, 2):
        assert pool.decode(lambda: SMALL).result(60).size == (84, 84)
        assert [(timer.interval, timer.finished.is_set()) for timer in begun] == [(60, True)] * jobs
    assert len(pool._processes._running) == 1


def test_closing_ends_the_processes(pool):
    pool.decode(lambda: SMALL).result(60)
    one = process(pool)
    pool.close()
    assert one.wait(30) == -signal.SIGKILL


def worker(**options) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tided.images.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_a_process_ends_with_its_server():
    one = worker()
    one.stdin.close()
    assert one.wait(60) == 0


def test_a_process_that_is_interrupted_goes_on():
    """Control and C reach the whole terminal: the server decides."""
    one = worker()
    try:
        write_parts(one.stdin, Workers(GEOMETRY, LIMITS, 1)._job, SMALL)
        assert read_part(one.stdout)
        assert read_part(one.stdout)
        one.send_signal(signal.SIGINT)
        write_parts(one.stdin, Workers(GEOMETRY, LIMITS, 1)._job, SMALL)
        assert read_part(one.stdout)
    finally:
        one.kill()
        one.communicate()


def test_a_process_has_limits_of_its_own():
    """Memory, no file of any size, no core; as the kernel tells them."""
    one = worker()
    try:
        deadline_s = time.monotonic() + 60
        while True:
            lines = Path(f"/proc/{one.pid}/limits").read_text().splitlines()
            limits = {line[:26].strip(): line[26:].split()[0] for line in lines}
            if limits["Max file size"] == "0" or time.monotonic() > deadline_s:
                break
        assert limits["Max address space"] == str(3 << 30)
        assert (limits["Max file size"], limits["Max core file size"]) == ("0", "0")
    finally:
        one.kill()
        one.communicate()


def test_nothing_of_the_servers_environment_reaches_a_process(pool, monkeypatch):
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials")
    pool.decode(lambda: SMALL).result(60)
    found = Path(f"/proc/{process(pool).pid}/environ").read_text().split("\0")
    assert {line.partition("=")[0] for line in found if line} <= {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH"}


def test_the_server_itself_loads_no_decoder():
    """What parses foreign bytes stays in the processes."""
    program = "import sys, tided.api.images; print([m for m in sys.modules if m.split('.')[0] == 'PIL'])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "[]"


def test_an_image_too_large_for_the_memory_is_refused_and_the_next_is_not(pool, monkeypatch):
    """95 million pixels in 12 KB, which are 95 MB when they are decoded, and four times that as colours."""
    bomb = file(Image.new("1", (9700, 9700)), transparency=0)
    assert len(bomb) < 20_000
    scripted(monkeypatch, "import tided.images.worker as w; w.MEMORY_BYTES = 300 << 20; w.main()")
    assert refusal(pool, bomb) == "decoding it takes too much memory"
    one = process(pool)
    assert pool.decode(lambda: SMALL).result(60).size == (84, 84)
    assert process(pool) is one
