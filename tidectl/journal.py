"""Logs of ranks that the service manager runs, from its journal."""

import json
import time
from collections.abc import Sequence
from typing import Any

from tidectl import units
from tidectl.logs import Line
from tidectl.units import Unit

MOST_LINES = 100_000


class Journal:
    """A rank's lines in the journal, as `tidectl.logs.Log` gives those of a file."""

    def __init__(self, rank: int, units: Sequence[Unit]) -> None:
        self.rank, self._cursor = rank, ""
        self._since_s = time.time()  # until a line has told a cursor
        self._unit = next((unit for unit in units if unit.rank == rank), None)

    def last(self, lines: int, all_runs: bool = False) -> list[Line]:
        self._since_s = time.time()
        match = [f"_SYSTEMD_INVOCATION_ID={self._unit.invocation}"] if self._unit and not all_runs else self._names()
        return self._read([*match, f"--lines={min(lines, MOST_LINES)}"])

    def added(self) -> list[Line]:
        behind = f"--after-cursor={self._cursor}" if self._cursor else f"--since=@{self._since_s:.6f}"
        return self._read([*self._names(), behind])

    def rest(self) -> list[Line]:
        return []

    def close(self) -> None:
        pass

    def _names(self) -> list[str]:
        return [f"--unit={self._unit.name if self._unit else f'tided@*:{self.rank}.service'}"]

    def _read(self, arguments: Sequence[str]) -> list[Line]:
        # --all: without it fields of more than 4096 bytes are null.
        text = units.run(["journalctl", "--quiet", "--no-pager", "--all", "--output=json", *arguments])
        records = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        if records:
            self._cursor = records[-1]["__CURSOR"]
        return [(self.rank, line) for record in records for line in _text(record)]


def _text(record: dict[str, Any]) -> list[str]:
    """With its time, in the form of the log files."""
    message = record.get("MESSAGE") or ""
    if isinstance(message, list):  # bytes that are no UTF-8
        message = bytes(message).decode(errors="replace")
    micros = int(record.get("__REALTIME_TIMESTAMP") or 0)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(micros // 1_000_000))
    return [f"{when},{micros // 1000 % 1000:03} {line}" for line in str(message).splitlines()]
