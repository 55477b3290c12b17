"""The answers of `tided.engine.examine`, which runs beside the other checks: importing torch takes seconds, and a
driver may hang or crash it."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import msgspec

NO_PROFILE = "no profile: name one"
MAX_SAID = 2000


class Answer(msgspec.Struct):
    """`value`; or what is wrong, or how the question crashed."""

    question: str
    value: dict[str, object] = {}
    what: str = ""
    where: str = ""
    hint: str = ""
    crash: str = ""

    @property
    def fault(self) -> str:
        """What is wrong, in one line; empty: nothing."""
        if self.crash:
            return f"it crashed: {self.crash}"
        return f"{self.where}: {self.what}" if self.what and self.where else self.what


class Engine:
    """Without a profile nobody is asked."""

    def answer(self, question: str, timeout_s: float) -> Answer:
        return Answer(question, what=NO_PROFILE)

    def close(self) -> None: ...


class Examined(Engine):
    """A process that answers all questions in its order; `at_rest`: also those that read the disk for a second."""

    def __init__(self, profile: Path, ranks: Sequence[int], at_rest: bool, command: Sequence[str] = ()) -> None:
        command = command or (sys.executable, "-P", "-m", "tided.engine.examine")
        line = [*command, str(profile), *map(str, ranks), *(["--at-rest"] if at_rest else [])]
        self._words = TemporaryFile()  # noqa: SIM115  # a pipe that nobody empties would hold it up
        self._process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._words, text=True, errors="replace"
        )
        self._answers: dict[str, Answer] = {}
        self._more, self._over = threading.Condition(), False
        threading.Thread(target=self._read, daemon=True).start()

    def answer(self, question: str, timeout_s: float) -> Answer:
        """Waits for it. A process that ended without it is an answer too."""
        with self._more:
            self._more.wait_for(lambda: question in self._answers or self._over, timeout_s)
            if question in self._answers:
                return self._answers[question]
        if not self._over:
            return Answer(question, crash=f"no answer in {timeout_s:.0f} s")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._words.seek(max(0, self._words.seek(0, os.SEEK_END) - MAX_SAID))
        said = self._words.read().decode(errors="replace")
        last = (said.strip().splitlines() or ["nothing said"])[-1]
        return Answer(question, crash=f"the process ended with {self._process.returncode}: {last[:200]}")

    def close(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._words.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(msgspec.DecodeError):
                found = msgspec.json.decode(line, type=Answer)
                with self._more:
                    self._answers[found.question] = found
                    self._more.notify_all()
        with self._more:
            self._over = True
            self._more.notify_all()
