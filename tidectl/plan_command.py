"""`tidectl plan`: its options."""

from typing import Annotated, Literal

import typer

from tidectl.options import Json, Profile


def plan(
    profile: Profile,
    resident: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Another experts.resident than the profile's.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(metavar="TOKENS", min=16, help="Another cache.pool_tokens than the profile's.")
    ] = None,
    reserve: Annotated[
        float | None, typer.Option(metavar="GB", min=0, help="Another memory.reserve_bytes than the profile's.")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GB", min=0.1, help="What each node has free.  [default: what this machine has]"),
    ] = None,
    device: Annotated[
        float | None,
        typer.Option(metavar="GB", min=0.1, help="What each GPU has of its own.  [default: it shares the node's]"),
    ] = None,
    like: Annotated[
        Literal["ds41", "glm53"] | None,
        typer.Option(help="Plan for a released model's shapes, without its checkpoint.  [default: the profile's]"),
    ] = None,
    json: Json = False,
) -> None:
    """Show what a profile needs of memory, and what fits. By class for each rank; and the largest budget of experts.

    From the checkpoint's headers and the profile alone; nothing is loaded. Two gates: all that stays and the reserve
    fit; and so do a prefill chunk and what the ranks end themselves below, or the first long prompt would end them.
    Below the table: what a GB buys, and of the demand that was learned, how much the best set of each budget holds.
    Exits with 1 when the profile would be refused.

    \b
      tidectl plan mini-deepseek
      tidectl plan ds41-mxfp4 --memory 130.7 --resident 10000
      tidectl plan ds41-mxfp4 --memory 130.7 --context 3000000 --reserve 12
    """
    from tidectl import plan as planning
    from tidectl import profiles

    changes = planning.Changes(resident, context, reserve)
    raise typer.Exit(planning.run(profiles.find(profile), changes, planning.Given(memory, device), like, json))
