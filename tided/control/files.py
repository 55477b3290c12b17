"""Small private files that are replaced as a whole."""

import os
from contextlib import suppress
from pathlib import Path


def write_private(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replaces `path` by `data` as a whole, mode 0600: temporary name, fsync, rename. Without `durable` no fsync, which
    on a busy disk takes seconds: a power cut may then leave the file empty."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with suppress(FileNotFoundError):
        temporary.unlink()
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
