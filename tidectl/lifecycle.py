"""`tidectl start | stop | restart`, from rank 0's machine over all nodes of a profile."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from tidectl import differing, profiles, runner, stopping, supervisor
from tidectl.node_messages import Lines, Tail
from tidectl.nodes import Node, nodes_of
from tidectl.output import emit, say
from tidectl.preflight import check_ports, check_profile
from tidectl.running import look
from tidectl.starting import OutOfTime, RankFailed, Start
from tidectl.state import state_dir
from tidectl.team import Team
from tidectl.waiting import Item, line, waiting
from tided.control.state import RankState
from tided.errors import NotRunningError, TideError, UsageError
from tided.settings import Settings

LOG_LINES = 15


def start(profile: Path, timeout_s: float, as_json: bool, here_alone: bool = False) -> None:
    """Everything that can be refused is refused before a process is started. `here_alone`: other nodes are left to
    themselves."""
    settings = check_profile(profile)
    directory = state_dir()
    nodes = _nodes(settings, profile, here_alone)
    runner.claim(directory)
    check_ports(settings)
    with Team(nodes, directory) as team:
        _start(team, settings, profile, directory, timeout_s, as_json)


def stop(timeout_s: float | None, as_json: bool) -> None:
    directory = state_dir()
    ended = stopping.stop(directory, timeout_s)
    if as_json:
        emit("stop/1", ended)
    else:
        say(f"stopped {profiles.name_of(ended['profile'])}")
        for rank in ended["ranks"]:
            if rank["exit_code"]:
                say(f"rank {rank['rank']} {supervisor.how_ended(rank['exit_code'])}")


def restart(profile: Path | None, timeout_s: float, as_json: bool, here_alone: bool = False) -> None:
    """The new profile is judged before the old one is stopped, as far as that is possible without the memory and the
    ports that the old one holds: a mistake in it costs no service. Where nothing runs, what ran last is started."""
    directory = state_dir()
    now = runner.status(directory)
    ran = now.run or now.last
    if profile is None and ran is None:
        raise NotRunningError("nothing runs, and nothing ran here before", hint="tidectl start PROFILE")
    chosen = profile or Path(ran.profile if ran else "")
    settings = check_profile(chosen)
    nodes = _nodes(settings, chosen, here_alone)
    if now.run is None:
        say(f"nothing was running: starting {profiles.name_of(str(chosen))}")
    else:
        with waiting() as show:
            show([Item("checking", f"{profiles.name_of(str(chosen))}, beside what runs")])
            differing.refuse(settings, nodes)
        stopping.stop(directory, None)
        with Team(nodes, directory) as team:
            stopping.settle(team)
    runner.claim(directory)
    check_ports(settings)
    with Team(nodes, directory) as team:
        _start(team, settings, chosen, directory, timeout_s, as_json)


def _nodes(settings: Settings, profile: Path, here_alone: bool) -> list[Node]:
    """Rank 0's node first. Others are started from there alone."""
    nodes = nodes_of(settings.parallel)
    if here_alone:
        return [node for node in nodes if node.here]
    if not nodes[0].here:
        hint = "start it there; --here starts the ranks of this machine alone, for rank 0 to find"
        raise UsageError(f"rank 0 is on {nodes[0].host}, not on this machine", where=str(profile), hint=hint)
    return nodes


def _start(team: Team, settings: Settings, profile: Path, directory: Path, timeout_s: float, as_json: bool) -> None:
    run = Start(team, settings, profile, directory)
    try:
        with waiting() as show:
            ranks = run.run(timeout_s, show)
    except OutOfTime:
        say(line(run.items()))
        raise
    except RankFailed as failed:
        _abort(run)
        _show_log(failed)
        raise failed.error from failed
    except KeyboardInterrupt:
        _abort(run, "interrupted: ending the ranks")
        say("nothing is running")
        raise
    except BaseException:
        _abort(run)
        raise
    _report(profile, directory, ranks, as_json)


def _abort(run: Start, why: str = "") -> None:
    """Nothing serves yet, so nothing is waited for but the ranks' own end. They end whether or not anybody reads it."""
    with suppress(OSError):
        if why:
            say(why)
    for error in run.abort():
        with suppress(OSError):
            say(f"{error.where}: its ranks could not be ended: {error.what}")


def _show_log(failed: RankFailed) -> None:
    """The log of the rank that ended: its last word is often shorter."""
    if failed.rank is None:
        return
    told = [line for line in failed.error.what.splitlines() if line.strip()]
    try:
        found = failed.member.ask(Tail(failed.rank, LOG_LINES), Lines).lines
    except TideError:  # the node is gone
        return
    lines = [text for _, text in found if not any(part in text for part in told)]
    if lines:
        say(f"the last lines of rank {failed.rank}'s log:")
        say("\n".join(f"  {line}" for line in lines))


def _report(profile: Path, directory: Path, ranks: list[RankState], as_json: bool) -> None:
    now = look(directory)
    facts: dict[str, Any] = {"profile": str(profile), "url": now.url}
    if as_json:
        emit("start/1", {**facts, "ranks": [{"rank": rank.rank, "pid": rank.pid} for rank in ranks]})
        return
    name = profiles.name_of(str(profile))
    model = (now.health or {}).get("model") or "the model"
    if not now.url:
        say(f"{name}: the ranks of this machine are ready")
        return
    say(f"{model} serves at {now.url} (profile {name})")
    say(f"ask it: tidectl chat; watch it: tidectl top, or {now.url}/expert-map; end it: tidectl stop", "dim")
