"""`tided`: one rank as a process. Its life is in `tided.life` (the loop) and `tided.boot` (the engine thread).

    tided --profile FILE --rank N [--state-dir DIR]
    tided --instance NAME[:RANK] [--state-dir DIR]      what the service's units call: `tided.profile.instances`

Exit codes: 0 stopped on request; 2 wrong usage; 65 checkpoint or another file missing or damaged; 69 a port, a peer or
memory is not available; 70 the ranks failed while serving (a restart is right); 77 not permitted; 78 the profile is
wrong, or the ranks differ (a restart is useless); 1 a mistake of ours.

The profile is checked before torch is imported: most mistakes are told within half a second.
"""

import argparse
import faulthandler
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tided.control import journal
from tided.control.keys import Keys, credential, load_keys
from tided.control.notify import Notifier
from tided.control.state import Claim, StateFile
from tided.control.wire import all_local
from tided.errors import ConfigError, PermissionError_, TideError, UsageError, told
from tided.files import sweep
from tided.life import Daemon
from tided.profile import load, load_for_start
from tided.profile.instances import SITE_DIR, parse, profile_of, rank_here
from tided.settings import Settings

log = logging.getLogger("daemon")

FILES = 1024  # beside connections: shards, packs, caches, sockets of the ranks
TRACE = "the log has the trace"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    os.umask(0o077)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(journal.formatter(sys.stderr))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # where is every thread? in the log
    state: StateFile | None = None
    try:
        state_dir = _state_dir(options.state_dir)
        profile, rank = _who(options)
        claim = Claim(state_dir, rank, str(profile))
        sweep(state_dir)
        state = StateFile(state_dir, rank)
        settings = _checked(profile, rank)
        keys = _keys(settings, rank, state_dir)
    except TideError as error:
        return _refused(state, error)
    except Exception as error:
        log.exception("the start failed")
        return _refused(state, TideError(f"the start failed: {told(error)}", hint=TRACE))
    # Read when the arithmetic libraries are loaded, which is after this line.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(settings.engine.threads)
    make_room(settings.server.max_connections)
    import uvloop

    code = uvloop.run(_run(settings, rank, keys, state, profile.stem))
    claim.release()
    if settings.parallel.ranks > 1:
        _leave(code, False)  # NCCL may still hold on to captured graphs: see `TorchGroup.close`
    return code


def make_room(connections: int) -> None:
    """Raises the process's own limit of open files as far as it may: connections must not take those of the engine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.warning("%d files may be open, for %d connections and the rest; raise LimitNOFILE", most, connections)


def _refused(state: StateFile | None, error: TideError) -> int:
    log.error("%s", error)
    Notifier().status(f"failed: {error.what}")
    if state is not None:
        state.enter("failed", str(error), exit_code=error.exit_code)
    return error.exit_code


async def _run(settings: Settings, rank: int, keys: Keys | None, state: StateFile, profile: str = "") -> int:
    daemon = Daemon(settings, rank, keys, state, profile)
    error = await daemon.run()
    code = error.exit_code if error is not None else 0
    if error is not None or daemon.engine_is_alive:
        _leave(code, daemon.engine_is_alive)
    return code


def _leave(code: int, engine_is_alive: bool) -> None:
    """Ends the process without asking anybody. After a fault the engine thread may hang in a collective or in a driver
    for minutes, and an interpreter that shuts down in order would wait for it, as would the destructors of the process
    group. Everything that must be kept has been written by now, and a peer, a client and the service manager wait."""
    if engine_is_alive and code:
        faulthandler.dump_traceback()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tided", description="One rank of a server. `tidectl` starts them all.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--profile", type=Path, metavar="FILE", help="profile, a TOML file; wants --rank")
    which.add_argument(
        "--instance",
        metavar="NAME[:RANK]",
        help="/etc/tidelm/NAME.toml or a bundled profile; without RANK the one whose address is this node's",
    )
    parser.add_argument("--rank", type=int, metavar="N", help="this process's rank, from 0")
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="keys, history, state; else $STATE_DIRECTORY or $TIDE_STATE_DIR"
    )
    options = parser.parse_args(arguments)
    if (options.rank is None) != (options.profile is None):
        parser.error("--profile and --rank go together; --instance has its rank behind a colon")
    return options


def _who(options: argparse.Namespace) -> tuple[Path, int]:
    """Profile and rank. An instance's profile is read for its hosts first, and judged as a whole by `_checked`."""
    if options.profile is not None:
        return options.profile, options.rank
    name, rank = parse(options.instance)
    profile = profile_of(name, Path(os.environ.get("CONFIGURATION_DIRECTORY", SITE_DIR)))
    return profile, rank_here(load(profile).parallel, name) if rank is None else rank


def _state_dir(chosen: Path | None) -> Path:
    from_environment = os.environ.get("STATE_DIRECTORY") or os.environ.get("TIDE_STATE_DIR")
    path = chosen or (Path(from_environment) if from_environment else None)
    if path is None:
        raise UsageError("no state directory", hint="give --state-dir DIR")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PermissionError_(f"the state directory cannot be made: {error.strerror}", where=str(path)) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError_("the state directory cannot be written", where=str(path))
    return path.absolute()


def _checked(profile: Path, rank: int) -> Settings:
    settings = load_for_start(profile)
    parallel = settings.parallel
    if not 0 <= rank < parallel.ranks:
        raise UsageError(f"there is no rank {rank}: parallel.ranks is {parallel.ranks}", where=str(profile))
    if parallel.hosts and len(parallel.hosts) != parallel.ranks:
        raise ConfigError(
            f"parallel.hosts names {len(parallel.hosts)} addresses for {parallel.ranks} ranks", where=str(profile)
        )
    return settings


def _keys(settings: Settings, rank: int, state_dir: Path) -> Keys | None:
    parallel = settings.parallel
    if parallel.ranks == 1:
        return None
    if parallel.key_file:
        return load_keys(Path(parallel.key_file), create=rank == 0 or all_local(parallel))
    if (given := credential()) is not None:
        log.info("the keys of the control plane come from the service manager (%s)", given)
        return load_keys(given, create=False)
    return load_keys(state_dir / "curve.key", create=rank == 0 or all_local(parallel))


if __name__ == "__main__":
    sys.exit(main())
