"""What a person and a program are told of a fetch: before it, after it, and how it goes on."""

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from tidectl.fetch.nodes import Node
from tidectl.fetch.options import Options
from tidectl.fetch.plan import Plan
from tidectl.fetch.room import There
from tidectl.output import emit, say
from tidectl.room import free_bytes, size


def again(options: Options, plan: Plan) -> str:
    nodes = [part for node in options.nodes for part in ("--to-node", node)] + ["--from-hub"] * options.from_hub
    where = ("--profile", options.profile) if options.profile else ("--to", str(options.directory))
    return shlex.join([*options.command(plan.repository.commit, *where), *nodes])


def headline(plan: Plan) -> str:
    what = f"{plan.repository.name} at {plan.repository.commit[:12]}"
    come = plan.total_bytes - plan.left_bytes
    here = f", {size(come)} of them here" if come else ""
    return f"{what}: {len(plan.targets)} files, {size(plan.total_bytes)}{here}, to {plan.directory}"


def tell_plan(options: Options, plan: Plan, there: Sequence[There], as_json: bool) -> None:
    files = [
        {
            "name": target.name,
            "bytes": target.nbytes,
            "here_bytes": target.nbytes if target.name in plan.here else plan.come_bytes(target),
            "sha256": target.published.sha256 or None,
        }
        for target in plan.targets
    ]
    free = free_bytes(plan.directory)
    if as_json:
        more: dict[str, Any] = {"total_bytes": plan.total_bytes, "left_bytes": plan.left_bytes, "free_bytes": free}
        others = [
            {"node": name, "path": found.directory, "left_bytes": found.left_bytes, "free_bytes": found.free_bytes}
            for name, found in there
        ]
        more |= {"left_out_bytes": plan.left_out_bytes, "files": files, "nodes": others}
        emit("fetch-plan/1", {**_about(plan), **more})
        return
    for one in files:
        here = "here" if one["here_bytes"] == one["bytes"] else f"{one['here_bytes']} here" if one["here_bytes"] else ""
        print(f"{one['bytes']:>15,}  {one['name']}  {here}".rstrip())
    sys.stdout.flush()
    say(headline(plan))
    if options.dense:
        say(f"left out: {size(plan.left_out_bytes)} of routed experts")
    say(f"to come: {size(plan.left_bytes)}; free there: {size(free)}")
    how = "from the hub by itself" if options.from_hub else "from here through ssh"
    for name, found in there:
        say(f"then on {name}, {how}, to {found.directory}: {size(found.left_bytes)}; free: {size(found.free_bytes)}")


def _about(plan: Plan) -> dict[str, Any]:
    return {
        "repository": plan.repository.name,
        "commit": plan.repository.commit,
        "kind": plan.manifest.kind,
        "path": str(plan.directory),
    }


def report(plan: Plan, nodes: Sequence[Node], as_json: bool) -> None:
    fetched = plan.repository.fetched_bytes
    if as_json:
        others = [{"node": node.name, "commit": plan.repository.commit} for node in nodes]
        more = {"files": len(plan.targets), "bytes": plan.total_bytes, "fetched_bytes": fetched, "nodes": others}
        emit("fetch/1", {**_about(plan), **more})
        return
    own = sum(not plan.manifest.files[target.name].by for target in plan.targets)
    checked = f"{len(plan.targets) - own} as the hub published them" + (f", {own} put together here" if own else "")
    say(f"{plan.directory}: {len(plan.targets)} files, {size(plan.total_bytes)}, whole ({checked})")
    for node in nodes:
        say(f"{node.name}: the same")
