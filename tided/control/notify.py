"""systemd's notification protocol: one datagram of `NAME=value` lines to the socket in `NOTIFY_SOCKET`.

Without that variable nothing is sent. The manager may be gone or slow: a lost notification is no error of ours.
"""

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress


class Notifier:
    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        for_us = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(environment.get("WATCHDOG_USEC", "0")) / 1e6 if for_us and address else 0.0
        """The manager ends us when it hears nothing for so long; 0: it does not watch."""

    def ready(self) -> None:
        self._send("READY=1")

    def status(self, text: str) -> None:
        self._send(f"STATUS={text.splitlines()[0] if text else ''}")

    def reloading(self) -> None:
        """`ready` ends it. The time is what a manager tells this reload from an earlier one by."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def more_time(self, seconds: float) -> None:
        """A start or a stop that goes on may take so much longer from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def _send(self, lines: str) -> None:
        if self._address:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(lines.encode(), self._address)
