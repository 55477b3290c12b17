"""`tidectl fetch`: its arguments and options."""

from pathlib import Path
from typing import Annotated

import typer

from tidectl.options import Json
from tidectl.profiles import names as profile_names

Repository = Annotated[str, typer.Argument(metavar="REPO", help="owner/model of a hub.")]
To = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where to.  [default: the profile's, else a directory of the model's name]"),
]
Revision = Annotated[
    str, typer.Option(metavar="R", help="A commit, tag or branch.  [default: the newest, or what DIR began with]")
]
Dense = Annotated[bool, typer.Option("--dense", help="All but the routed experts, for model.dense of a profile.")]
Include = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Only files of this name (*, ? and [...] count); may be repeated."),
]
Exclude = Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="No file of this name; may be repeated.")]
Sums = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=SUM", help="What a file must be, beside the hub's own word; may be repeated."),
]
OfProfile = Annotated[
    str | None,
    typer.Option(
        metavar="PROFILE",
        autocompletion=profile_names,
        help="For this profile: into its model.path, or with --dense its model.dense, on every node of it.",
    ),
]
ToNodes = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST", help="This node too: over ssh it takes all from here; may be repeated."),
]
FromHub = Annotated[
    bool,
    typer.Option("--from-hub", help="Other nodes fetch from the hub, at the same time, with their own HF_TOKEN."),
]
Connections = Annotated[int, typer.Option(metavar="N", min=1, max=64, help="Files fetched at once.")]
Verify = Annotated[
    bool, typer.Option("--verify", help="Read all that is here again; what is not as it came is fetched anew.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would come, how large, and where to.")]
Lent = Annotated[bool, typer.Option("--lent", hidden=True, help="From another node, which says on stdin where.")]


def fetch(
    repository: Repository,
    to: To = None,
    revision: Revision = "",
    dense: Dense = False,
    include: Include = None,
    exclude: Exclude = None,
    sha256: Sums = None,
    profile: OfProfile = None,
    to_node: ToNodes = None,
    from_hub: FromHub = False,
    connections: Connections = 8,
    verify: Verify = False,
    dry_run: DryRun = False,
    json: Json = False,
    lent: Lent = False,
) -> None:
    """Fetch a checkpoint, or an overlay, from a hub.

    Sizes and room are looked at first. What is ended, by Ctrl-C or any other way, goes on where it was when the same
    command is run again, at the same commit. Every file is held against the sum that the hub published of it, and
    DIR/tidelm-fetch.json says where all came from, with the sha256 of each. --dense puts files together that hold no
    routed experts: they are smaller than the hub's, and no sum of them is published. HF_TOKEN and HF_ENDPOINT count.
    Other nodes take the files from this one, through ssh, once they are here: they come over the internet once. Then:
    `tidectl plan PROFILE`, `tidectl doctor PROFILE` (with --deep it reads every byte), `tidectl start PROFILE`.

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
