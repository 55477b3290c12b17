"""How every command ends: an error of ours is its text on stderr and its exit code, and with --json an object."""

from typing import Any

import typer
from typer.core import TyperGroup

AS_JSON = "tidectl.json"


class Commands(TyperGroup):
    """An error of ours ends a command with its text on stderr and its own exit code, never with a traceback. With
    --json whatever ends it early is an object on stdout as well."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[AS_JSON] = "--json" in args[: args.index("--") if "--" in args else None]
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def invoke(self, ctx: Any) -> Any:
        from tided.errors import TideError

        try:
            return super().invoke(ctx)
        except TideError as error:
            from tidectl.output import report

            report(error)
            _tell(ctx, error.what, error.where, error.hint, error.exit_code)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            _tell(ctx, "interrupted", "", "", 130)
            raise
        except Exception as error:
            if hasattr(error, "format_message"):  # a wrong call, for which typer has no public class; it is on stderr
                _tell(ctx, error.format_message(), "", "see --help", getattr(error, "exit_code", 2))
            raise


def _tell(ctx: Any, what: str, where: str, hint: str, exit_code: int) -> None:
    if ctx.meta.get(AS_JSON):
        from tidectl.output import emit

        emit("error/1", {"error": {"what": what, "where": where, "hint": hint, "exit_code": exit_code}})
