"""`tidectl fetch`: a checkpoint of a hub, or what of it is no routed expert, onto this node and others."""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidectl.fetch import room
from tidectl.fetch.ask import make_plan
from tidectl.fetch.bring import fetch
from tidectl.fetch.lender import lending
from tidectl.fetch.nodes import Nodes
from tidectl.fetch.options import Options
from tidectl.fetch.plan import Plan, refuse_shortage
from tidectl.fetch.room import There
from tidectl.fetch.show import again, headline, report, tell_plan
from tidectl.node_messages import Room
from tidectl.output import say
from tidectl.room import size
from tidectl.waiting import Item, Show, waiting
from tided.errors import UnavailableError


def run(options: Options, as_json: bool) -> None:
    stop = threading.Event()
    with waiting() as show:
        plan = make_plan(options, stop, show)
        there = _there(options, plan, show)
    if options.dry_run:
        tell_plan(options, plan, there, as_json)
        return
    commit = plan.repository.commit
    nodes = Nodes({name: options.command(commit, "--to", found.directory) for name, found in there})
    with _alone(options.directory):
        plan.look()  # a fetch that ended meanwhile may have brought all of it
        refuse_shortage(plan)
        room.refuse_shortage(there)
        say(headline(plan))
        if changed := plan.changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            say(
                f"{changed[0]}{more} changed since they were fetched: compared now, and fetched again where they differ"
            )
        try:
            _bring(options, plan, nodes, stop)
        except KeyboardInterrupt:
            stop.set()
            left = f"{size(plan.left_bytes)} of {size(plan.total_bytes)} are left" if plan.missing else "all is here"
            say(f"stopped: {left}; this goes on:\n  {again(options, plan)}")
            raise
    report(plan, nodes.nodes, as_json)


def _there(options: Options, plan: Plan, show: Show) -> list[There]:
    """The directories of the other nodes."""
    if not options.nodes:
        return []
    show([Item("asking", ", ".join(options.nodes))])
    files = {target.name: target.nbytes for target in plan.targets}
    return room.ask(options.nodes, Room(str(options.directory), options.sent, options.dense, files))


def _bring(options: Options, plan: Plan, nodes: Nodes, stop: threading.Event) -> None:
    """Onto this node, then from it onto the others; or onto all of them at the same time."""
    here = Item("here", "whole", ready=True)
    if options.from_hub:
        with waiting() as show, nodes.running(None):
            fetch(plan, options.connections, stop, lambda items: show([*items, *nodes.items()]))
            nodes.wait(lambda: show([here, *nodes.items()]))
        return
    with waiting() as show:
        fetch(plan, options.connections, stop, show)
    if options.nodes:
        with lending(plan.directory, plan.manifest) as lender, nodes.running(lender), waiting() as show:
            nodes.wait(lambda: show([here, *nodes.items()]))


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One fetch at a time into a directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UnavailableError(f"cannot be made or used ({error.strerror})", where=str(directory)) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UnavailableError("another fetch writes here", where=str(directory), hint="wait for it") from error
    finally:
        os.close(lock)
