"""`tidectl profile`: its commands and their options."""

import typer

from tidectl.options import Json, Profile

HELP = """Check, list and explain profiles.

\b
  tidectl profile list
  tidectl profile show mini-deepseek   every key, with what it does
  tidectl profile check my-profile.toml
  tidectl start my-profile.toml
"""
profile = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)


@profile.command("check")
def profile_check(file: Profile, json: Json = False) -> None:
    """Tell everything that is wrong with a profile.

    Its keys and values, and, once they are right, whether its checkpoint can do what it asks for. Exits with 78 on an
    error. A note is none; it tells what else a start here and now would refuse: a checkpoint that is not here or lacks
    a file, a port in use, a key that this build does not act on. Whether what is in its files is
    right, `tidectl doctor` tells.
    """
    from tidectl import profile_commands, profiles

    raise typer.Exit(profile_commands.check(profiles.find(file), json))


@profile.command("list")
def profile_list(json: Json = False) -> None:
    """List the profiles that have a name. And what keeps this build from starting one here.

    They come with TideLM, or are this node's own: /etc/tidelm/NAME.toml, which comes before a bundled one of its name.
    A broken one is listed with its error, and the exit code is that of the first.
    """
    from tidectl import profile_commands

    raise typer.Exit(profile_commands.list_named(json))


@profile.command("show")
def profile_show(file: Profile, json: Json = False) -> None:
    """Show every key of a profile. Its resolved value, what it does, what it affects."""
    from tidectl import profile_commands, profiles

    profile_commands.show(profiles.find(file), json)


@profile.command("reference")
def profile_reference() -> None:
    """Print every key that a profile may have, as a page of Markdown."""
    from tidectl import reference

    print(reference.markdown(), end="")
