"""Commands that work on checkpoints and texts, without a server: their arguments and options."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tidectl.options import PROFILE_HELP, Json
from tidectl.profiles import names as profile_names


def logits(
    tokens: Annotated[Path, typer.Option(metavar="FILE", help="JSON: an array of token ids.")],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="safetensors to write: fp32 [tokens, vocabulary] under 'logits'.")
    ],
    profile: Annotated[
        str | None, typer.Argument(metavar="PROFILE", autocompletion=profile_names, help=PROFILE_HELP)
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A checkpoint instead of a profile: one rank, all experts resident."),
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens computed at once.  [default: the profile's]")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Local ranks that share the model.  [default: the profile's]")
    ] = None,
    resident: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Resident experts.  [default: the profile's]")
    ] = None,
    decode: Annotated[
        int, typer.Option(metavar="N", min=0, help="Compute the last N tokens one at a time, as decoding does.")
    ] = 0,
    numerics: Annotated[
        Literal["native", "fp32"] | None,
        typer.Option(
            help="native: rounding as the model was made for; fp32: none.  [default: the profile's, else native]"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write the logits of a list of token ids to a file.

    Teacher-forced, by the engine itself: to be held against another implementation.

    \b
      echo "[0, 17, 42]" > ids.json
      tidectl logits mini-deepseek --tokens ids.json --out logits.safetensors
    """
    from tidectl import logits, profiles

    source = profiles.find(profile) if profile else None
    logits.run(source, checkpoint, tokens, out, logits.Options(chunk, ranks, resident, decode, numerics), json)


def render(
    profile: Annotated[
        str | None,
        typer.Argument(
            metavar="PROFILE", autocompletion=profile_names, help="Whose model family, tokenizer and defaults count."
        ),
    ] = None,
    family: Annotated[
        Literal["deepseek-v41", "glm53"] | None,
        typer.Option(help="The model family whose prompt format is used.  [default: the profile's]"),
    ] = None,
    api: Annotated[
        Literal["openai", "anthropic"], typer.Option(help="Whose body comes in: chat completions, or messages.")
    ] = "openai",
    ids: Annotated[bool, typer.Option("--ids", help="Print the token ids, one JSON array; needs PROFILE.")] = False,
) -> None:
    """Print the prompt that a request becomes. Nothing else: no line end is added.

    The request is one JSON object on stdin: the body of an API call, or an object of "messages", "tools" and "options".

    \b
      tidectl render --family deepseek-v41 < body.json
      tidectl render --family glm53 --api anthropic < body.json
      tidectl render mini-deepseek --ids < body.json
    """
    from tidectl import profiles
    from tided.errors import UsageError

    source = profiles.find(profile) if profile else None
    if ids and source is None:
        raise UsageError("--ids needs a profile, for its tokenizer", hint="tidectl render PROFILE --ids")
    if family is None and source is None:
        hint = "tidectl render PROFILE, or tidectl render --family deepseek-v41"
        raise UsageError("name a profile or a family: whose prompt format is it?", hint=hint)
    from tidectl import render

    render.run(family, api, source, ids)


def parse(
    family: Annotated[
        Literal["deepseek-v41", "glm53"], typer.Option(help="The model family whose output format is read.")
    ],
    options: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help="thinking, backend_finish (stop or length), stop, tools_enabled, starts_inside_calls_block.",
        ),
    ] = "{}",
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON: the request's tools, an array as OpenAI takes it.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Characters fed at once.  [default: all]")
    ] = None,
) -> None:
    """Read what a model wrote, print the message that clients get. One JSON object.

    The generated text comes on stdin, markers as they are spelled, and is never changed by how it is fed.

    \b
      tidectl parse --family deepseek-v41 < output.txt
      tidectl parse --family glm53 --tools tools.json --chunk 3 < output.txt
    """
    from tidectl import parse

    parse.run(family, options, tools, chunk)


def pack(
    profile: Annotated[
        str | None, typer.Argument(metavar="PROFILE", autocompletion=profile_names, help=PROFILE_HELP)
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A checkpoint instead of a profile; needs --ranks and --out.")
    ] = None,
    exl3: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The same, whose experts must be EXL3; --out is DIR-packs where not given."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=64, help="Ranks that share an expert.  [default: the profile's]"),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(metavar="RANK", min=0, help="Only the pack of this rank.  [default: of all]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the packs go.  [default: the profile's experts.pack_dir]"),
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read a pack and check every byte; nothing is written.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a checkpoint's routed experts as packs, one file a rank.

    From a pack an expert is one read of its rank's share alone. A profile uses packs with experts.source = "pack" and
    experts.pack_dir. What is ended goes on where it stopped when it is run again; a pack that is there stays.

    \b
      tidectl pack ds41-mxfp4 --out /var/lib/tidelm/packs
      tidectl pack ds41-mxfp4 --rank 1 --out /var/lib/tidelm/packs
      tidectl pack --exl3 /models/GLM-5.3-exl3 --rank 0 --ranks 2
      tidectl pack --verify /var/lib/tidelm/packs/experts-rank-0-of-2.mxfp4
    """
    from tidectl import pack, profiles

    source = profiles.find(profile) if profile else None
    pack.run(source, checkpoint, verify, pack.Options(ranks, rank, out, exl3), json)


def fit(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A directory, or owner/model[@revision] of a hub.")],
    edited: Annotated[str, typer.Argument(metavar="EDITED", help="The same checkpoint, edited.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the directions go.")],
    layers: Annotated[str, typer.Option(metavar="A-B", help="Only these layers.  [default: all]")] = "",
    json: Json = False,
) -> None:
    """Recover what an abliterated checkpoint took out. Its directions, as a file for model.ablation of a profile.

    Reads both checkpoints a tensor at a time, of a hub by ranges of bytes, and keeps nothing but FILE. A layer whose
    edit is not that of one direction ends it. What is ended goes on where it stopped when it is run again. HF_TOKEN
    and HF_ENDPOINT count.

    \b
      tidectl fit zai-org/GLM-5.3-BF16 owner/GLM-5.3-abliterated --out glm53.ablation.safetensors

    In a profile then: [model] ablation = "glm53.ablation.safetensors", a path from where the profile is.
    """
    from tidectl import fit as fitting

    fitting.run(base, edited, out, layers, json)


def synth(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory, or an unfinished one of the same kind.")],
    like: Annotated[Literal["ds41", "glm53"], typer.Option(help="Whose shapes.")] = "ds41",
    layers: Annotated[int | None, typer.Option(metavar="N", help="Its first layers.  [default: all]")] = None,
    experts: Annotated[int | None, typer.Option(metavar="N", help="Routed experts of a layer.  [default: all]")] = None,
    engram_vocabulary: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=200, help="Rows of an Engram table for each of its 24 hash heads.  [default: 16,000,000]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Other numbers.")] = 0,
    in_memory: Annotated[
        bool, typer.Option("--in-memory", help="Write headers alone; the numbers are made as the engine reads them.")
    ] = False,
    json: Json = False,
) -> None:
    """Write made-up weights in a released model's shapes. To try what a machine can hold, and how fast.

    Names, formats and shards are the released model's; answers are noise. A profile whose model.path is DIR
    serves it (`tidectl plan` and `start`).
    What is ended goes on where it stopped when it is run again.

    \b
      tidectl synth /tmp/ds41 --in-memory
      tidectl synth /tmp/glm53 --like glm53 --in-memory
      tidectl synth /data/ds41-small --layers 4 --experts 32 --engram-vocabulary 100000
    """
    from tidectl import synth

    synth.run(out, like, layers, experts, engram_vocabulary, seed, in_memory, json)
