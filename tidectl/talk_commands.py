"""`tidectl chat` and `why`: their arguments and options."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tidectl.options import Json


def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="The question. Without one: standard input, or a conversation on a terminal."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The server.  [default: what runs here, else http://127.0.0.1:8000]"),
    ] = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="A system prompt.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Longest answer, thinking included.  [default: the server's]")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", min=0, max=2, help="0: always the likeliest token.  [default: the server's]"),
    ] = None,
    thinking: Annotated[
        bool | None, typer.Option(help="Whether the model thinks first.  [default: the server's]")
    ] = None,
    fidelity: Annotated[
        Literal["fast", "balanced", "exact"] | None,
        typer.Option(
            help="What becomes of missing experts: substituted, read if heavy, read.  [default: the server's]"
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="An image that goes with the question; may be given again."),
    ] = None,
    model: Annotated[str, typer.Option(metavar="NAME", help="For servers of many models; TideLM needs none.")] = "",
    stream: Annotated[bool, typer.Option(help="Show the answer while it is made.")] = True,
    markdown: Annotated[bool, typer.Option(help="On a terminal: draw markdown, fold the thinking.")] = True,
    json: Json = False,
) -> None:
    """Ask the model a question, or talk with it.

    The answer goes to stdout; thinking and statistics go to stderr. On a terminal markdown is drawn and the thinking is
    folded; in a conversation /help tells what else there is. Any server of OpenAI's API will do.

    \b
      tidectl chat "How many legs does a spider have?"
      tidectl chat --image cat.png "What is this?"
      tidectl chat --no-thinking --max-tokens 200 < question.txt > answer.txt
      tidectl chat
    """
    from tidectl import chat

    images = tuple(image or ())
    options = chat.Options(system, max_tokens, temperature, thinking, stream, model, fidelity or "", images, markdown)
    chat.run(prompt, url, options, json)


def why(
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST", show_default=False, help="The id of an answer (chatcmpl-...).  [default: the newest]"
        ),
    ] = "latest",
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The server.  [default: what runs here, else http://127.0.0.1:8000]"),
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Experts to show, those missed most first.")] = 20,
    json: Json = False,
) -> None:
    """Tell which experts a request wanted, missed and got, and when.

    The server keeps this of its newest requests: numbers alone, no text.

    \b
    Missed weight is the routing weight of picks whose expert was not here. Of it, "read before use" is what a layer
    waited for (`balanced`, `exact`); another expert answered for the rest. Reads that no step waits for are what
    happened: each with its moment.

    \b
    Why it moved: "chunk" and "prompt", by a plan between a prompt's chunks and behind it; "decode" and "urgent", by
    one during an answer (urgent: it missed badly); "idle", by one between requests; "hot read", for a missed pick
    at once; "budget", by `tidectl budget`. "for L/E" names the expert that gave way to it, E of layer L.

    \b
      tidectl why
      tidectl why chatcmpl-0uS4GkMYd0dUqhTxYR8zTqzq --top 50
    """
    from tidectl import why

    why.run(request, url, top, json)
