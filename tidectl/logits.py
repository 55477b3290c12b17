"""`tidectl logits`: the engine's logits of a token list in a file that any implementation can be compared with."""

import json
from pathlib import Path
from typing import Literal, NamedTuple

from tidectl.fits import dimensions
from tidectl.output import emit, say
from tidectl.waiting import Item, Show, waiting
from tidectl.writable import refuse_unwritable
from tided.errors import DataError, PermissionError_, UnavailableError, UsageError
from tided.settings import Settings

MAX_TOKENS_FILE_BYTES = 64 << 20


class Options(NamedTuple):
    """None: as the profile says; for a bare checkpoint one rank and all experts resident."""

    chunk: int | None = None
    ranks: int | None = None
    resident: int | None = None
    decode: int = 0
    numerics: Literal["native", "fp32"] | None = None


def run(
    profile: Path | None, checkpoint: Path | None, tokens: Path, out: Path, options: Options, as_json: bool
) -> None:
    """Judges first, before torch is imported, and writes last: a failure leaves no file behind."""
    target = _target(profile, checkpoint)
    ids = read_ids(tokens)
    check_ids(ids, target if isinstance(target, Path) else Path(target.model.path), tokens)
    if options.decode > len(ids):
        raise UsageError(f"--decode {options.decode} of only {len(ids)} tokens")
    refuse_unwritable(out, "--out")
    shape = _compute(target, ids, out, options)
    if as_json:
        emit("logits/1", {"out": str(out), "key": "logits", "tokens": shape[0], "vocabulary": shape[1]})
    else:
        say(f"{out}: logits [{shape[0]} tokens, {shape[1]}] in fp32")


def _target(profile: Path | None, checkpoint: Path | None) -> Settings | Path:
    from tided.profile import load_for_start
    from tided.profile.checkpoint_files import checkpoint_fault

    if checkpoint is not None and profile is None:
        if fault := checkpoint_fault(checkpoint):
            raise DataError(fault, hint="--checkpoint names a directory with config.json and *.safetensors")
        return checkpoint
    if profile is None or checkpoint is not None:
        raise UsageError("name either a profile or a checkpoint", hint="tidectl logits PROFILE ... | --checkpoint DIR")
    return load_for_start(profile)


def _compute(target: Settings | Path, ids: list[int], out: Path, options: Options) -> tuple[int, int]:
    """The shape of what was written."""
    try:
        with waiting() as show:
            show([Item("loading the engine")])
            return _engine_logits(target, ids, out, options, show)
    except PermissionError as error:
        raise PermissionError_("this user may not write the file", where=str(out)) from error
    except OSError as error:
        raise UnavailableError(f"the logits cannot be written ({error.strerror})", where=str(out)) from error


def _engine_logits(target: Settings | Path, ids: list[int], out: Path, options: Options, show: Show) -> tuple[int, int]:
    """torch is imported here and nowhere else in tidectl."""
    from tided.engine import offline

    def stage(what: str, done: int, total: int) -> None:
        show([Item(what, f"{done} of {total}" if total > 1 else "", done=done, total=total)])

    values = offline.logits(target, ids, **options._asdict(), progress=stage)
    offline.write_logits(out, values)
    return values.shape[0], values.shape[1]


def read_ids(path: Path) -> list[int]:
    """An array of token ids; their upper limit is the model's vocabulary."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOKENS_FILE_BYTES + 1)
    except PermissionError as error:
        raise PermissionError_("this user may not read the file", where=str(path)) from error
    except OSError as error:
        raise DataError(f"the tokens cannot be read ({error.strerror})", where=str(path)) from error
    if len(data) > MAX_TOKENS_FILE_BYTES:
        raise DataError(f"over {MAX_TOKENS_FILE_BYTES} bytes", where=str(path))
    try:
        ids = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON ({error})", where=str(path)) from error
    hint = "the file is one array of token ids: [0, 1731, 42]"
    if not isinstance(ids, list) or not ids:
        raise DataError("no array of token ids", where=str(path), hint=hint)
    for index, value in enumerate(ids):
        if type(value) is not int or value < 0:  # JSON's true is an int to isinstance
            raise DataError(f"element {index} is no token id: {json.dumps(value)[:40]}", where=str(path), hint=hint)
    return ids


def check_ids(ids: list[int], checkpoint: Path, tokens: Path) -> None:
    """By the checkpoint's config.json; what it does not tell is left to the engine."""
    model = dimensions(checkpoint)
    if model is None:
        return
    if len(ids) > model.positions:
        raise DataError(f"{len(ids)} tokens: the model reaches {model.positions}", where=str(tokens))
    for index, token in enumerate(ids):
        if token >= model.vocabulary:
            raise DataError(
                f"element {index} is no token id: {token}",
                where=str(tokens),
                hint=f"the model's vocabulary has {model.vocabulary} tokens",
            )
