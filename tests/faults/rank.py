"""The real `tided` with faults in it: what `tests.faults.strike` arms strikes this rank from within, at a stage of its
work and not at a time. Everything is wrapped from here; the product knows nothing of it."""

import datetime as dates
import errno
import os
import resource
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

import tided.control.memory as memory
from tests.faults.strike import Deed, Stage, Strike, armed_at, go, struck_at

POLL_S = 0.01
HOLD_S = 8.0
SMALL_DISK_BYTES = 512 << 20  # a larger one is nobody's to fill
BALLOON_BYTES, BREATH = 64 << 10, 8  # its pieces; those that it leaves, for words
LITTLE_BYTES = 100 << 20  # of the whole node


class Struck:
    """The one strike that is armed, and what has become of those before it."""

    def __init__(self, state_dir: Path, rank: int) -> None:
        self._dir, self._rank = state_dir, rank
        self._lock = threading.Lock()
        self._armed: Strike | None = None
        self._left = 0
        self._number = 0
        self.reads_left = dict.fromkeys(("eio", "short", "corrupt"), 0)
        self.jumped_s = 0
        self.is_short_of_memory = self._limited = False
        self._balloon: list[bytearray] = []
        self._take_up()
        threading.Thread(target=self._watch, name="strikes", daemon=True).start()

    def _watch(self) -> None:
        while True:
            with suppress(MemoryError):
                self._take_up()
            time.sleep(POLL_S)

    def _take_up(self) -> None:
        try:
            strike = msgspec.json.decode(armed_at(self._dir, self._rank).read_bytes(), type=Strike)
        except FileNotFoundError:
            self._end()
            return
        with self._lock:
            if strike.number != self._number:
                self._number, self._armed, self._left = strike.number, strike, strike.after

    def _end(self) -> None:
        """The cause is gone."""
        self.reads_left = dict.fromkeys(self.reads_left, 0)
        self.jumped_s, self.is_short_of_memory = 0, False
        if self._limited:
            self._balloon.clear()
            self._limited, most = False, resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def reach(self, stage: Stage) -> None:
        """The rank is there; on any of its threads."""
        with self._lock:
            strike = self._armed
            if strike is None or strike.stage != stage:
                return
            self._left -= 1
            if self._left:
                return
            self._armed = None
        if strike.deed in ("kill", "stop"):
            threading.Timer(strike.jitter_s, self._do, (strike,)).start()
        else:
            self._do(strike)

    def _do(self, strike: Strike) -> None:
        half = struck_at(self._dir, self._rank).with_suffix(".half")
        half.write_text(repr(time.monotonic()))
        half.rename(struck_at(self._dir, self._rank))
        DEEDS[strike.deed](self, strike)

    def kill(self, _: Strike) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, _: Strike) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def read_badly(self, strike: Strike) -> None:
        self.reads_left[strike.deed] = strike.amount

    def fill(self, _: Strike) -> None:
        """The disk of the state directory, to its last byte."""
        disk = os.statvfs(self._dir)
        assert disk.f_blocks * disk.f_frsize < SMALL_DISK_BYTES, "this disk is not the test's own"
        with suppress(OSError), (self._dir / "ballast").open("ab", buffering=0) as file:
            for nbytes in (1 << 20, 1):
                with suppress(OSError):
                    while True:
                        file.write(bytes(nbytes))

    def jump(self, strike: Strike) -> None:
        self.jumped_s = strike.amount

    def want_memory(self, _: Strike) -> None:
        """The process gets no more than it has, and of that a balloon takes what is free."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit, self._limited = pages * resource.getpagesize(), True
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        with suppress(MemoryError):
            while True:
                self._balloon.append(bytearray(BALLOON_BYTES))
        del self._balloon[-BREATH:]

    def run_short(self, _: Strike) -> None:
        self.is_short_of_memory = True

    def hold(self, _: Strike) -> None:
        """The rank stands still until the parent has done what only a parent can."""
        deadline = time.monotonic() + HOLD_S
        while not go(self._dir, self._rank).exists() and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)

    def takes(self, kind: str) -> bool:
        """Whether this read is one of those that go wrong."""
        with self._lock:
            if self.reads_left[kind] <= 0:
                return False
            self.reads_left[kind] -= 1
            return True


DEEDS = {
    "kill": Struck.kill,
    "stop": Struck.stop,
    "eio": Struck.read_badly,
    "short": Struck.read_badly,
    "corrupt": Struck.read_badly,
    "full": Struck.fill,
    "clock": Struck.jump,
    "memory": Struck.want_memory,
    "short of memory": Struck.run_short,
    "hold": Struck.hold,
}
assert set(DEEDS) == set(Deed.__args__)  # type: ignore[attr-defined]


def wrap_reads(struck: Struck) -> None:
    """What a pack's reads bring. A read that is short is continued by who asked; one that brings nothing is the end of
    the file."""
    from tided.experts.files import RangeFile

    read, preadv, of_experts = RangeFile.read, os.preadv, threading.local()

    def read_experts(self, offset, nbytes, buffer):
        of_experts.now = ".safetensors" not in self.path.suffixes
        try:
            return read(self, offset, nbytes, buffer)
        finally:
            of_experts.now = False

    def read_badly(fd, buffers, offset, *flags):
        if not getattr(of_experts, "now", False):
            return preadv(fd, buffers, offset, *flags)
        if struck.takes("eio"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if struck.takes("short"):
            buffers = [buffers[0][: max(4096, len(buffers[0]) // 2 // 4096 * 4096)]]
        count = preadv(fd, buffers, offset, *flags)
        if count and struck.takes("corrupt"):
            buffers[0][count // 2] ^= 4
        return count

    RangeFile.read, os.preadv = read_experts, read_badly


def wrap_steps(struck: Struck) -> None:
    from tided.cache import background, bundle
    from tided.control.messages import Prefill
    from tided.engine.executor import Executor

    execute, save, write = Executor.execute, Executor._save, bundle.write
    background.LEFT_FREE_BYTES = 0  # the disk of a test is smaller than what is else left of one

    def told(self, step):
        if step.change:
            struck.reach("swap")
        if step.work is not None:
            struck.reach("prefill" if isinstance(step.work, Prefill) else "decode")
        return execute(self, step)

    def saved(self, index):
        struck.reach("snapshot")
        return save(self, index)

    def written(*arguments):
        struck.reach("snapshot")
        return write(*arguments)

    Executor.execute, Executor._save, bundle.write = told, saved, written


def wrap_life(struck: Struck) -> None:
    from tided import boot
    from tided.life import Daemon

    phase, stop = boot._phase, Daemon._stop_in_order

    @contextmanager
    def told(name, loop):
        struck.reach("boot")
        with phase(name, loop):
            yield

    async def stopping(self):
        struck.reach("shutdown")
        await stop(self)

    boot._phase, Daemon._stop_in_order = told, stopping


def wrap_clock(struck: Struck) -> None:
    """The wall clock, as Python tells it. What waits or measures reads the monotonic one."""
    from tided.tide import history

    now, now_ns, date = time.time, time.time_ns, dates.datetime

    class Moved(date):
        @classmethod
        def now(cls, tz=None):
            return date.now(tz) + dates.timedelta(seconds=struck.jumped_s)

    time.time = lambda: now() + struck.jumped_s
    time.time_ns = lambda: now_ns() + struck.jumped_s * 10**9
    history.datetime = Moved


def wrap_memory(struck: Struck) -> None:
    """What the system says that it could still give."""
    line = memory._line

    def told(name, meminfo):
        return LITTLE_BYTES if name == "MemAvailable" and struck.is_short_of_memory else line(name, meminfo)

    memory._line = told


def main() -> int:
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    struck = Struck(Path(arguments["--state-dir"]), int(arguments["--rank"]))
    for wrap in (wrap_memory, wrap_reads, wrap_steps, wrap_life, wrap_clock):
        wrap(struck)
    from tided import daemon

    return daemon.main()


if __name__ == "__main__":
    sys.exit(main())
