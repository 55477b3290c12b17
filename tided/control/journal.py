"""Log lines for whoever reads them: the journal has times of its own, and takes a line's priority from its head."""

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))  # sd-daemon(3)
DEBUG = 7


class JournalFormatter(logging.Formatter):
    """Every line of a message, traces included, has the message's priority: `journalctl -p err` shows all of it."""

    def format(self, record: logging.LogRecord) -> str:
        mark = f"<{priority(record.levelno)}>"
        return "\n".join(mark + line for line in super().format(record).split("\n"))


def formatter(stream: TextIO, environment: Mapping[str, str] = os.environ) -> logging.Formatter:
    """For a log that is written to `stream`."""
    words = "%(levelname)s %(name)s %(message)s"
    if is_journal(stream, environment):
        return JournalFormatter(words)
    return logging.Formatter(f"%(asctime)s {words}")


def is_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """The variable names the socket by device and inode: a child whose output was redirected has inherited it too."""
    with suppress(OSError, ValueError):
        found = os.fstat(stream.fileno())
        return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
    return False


def priority(level: int) -> int:
    return next((number for least, number in PRIORITIES if level >= least), DEBUG)
