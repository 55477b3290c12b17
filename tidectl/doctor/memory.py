"""Memory: what is there, who holds it, and what may take it away while a pair serves."""

import re
from typing import Any

from tidectl.doctor.check import Finding, View, fail, ok, size, skip, warn
from tidectl.doctor.machine import Machine
from tided.settings import Memory

SHOWN_HOLDERS, SHOWN_CLASSES = 3, 4
ANSWER_S = 120.0
KERNEL = re.compile(
    r"Out of memory: Killed|oom-kill|NVRM.*(?:NO_MEMORY|Xid)|nvme.*(?:I/O error|timeout|reset)"
    r"|Buffer I/O error|blk_update_request: I/O error|mlx5.*(?:error|failed)",
    re.I,
)


def available(view: View) -> Finding:
    """By MemAvailable: files in the page cache count as free, because they give way; CUDA's own figure leaves them
    out."""
    info = meminfo(view.machine)
    if "MemAvailable" not in info:
        return skip("/proc/meminfo does not tell")
    free, total = info["MemAvailable"], info["MemTotal"]
    seen = f"{size(free)} of {size(total)} are available"
    holders = f"; most is held by {', '.join(held_by(view.machine, info))}"
    if view.settings is None or view.is_running:
        low, least = _floors(view)
        if free < low:
            fix = "end what is not needed: without memory a node freezes, and says nothing"
            return fail(seen + holders, fix) if free < least else warn(seen + holders, fix)
        return ok(seen)
    return _before_a_start(view, seen, holders)


def _before_a_start(view: View, seen: str, holders: str) -> Finding:
    """By the gates of a start: all that stays fits, and so does a first long prompt."""
    answer = view.engine.answer("needs", ANSWER_S)
    if answer.fault:
        what = f"{seen}; what the profile needs is not known: {answer.fault}"
        return warn(what, answer.hint or "see the other checks")
    value: dict[str, Any] = dict(answer.value)
    ranks, missing = value["ranks"], value["missing"]
    need = sum(nbytes for classes in ranks.values() for nbytes in classes.values())
    seen = f"{seen}, {len(ranks)} rank{'s' * (len(ranks) > 1)} here need {size(need)} ({classes_of(ranks)})"
    if missing:
        short = "; ".join(f"gate '{name}' asks {words}" for name, words in missing.items())
        fix = f"end what holds it, or lower experts.resident: `tidectl plan {view.profile}` says what fits"
        return fail(f"{seen}; {short}{holders}", fix)
    return ok(seen) if value["judged"] else warn(f"{seen}; nothing tells what is free", "see `tidectl plan`")


def _floors(view: View) -> tuple[int, int]:
    """Below which it is told, and below which ranks end themselves."""
    memory = view.settings.memory if view.settings else Memory()
    return max(memory.reserve_bytes, memory.shed_below_bytes), memory.exit_below_bytes


def classes_of(ranks: dict[str, Any]) -> str:
    """The largest first, of all ranks together."""
    sums: dict[str, int] = {}
    for classes in ranks.values():
        for what, nbytes in classes.items():
            sums[what] = sums.get(what, 0) + nbytes
    largest = sorted(sums.items(), key=lambda pair: -pair[1])
    rest = sum(nbytes for _, nbytes in largest[SHOWN_CLASSES:])
    told = [*largest[:SHOWN_CLASSES], *([("others", rest)] if rest else [])]
    return ", ".join(f"{what} {size(nbytes)}" for what, nbytes in told)


def cache(view: View) -> Finding:
    """What is written back is not free yet: an arena that is taken meanwhile waits for the disk."""
    info = meminfo(view.machine)
    if "Cached" not in info:
        return skip("/proc/meminfo does not tell")
    files, dirty = info["Cached"] - info.get("Shmem", 0), info.get("Dirty", 0) + info.get("Writeback", 0)
    seen = f"{size(files)} of files, {size(dirty)} of them not written yet"
    if dirty > max(4_000_000_000, info["MemTotal"] // 20):
        return warn(seen, "wait until it is written (`sync`), or start later: until then it is not free")
    return ok(f"{seen}: it gives way, and no size of ours depends on it")


def swap(view: View) -> Finding:
    info = meminfo(view.machine)
    total = info.get("SwapTotal", 0)
    used = total - info.get("SwapFree", 0)
    if not total:
        return ok("none")
    seen = f"{size(used)} of {size(total)} in use"
    if used > 1_000_000_000:
        return warn(seen, "what is swapped out comes back a page at a time: end what holds memory, then `swapoff -a`")
    return ok(seen)


def cma(view: View) -> Finding:
    """Memory set aside for devices. Kernels were seen to count more of it free than there is, and MemAvailable with
    it."""
    info = meminfo(view.machine)
    total, free = info.get("CmaTotal", 0), info.get("CmaFree", 0)
    if not total:
        return skip("none is set aside")
    seen = f"{size(free)} of {size(total)} set aside for devices are free"
    return (
        warn(seen, "what is available is overstated by the difference: restart the node") if free > total else ok(seen)
    )


def limit(view: View) -> Finding:
    """Of a control group; on a node whose GPU shares its memory it limits the GPU as well, without an error."""
    found = [(path, most) for path, most in _limits(view.machine) if most < _total(view.machine)]
    if not found:
        return ok("no control group limits it")
    path, most = min(found, key=lambda pair: pair[1])
    seen = f"{path} allows {size(most)} of {size(_total(view.machine))}"
    fix = "run without a memory limit (MemoryMax=infinity, no --memory of a container)"
    return fail(seen, f"{fix}: it counts the GPU's memory too") if view.on_cuda else warn(seen, fix)


def _limits(machine: Machine) -> list[tuple[str, int]]:
    """Of our own group and those above it, in either version of control groups."""
    found = []
    for line in (machine.text("proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        kind = "" if not controllers else "/memory" if "memory" in controllers.split(",") else None
        if kind is None:
            continue
        file = "memory.limit_in_bytes" if kind else "memory.max"
        parts = [part for part in path.split("/") if part]
        for end in range(len(parts), -1, -1):
            at = "/".join([f"sys/fs/cgroup{kind}", *parts[:end]])
            text = (machine.text(f"{at}/{file}") or "").strip()
            if text.isdigit():
                found.append((f"/{at}", int(text)))
    return found


def locked(view: View) -> Finding:
    """Of this shell; a unit's own is LimitMEMLOCK."""
    line = next((x for x in (view.machine.text("proc/self/limits") or "").splitlines() if "locked memory" in x), "")
    soft = line.split()[3] if len(line.split()) > 3 else ""
    if not soft:
        return skip("/proc/self/limits does not tell")
    seen = "no limit" if soft == "unlimited" else f"{size(int(soft))} may be locked"
    if soft == "unlimited" or not view.on_cuda:
        return ok(seen if soft == "unlimited" else f"{seen}; ranks on a CPU lock none")
    return fail(seen, "`ulimit -l unlimited`, or LimitMEMLOCK=infinity of the unit: adapters and pinned memory need it")


def kernel_log(view: View) -> Finding:
    """What ends a process, a disk or a link without a word of its own."""
    ran = view.machine.run(["dmesg"], 3.0)
    if ran is None or ran.code != 0:
        return skip("this user may not read the kernel's log (`sudo dmesg`)")
    hits = [line for line in ran.out.splitlines() if KERNEL.search(line)]
    if not hits:
        return ok("no want of memory, no fault of a disk, a driver or an adapter")
    return warn(f"{len(hits)} lines of trouble, the last: {hits[-1][:160]}", "`dmesg -T` tells when, and the rest")


def meminfo(machine: Machine) -> dict[str, int]:
    """Bytes."""
    found = {}
    for line in (machine.text("proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def held_by(machine: Machine, info: dict[str, int]) -> list[str]:
    """The largest holders: processes by resident memory, huge pages, files in memory."""
    held = []
    for pid in filter(str.isdigit, machine.names("proc")):
        status = dict(
            line.split(":", 1) for line in (machine.text(f"proc/{pid}/status") or "").splitlines() if ":" in line
        )
        words = status.get("VmRSS", "").split()
        if words and words[0].isdigit():
            held.append((int(words[0]) * 1024, f"{status.get('Name', '?').strip()} (pid {pid})"))
    held.append((info.get("HugePages_Total", 0) * info.get("Hugepagesize", 0), "huge pages (vm.nr_hugepages)"))
    held.append((info.get("Shmem", 0), "files in memory (tmpfs, /dev/shm)"))
    return [f"{name} {size(nbytes)}" for nbytes, name in sorted(held, reverse=True)[:SHOWN_HOLDERS] if nbytes]


def _total(machine: Machine) -> int:
    return meminfo(machine).get("MemTotal", 1 << 62)
