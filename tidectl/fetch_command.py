"""`tidectl fetch`: its arguments and options."""

from pathlib import Path
from typing import Annotated

import typer

from tidectl.options import Json
from tidectl.profiles import names as profile_names


def fetch(
    repository: Annotated[str, typer.Argument(metavar="REPO", help="owner/model of a hub.")],
    to: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to.  [default: the profile's, else a directory of the model's name]"),
    ] = None,
    revision: Annotated[
        str, typer.Option(metavar="R", help="A commit, tag or branch.  [default: the newest, or what DIR began with]")
    ] = "",
    dense: Annotated[
        bool, typer.Option("--dense", help="All but the routed experts, for model.dense of a profile.")
    ] = False,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only files of this name (*, ? and [...] count); may be repeated."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="No file of this name; may be repeated.")
    ] = None,
    sha256: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SUM", help="What a file must be, beside the hub's own word; may be repeated."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            autocompletion=profile_names,
            help="For this profile: into its model.path, or with --dense its model.dense, on every node of it.",
        ),
    ] = None,
    to_node: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="This node too: over ssh it takes all from here; may be repeated."),
    ] = None,
    from_hub: Annotated[
        bool,
        typer.Option("--from-hub", help="Other nodes fetch from the hub, at the same time, with their own HF_TOKEN."),
    ] = False,
    connections: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="Files fetched at once.")] = 8,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all that is here again; what is not as it came is fetched anew.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would come, how large, and where to.")] = False,
    json: Json = False,
    lent: Annotated[
        bool, typer.Option("--lent", hidden=True, help="From another node, which says on stdin where.")
    ] = False,
) -> None:
    """Fetch a checkpoint, or an overlay, from a hub.

    Sizes and room are looked at first. What is ended, by Ctrl-C or any other way, goes on where it was when the same
    command is run again, at the same commit. Every file is held against the sum that the hub published of it, and
    DIR/tidelm-fetch.json says where all came from, with the sha256 of each. --dense puts files together that hold no
    routed experts: they are smaller than the hub's, and no sum of them is published. HF_TOKEN and HF_ENDPOINT count.
    Other nodes take the files from this one, through ssh, once they are here: they come over the internet once.

    \b
      tidectl fetch deepseek-ai/DeepSeek-V4.1-Flash --dry-run
      tidectl fetch deepseek-ai/DeepSeek-V4.1-Flash --profile ds41-mxfp4
      tidectl fetch zai-org/GLM-5.3 --dense --to /models/GLM-5.3-dense --to-node spark-2
      tidectl fetch owner/edits --include overlay.safetensors --to /models/edits
    """
    if lent:
        from tidectl.fetch import lender

        lender.take()
    from tidectl.fetch.options import Options
    from tidectl.fetch.profile import for_profile
    from tidectl.fetch.run import run

    patterns = (include or (), exclude or (), sha256 or ())
    options = Options(
        repository, to, revision, dense, *patterns, to_node or (), connections, dry_run, from_hub, verify, lent
    )
    run(for_profile(options, profile) if profile else options, json)
