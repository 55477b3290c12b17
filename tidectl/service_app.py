"""`tidectl service`: its commands and their options."""

from pathlib import Path
from typing import Annotated

import typer

from tidectl.options import Json

HELP = """The service's units for systemd.

\b
  tidectl service install --dry-run   what would be written
  tidectl service install
  systemctl enable --now tided.target tided@mini-deepseek
  tidectl status
"""
service = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)

Prefix = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Where TideLM is installed: DIR/bin/tided is started.  [default: where this command is]"
    ),
]
Root = Annotated[Path, typer.Option(metavar="DIR", help="A system that does not run, as an image: its files alone.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")]
Force = Annotated[
    bool, typer.Option("--force", help="Also files that were changed by hand; a copy stays beside, as FILE.saved.")
]


@service.command("install")
def service_install(
    prefix: Prefix = None, root: Root = Path("/"), dry_run: DryRun = False, force: Force = False, json: Json = False
) -> None:
    """Write the units, make the service's user and directories. Tells systemd; starts and enables nothing.

    The differences to what is there come first. A file that somebody changed by hand is not overwritten: what is to
    outlive an update belongs into `systemctl edit tided@.service`.

    \b
      tidectl service install --dry-run
      tidectl service install --prefix /opt/tidelm
      systemctl enable tided.target tided@ds41-mxfp4     to serve after a boot
    """
    from tidectl import service

    service.install(service.Options(prefix, root.absolute(), dry_run, force), json)


@service.command("uninstall")
def service_uninstall(
    root: Root = Path("/"), dry_run: DryRun = False, force: Force = False, json: Json = False
) -> None:
    """Take the units away again. Refused while a rank runs.

    Models, histories, caches, keys and profiles stay where they are, and so do the user and what `systemctl edit`
    wrote.
    """
    from tidectl import service

    service.uninstall(service.Options(None, root.absolute(), dry_run, force), json)


@service.command("show")
def service_show(
    prefix: Prefix = None,
    root: Root = Path("/"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="The differences to what is there instead, as `install --dry-run`.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the files that `install` writes. Of each whether it is there, older, or changed by hand."""
    from tidectl import service

    options = service.Options(prefix, root.absolute(), True, False)
    if dry_run:
        service.install(options, json)
    else:
        service.show(options, json)
