"""`tidectl service`: writes the files of `tidectl.service_files`, takes them away, shows them."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tidectl import units
from tidectl.output import emit, say
from tidectl.service_files import File, enabled, files, is_ours, read
from tided.errors import PermissionError_, TideError, UsageError
from tided.files import whole

COMMAND_S = 60.0
HIDDEN = {
    "/home": "ProtectHome=",
    "/root": "ProtectHome=",
    "/run/user": "ProtectHome=",
    "/tmp": "PrivateTmp=",
    "/var/tmp": "PrivateTmp=",
}
KEPT = "kept: /var/lib/tidelm (models, histories, caches, keys), /etc/tidelm (profiles), the user tidelm"


class Options(NamedTuple):
    """`prefix` None: where this command is installed. `root`: of the system whose files are meant, absolute."""

    prefix: Path | None
    root: Path
    dry_run: bool
    force: bool


def install(options: Options, as_json: bool) -> None:
    prefix = _prefix(options)
    found = _found(options.root, prefix)
    wrong = [file for file in found if file.state != "current"]
    commands = _commands(options.root)
    _show_diffs({file: file.diff() for file in wrong}, as_json)
    if not options.dry_run:
        _refuse_changed(wrong, options.force)
        _as_permitted(_write, wrong)
        for command in commands:
            units.run(command, COMMAND_S)
    _tell("service-install/1", found, commands, options, as_json)
    if not as_json:
        _say_installed(wrong, commands, options)


def uninstall(options: Options, as_json: bool) -> None:
    # What is taken away is judged by its own digest, whatever prefix it names.
    found = [file for file in _found(options.root, str(_own_prefix())) if file.state != "absent"]
    links = enabled(options.root)
    commands = [["systemctl", "daemon-reload"]] if _is_live(options.root) and (found or links) else []
    _show_diffs({file: file.diff(remove=True) for file in found}, as_json)
    if not options.dry_run:
        _refuse_running(options.root)
        _refuse_changed(found, options.force)
        _as_permitted(_remove, [*links, *(file.path for file in found)])
        for command in commands:
            units.run(command, COMMAND_S)
    _tell("service-uninstall/1", found, commands, options, as_json, links)
    if not as_json:
        would = "would be removed" if options.dry_run else "removed"
        say(
            f"{would}: {_listed([*links, *(file.path for file in found)])}"
            if found or links
            else "nothing is installed"
        )
        say(KEPT)


def show(options: Options, as_json: bool) -> None:
    found = _found(options.root, str(options.prefix or _own_prefix()))
    if as_json:
        rows = [{"path": str(file.path), "state": file.state, "text": file.text} for file in found]
        return emit("service-show/1", {"files": rows, "systemd": _is_live(options.root)})
    for file in found:
        print(f"# {file.path}: {file.state}\n{file.text}")
    return None


def _prefix(options: Options) -> str:
    """Where the unit will find the programs. Raises UsageError for a place that it could not."""
    prefix = str(options.prefix.absolute() if options.prefix else _own_prefix())
    if any(letter.isspace() or letter in "%\"'\\$" for letter in prefix):
        raise UsageError("systemd reads such letters in its own way", where=prefix, hint="choose another --prefix")
    program = options.root / prefix.lstrip("/") / "bin" / "tided"
    if not os.access(program, os.X_OK):
        into = "" if options.root == Path("/") else f"DESTDIR={options.root} "
        raise UsageError("there is no program", where=str(program), hint=f"make install {into}PREFIX={prefix}")
    real = program.resolve()
    for path in (Path(prefix), real, (real.parent / "python").resolve()):
        _refuse_hidden(path, options.root)
    return prefix


def _refuse_hidden(path: Path, root: Path) -> None:
    """`path`: of the program, of the Python that runs it."""
    for place, directive in HIDDEN.items():
        if path.is_relative_to(place if root == Path("/") else root / place.lstrip("/")):
            raise UsageError(
                f"the service does not see what is below {place} ({directive})",
                where=str(path),
                hint="make install PREFIX=/opt/tidelm PYTHON=/usr/bin/python3, then --prefix /opt/tidelm",
            )


def _own_prefix() -> Path:
    """Of this installation: the directory with bin/tided, which for `make install` is the one above the environment."""
    environment = Path(sys.prefix)
    above = environment.parent
    return above if (above / "bin" / "tided").resolve() == environment / "bin" / "tided" else environment


def _found(root: Path, prefix: str) -> list[File]:
    try:
        return files(root, prefix)
    except OSError as error:
        raise PermissionError_(f"cannot be read: {error.strerror}", where=str(error.filename)) from None


def _is_live(root: Path) -> bool:
    return root == Path("/") and units.BOOTED.is_dir()


def _commands(root: Path) -> list[list[str]]:
    """What makes the files count: user, directories, units; none where systemd does not run."""
    if not _is_live(root):
        return []
    return [
        ["systemd-sysusers", "/etc/sysusers.d/tidelm.conf"],
        ["systemd-tmpfiles", "--create", "/etc/tmpfiles.d/tidelm.conf"],
        ["systemctl", "daemon-reload"],
    ]


def _refuse_changed(wrong: Sequence[File], force: bool) -> None:
    changed = [file.path for file in wrong if file.state == "changed"]
    if changed and not force:
        raise TideError(
            f"changed by hand: {_listed(changed)}",
            hint="move the changes into `systemctl edit tided@.service`, or --force (a copy stays as FILE.saved)",
        )


def _refuse_running(root: Path) -> None:
    if not _is_live(root):
        return
    pattern = ["list-units", "--plain", "--no-legend", "--state=active,activating,deactivating,reloading", "tided@*"]
    running = [line.split()[0] for line in units.run(["systemctl", *pattern]).splitlines() if line.strip()]
    if running:
        raise TideError(f"running: {', '.join(running)}", hint="`tidectl stop`, or systemctl stop 'tided@*'")


def _as_permitted(work: Callable[[Any], None], things: Sequence[Any]) -> None:
    try:
        for thing in things:
            work(thing)
    except OSError as error:
        where = str(error.filename or "")
        hint = "run it as root, or name another --root" if os.geteuid() else ""
        raise PermissionError_(f"cannot be written: {error.strerror}", where=where, hint=hint) from None


def _write(file: File) -> None:
    """As a whole: a temporary name, fsync, rename. What somebody changed is kept beside."""
    file.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    if file.state == "changed":
        file.path.replace(_saved(file.path))
    with whole(file.path) as out:
        os.fchmod(out.fileno(), 0o644)
        out.write(file.text.encode())


def _remove(path: Path) -> None:
    if not path.is_symlink() and not is_ours(read(path) or ""):
        path.replace(_saved(path))
    else:
        path.unlink(missing_ok=True)


def _saved(path: Path) -> Path:
    return path.with_name(f"{path.name}.saved")


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths)


def _show_diffs(diffs: dict[File, str], as_json: bool) -> None:
    if not as_json:
        print("".join(diffs.values()), end="", flush=True)


def _tell(
    schema: str,
    found: Sequence[File],
    commands: list[list[str]],
    options: Options,
    as_json: bool,
    links: Sequence[Path] = (),
) -> None:
    """`state`: before."""
    if not as_json:
        return
    rows = [{"path": str(file.path), "state": file.state} for file in found]
    facts = {"files": rows, "links": [str(path) for path in links], "commands": commands, "done": not options.dry_run}
    emit(schema, facts)


def _say_installed(wrong: Sequence[File], commands: list[list[str]], options: Options) -> None:
    would = "would be written" if options.dry_run else "written"
    say(f"{would}: {_listed([file.path for file in wrong])}" if wrong else "every file is as it would be written")
    if commands:
        say(f"{'would be run' if options.dry_run else 'run'}: {', '.join(' '.join(command) for command in commands)}")
    elif options.root == Path("/"):
        say("systemd does not run here: no user was made, and nothing was reloaded")
    if options.dry_run and (changed := [file.path for file in wrong if file.state == "changed"]) and not options.force:
        say(f"changed by hand, so this would be refused without --force: {_listed(changed)}")
    if not options.dry_run and commands:
        say("start: tidectl start PROFILE; with the machine: systemctl enable tided.target tided@PROFILE")
