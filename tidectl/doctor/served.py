"""What runs here, what a start would need of this node: profile, ports, state directory, keys."""

import os
import stat
from pathlib import Path

from tidectl import fits, runner
from tidectl.doctor.check import Finding, View, fail, ok, skip, warn
from tidectl.doctor.engine import NO_PROFILE
from tidectl.profiles import name_of
from tidectl.running import headline
from tidectl.supervisor import culprit, how_ended
from tided.profile import check
from tided.settings import Settings

SHOWN = 3


def profile(view: View) -> Finding:
    if view.profile is None:
        return skip(NO_PROFILE)
    if view.wrong:
        return fail(headline(view.wrong), f"`tidectl profile check {view.profile}` tells all of it")
    assert view.settings is not None
    problems = [*check(view.profile), *fits.misfits(view.settings, view.profile)]
    errors = [one for one in problems if one.severity == "error"]
    if problems:
        seen = "; ".join(one.message for one in (errors or problems)[:SHOWN])
        fix = f"`tidectl profile check {view.profile}` shows the lines"
        return fail(seen, fix) if errors else warn(seen, fix)
    return ok(f"{view.profile.stem}: valid, and its checkpoint can do what it asks for")


def running(view: View) -> Finding:
    now = view.running
    if now.state == "stopped":
        last = culprit(now.last) if now.last else None
        if now.last and last:
            what = f"nothing runs; {name_of(now.last.profile)} {how_ended(last.exit_code)}: {headline(last.message)}"
            return warn(what, f"`tidectl logs --rank {last.rank}` has the rest; a start that serves ends this warning")
        return ok("nothing runs here")
    seen = f"{name_of(now.profile)} is {now.state}" if now.profile else f"a profile is {now.state}"
    if now.trouble:
        return fail(f"{seen}: {'; '.join(now.trouble)}", "`tidectl logs`; then `tidectl restart`")
    if view.profile and not view.is_running:
        return warn(f"{seen}, another profile than this", "memory, disk and ports are its own for now: `tidectl stop`")
    return ok(seen)


def ports(view: View) -> Finding:
    """Rank 0 opens them all."""
    assert view.settings is not None
    if 0 not in view.ranks_here:
        return skip("rank 0, which opens them, is on another node")
    wanted = _ports(view.settings)
    names = ", ".join(str(port) for _, port, _ in wanted)
    if view.is_running:
        held = [str(holder) for _, port, _ in wanted if (holder := view.machine.holder(port))]
        return ok(f"{names}: of what runs here ({', '.join(dict.fromkeys(held)) or 'not seen'})")
    for host, port, setting in wanted:
        if fault := view.machine.port_fault(host, port, setting):
            holder = view.machine.holder(port)
            who = f", by {holder}" if holder else ""
            return fail(f"{host}:{port}: {fault.what}{who}", fault.hint or f"end it, or set {setting}")
    return ok(f"{names} are free")


def _ports(settings: Settings) -> list[tuple[str, int, str]]:
    parallel, server = settings.parallel, settings.server
    head = parallel.hosts[0] if parallel.hosts else "127.0.0.1"
    between = [
        (head, parallel.control_port, "parallel.control_port"),
        (head, parallel.control_port + 1, "parallel.control_port"),
        (head, parallel.data_port, "parallel.data_port"),
    ]
    return [(server.host, server.port, "server.port"), *(between if parallel.ranks > 1 else [])]


def state(view: View) -> Finding:
    folder = view.state_dir
    try:
        found = folder.stat()
    except FileNotFoundError:
        parent = next(path for path in folder.parents if path.exists())
        if os.access(parent, os.W_OK):
            return ok(f"{folder} is made by the first start")
        return fail(
            f"{folder} is not there, and {parent} is not this user's", "set TIDE_STATE_DIR to a directory of yours"
        )
    except OSError as error:
        return fail(f"{folder}: {error.strerror}", "set TIDE_STATE_DIR to a directory of yours")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return fail(f"{folder} is not this user's", "run as its owner, or set TIDE_STATE_DIR")
    if stat.S_IMODE(found.st_mode) & 0o077:
        return warn(f"{folder} is open to others", f"`chmod 700 {folder}`: it holds what prompts became")
    return ok(f"{folder}, closed to others")


def keys(view: View) -> Finding:
    """Whoever has the file can join the ranks."""
    assert view.settings is not None
    if view.settings.parallel.ranks == 1:
        return skip("one rank talks to nobody")
    path = Path(view.settings.parallel.key_file or runner.key_file(view.state_dir))
    try:
        found = path.stat()
    except FileNotFoundError:
        if view.peers and view.settings.parallel.key_file:
            return fail(f"{path} is not there", "copy it from another node, 0600: one file for all of them")
        return ok(f"{path} is made by the first start" + ", which brings it to the other nodes" * bool(view.peers))
    except OSError as error:
        return fail(f"{path}: {error.strerror}", "make it this user's own")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        return fail(
            f"{path} has mode {mode:04o}: others can read it", f"`chmod 600 {path}`, and make it anew if they did"
        )
    return ok(f"{path}, this user's alone")
