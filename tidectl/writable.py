"""Whether a file that a command will write in the end can be written: tried before minutes go by."""

import os
from contextlib import suppress
from pathlib import Path

from tided.errors import PermissionError_, UnavailableError, UsageError
from tided.files import temporary_of


def refuse_unwritable(file: Path, option: str) -> None:
    """As it will be written: another file beside it first. What is there stays as it is. Raises TideError."""
    hint = f"{option} FILE in a directory that is there, and yours"
    if os.path.isdir(file):  # noqa: PTH112  Path's raises, for a name that is too long
        raise UsageError("is a directory", where=str(file), hint=f"{option} names a file in it")
    temporary = temporary_of(file)
    try:
        temporary.open("xb").close()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"{file.parent} is no directory", where=str(file), hint=hint) from error
    except PermissionError as error:
        raise PermissionError_("this user may not write there", where=str(file), hint=hint) from error
    except OSError as error:
        raise UnavailableError(f"cannot be written ({error.strerror})", where=str(file), hint=hint) from error
    with suppress(OSError):
        temporary.unlink()
