"""`tidectl logits`: the engine's logits of a token list in a file that any implementation can be compared with."""

import json
from pathlib import Path
from typing import NamedTuple

from tided.errors import DataError, PermissionError_, UsageError

MAX_TOKENS_FILE_BYTES = 64 << 20


class Options(NamedTuple):
    """None: as the profile says; with a bare checkpoint one rank and all experts resident."""

    chunk: int | None
    ranks: int | None
    resident: int | None
    decode: int


def run(
    profile: Path | None, checkpoint: Path | None, tokens: Path, out: Path, options: Options, as_json: bool
) -> None:
    """Computes first and writes last: a failure leaves no file behind."""
    if (profile is None) == (checkpoint is None):
        raise UsageError("name either a profile or a checkpoint", hint="tidectl logits PROFILE ... | --checkpoint DIR")
    ids = read_ids(tokens)
    if options.decode > len(ids):
        raise UsageError(f"--decode {options.decode} of only {len(ids)} tokens")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {out.absolute().parent} for --out")
    raise NotImplementedError


def read_ids(path: Path) -> list[int]:
    """An array of token ids. Their upper limit is the model's vocabulary, which the engine knows."""
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
