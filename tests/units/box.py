"""A systemd of its own in namespaces of its own (`box.sh`), with TideLM installed at /opt/tidelm."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "box.sh"
START_S = 240  # of a pair on two busy cores
WRITE = 'mkdir -p "$(dirname "$1")" && cat > "$1" && chmod "$2" "$1"'


def missing() -> str:
    """What this machine lacks to run one; empty: nothing."""
    tools = [
        tool for tool in ("systemctl", "dbus-daemon", "unshare", "nsenter", "ip", "curl") if not shutil.which(tool)
    ]
    if tools or not Path("/lib/systemd/systemd").exists():
        return (
            f"a systemd of its own needs {' '.join(tools) or 'systemd'} (Debian: systemd dbus util-linux iproute2 curl)"
        )
    if os.geteuid() != 0:
        return "a systemd of its own needs root"
    if subprocess.run(["findmnt", "-nt", "cgroup2"], capture_output=True, check=False).returncode:
        return "a systemd of its own needs a cgroup2 file system"
    return ""


class Box:
    def __init__(self, directory: Path) -> None:
        self._enter = ["bash", str(SCRIPT), "exec", str(directory)]
        self.directory = directory

    def run(self, *command: str, timeout_s: float = START_S, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """As root inside."""
        whole = [*self._enter, *command]
        return subprocess.run(whole, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)

    def __call__(self, *command: str, timeout_s: float = START_S, stdin: str = "") -> str:
        """What it wrote. Fails with all that it said."""
        done = self.run(*command, timeout_s=timeout_s, stdin=stdin)
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def begin(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*self._enter, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        self("sh", "-c", WRITE, "sh", path, f"{mode:o}", stdin=text)

    def show(self, unit: str, *names: str) -> dict[str, str]:
        chosen = [f"--property={name}" for name in names]
        return dict(line.split("=", 1) for line in self("systemctl", "show", *chosen, unit).splitlines())

    def value(self, unit: str, name: str) -> str:
        return self.show(unit, name)[name]

    def journal(self, unit: str, *options: str) -> str:
        return self("journalctl", "--no-pager", "--output=short-monotonic", f"--unit={unit}", *options)

    def until(self, unit: str, timeout_s: float = START_S, **wanted: str) -> None:
        """Polls until the unit's properties are these."""
        deadline_s = time.monotonic() + timeout_s
        while (found := self.show(unit, *wanted)) != wanted:
            assert time.monotonic() < deadline_s, f"{unit}: {found}, not {wanted}\n{self.journal(unit)}"
            time.sleep(0.2)

    def says(self, unit: str, words: str, timeout_s: float = 60) -> None:
        """Polls until the unit's journal has the words."""
        deadline_s = time.monotonic() + timeout_s
        while words not in (found := self.journal(unit)):
            assert time.monotonic() < deadline_s, f"{unit} never said {words!r}\n{found}"
            time.sleep(0.2)

    def ask(self, port: int, words: str, max_tokens: int = 8, key: str = "") -> dict[str, Any]:
        body = {"temperature": 0, "max_tokens": max_tokens, "messages": [{"role": "user", "content": words}]}
        answer: dict[str, Any] = json.loads(self("curl", *curl(port, body, key)))
        return answer


def curl(port: int, body: dict[str, Any], key: str = "") -> list[str]:
    """Its arguments, for a chat completion."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    return ["-sS", "--max-time", "200", "-H", f"Authorization: Bearer {key}", "-d", json.dumps(body), url]


@contextmanager
def box(directory: Path, installed: Path) -> Iterator[Box]:
    """Whatever the test does, nothing of it is left."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["bash", str(SCRIPT), "start", str(directory), f"{installed}/opt/tidelm:/opt/tidelm"]
    subprocess.run(command, check=True, timeout=60)
    try:
        yield Box(directory)
    finally:
        subprocess.run(["bash", str(SCRIPT), "stop", str(directory)], check=True, timeout=60)


def join(one: Box, other: Box) -> None:
    """A cable between two: 10.77.0.1 and 10.77.0.2."""
    subprocess.run(["bash", str(SCRIPT), "link", str(one.directory), str(other.directory)], check=True, timeout=30)
