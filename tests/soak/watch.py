"""What two ranks hold, seen from outside: their processes, their folders, their logs, what they say of themselves."""

import re
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

RSS_SLACK_BYTES = 24 << 20
FD_SLACK, THREAD_SLACK = 4, 3  # pools begin their threads when there is work
FLAGGED = re.compile(r"^.*(?:WARNING|ERROR|CRITICAL|Traceback).*$", re.MULTILINE)


@dataclass(frozen=True)
class Held:
    """Of one rank, while nothing is asked of it."""

    fds: int
    threads: int
    rss_bytes: int
    parked_files: int
    unfinished_files: int
    prefix_bytes: int


def held(pid: int, cache: Path) -> Held:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    prefix = list((cache / "prefix").iterdir()) if (cache / "prefix").is_dir() else []
    return Held(
        fds=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        threads=int(status["Threads"]),
        rss_bytes=int(status["VmRSS"].split()[0]) * 1024,
        parked_files=len(list((cache / "parked").iterdir())) if (cache / "parked").is_dir() else 0,
        unfinished_files=sum(path.name.startswith(".") for path in prefix),
        prefix_bytes=sum(path.stat().st_size for path in prefix),
    )


def leaks(before: Held, after: Held, prefix_budget_bytes: int) -> list[str]:
    """What grew between two moments of rest."""
    found = []
    if after.fds > before.fds + FD_SLACK:
        found.append(f"file descriptors {before.fds} -> {after.fds}")
    if after.threads > before.threads + THREAD_SLACK:
        found.append(f"threads {before.threads} -> {after.threads}")
    if after.rss_bytes > before.rss_bytes + RSS_SLACK_BYTES:
        found.append(f"memory {before.rss_bytes / 1e6:.0f} -> {after.rss_bytes / 1e6:.0f} MB")
    if after.parked_files or after.unfinished_files:
        found.append(f"{after.parked_files} files of parked contexts, {after.unfinished_files} that are not whole")
    if after.prefix_bytes > prefix_budget_bytes:
        found.append(f"a prompt cache of {after.prefix_bytes} bytes where {prefix_budget_bytes} are allowed")
    return found


def figures(url: str) -> dict[str, float]:
    """Samples of /metrics without labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(tidelm_\w+) (\S+)$", text, re.MULTILINE)}


def come_to_rest(url: str, caches: list[Path], timeout_s: float = 60) -> str:
    """Waits until no request runs, the pool is empty and what was handed to the writers is written; else says what is
    still there."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            now = figures(url)
        except OSError as error:
            return f"the pair does not answer: {error}"
        busy = {
            name: now[f"tidelm_{name}"]
            for name in ("requests_running", "requests_waiting", "kv_tokens_used")
            if now.get(f"tidelm_{name}")
        }
        unfinished = [path.name for cache in caches for path in cache.glob("*/.*")]
        parked = [path.name for cache in caches for path in cache.glob("parked/*")]
        if not (busy or unfinished or parked):
            return ""
        if time.monotonic() > deadline:
            return f"not at rest after {timeout_s:g} s: {busy} {unfinished} {parked}"
        time.sleep(0.1)


def flagged(log: str) -> list[str]:
    return FLAGGED.findall(log)
