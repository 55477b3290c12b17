"""What must be true before a rank is started. Each refusal says what to do, and leaves nothing behind."""

import errno
import os
import socket
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tidectl.fits import refuse_misfit
from tidectl.nodes import local_ranks
from tidectl.output import say
from tided.errors import ConfigError, PermissionError_, TideError, UnavailableError
from tided.profile import Problem, check, load_for_start
from tided.profile.reading import read
from tided.settings import Settings


class Port(NamedTuple):
    """A port that rank 0 opens, and the key it comes from."""

    host: str
    number: int
    setting: str
    which: str = ""


def check_profile(path: Path) -> Settings:
    """The profile is valid, this build acts on all of it, its checkpoint is here and fits, a rank is for this
    machine."""
    settings = load_for_start(path)
    refuse_misfit(settings, path)
    if not local_ranks(settings.parallel):
        raise ConfigError(_foreign(settings), where=str(path))
    for note in check(path):  # what a start refuses is refused above: these are warnings
        say(note.render())
    return settings


def check_ports(settings: Settings) -> None:
    """Raises for the first port that rank 0 could not open here."""
    for port in _ports(settings):
        require_free(*port)


def machine_notes(settings: Settings, path: Path) -> list[Problem]:
    """What a start on this machine would refuse as things are now: a port in use, foreign addresses."""
    reading = read(path)
    note = partial(reading.source.problem, severity="note")
    if not local_ranks(settings.parallel):
        return [note(reading.span("parallel.hosts"), _foreign(settings))]
    found = []
    for port in _ports(settings):
        try:
            require_free(*port)
        except TideError as error:
            message = f"{port.host}:{port.number}: {error.what}"
            found.append(note(reading.span(port.setting), message, suggestion=error.hint))
    return found


def _foreign(settings: Settings) -> str:
    return f"none of parallel.hosts is an address of this machine: {', '.join(settings.parallel.hosts)}"


def _ports(settings: Settings) -> list[Port]:
    """Rank 0 opens all the ports: none where it is not on this machine."""
    parallel, server = settings.parallel, settings.server
    if 0 not in local_ranks(parallel):
        return []
    head = parallel.hosts[0] if parallel.hosts else "127.0.0.1"
    between = [
        Port(head, parallel.control_port, "parallel.control_port"),
        Port(head, parallel.control_port + 1, "parallel.control_port", "the second port of "),
        Port(head, parallel.data_port, "parallel.data_port"),
    ]
    return [Port(server.host, server.port, "server.port"), *(between if parallel.ranks > 1 else ())]


def require_free(host: str, port: int, setting: str, which: str = "") -> None:
    """Raises when a listener could not be opened there: by asking the kernel for one, and closing it again."""
    where = f"{host}:{port} ({which}{setting})"
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, kind)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: TIME_WAIT is no listener
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror as error:
        raise ConfigError(f"no such address ({error.strerror})", where=where) from error
    except OSError as error:
        raise _refusal(error, where, port, setting) from error


def _refusal(error: OSError, where: str, port: int, setting: str) -> UnavailableError | PermissionError_ | ConfigError:
    if error.errno == errno.EADDRINUSE:
        hint = f"another program listens there: `ss -ltnp 'sport = :{port}'` shows which; stop it, or set {setting}"
        return UnavailableError("the port is in use", where=where, hint=hint)
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionError_(
            "this user may not listen on the port", where=where, hint=f"set {setting} to 1024 or more"
        )
    return ConfigError(f"nothing can listen there ({os.strerror(error.errno or 0)})", where=where)
