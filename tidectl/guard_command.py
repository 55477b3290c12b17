"""`tidectl guard`: its declaration."""

import typer

from tidectl.options import Here, Json, Profile


def guard(profile: Profile, here: Here = False, json: Json = False) -> None:
    """Compare what ranks would compute with, and start nothing. On all nodes of a profile.

    The boot guard's dry run: every node opens the checkpoint as a rank does, and declares what a start would compare:
    settings, sources, libraries, driver, checkpoint, edits and tokenizer by their content. Packs are checked to be the
    checkpoint's. Clocks are compared too; a start does without that. Nothing that runs is touched.

    Exits with 0 when the ranks may serve together, with 78 when they differ, else with what a node refuses.

    \b
      tidectl guard ds41-mxfp4
      tidectl guard my-profile.toml --json
    """
    from tidectl import profiles

    source = profiles.find(profile)
    from tidectl import guarding

    raise typer.Exit(guarding.show(source, here, json))
