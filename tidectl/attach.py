"""Image files in a chat: read, known by their content, and sent as data URLs."""

import base64
from pathlib import Path
from typing import Any

from tided.errors import UsageError

MOST_BYTES = 20_000_000  # as a server takes them unless its profile says otherwise
_KINDS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
)


def image_part(file: Path) -> dict[str, Any]:
    """A part of a message's content. Raises UsageError for what cannot be read, or is no image by its first bytes."""
    try:
        with file.expanduser().open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror})", where=str(file)) from error
    if len(data) > MOST_BYTES:
        raise UsageError(f"larger than {MOST_BYTES // 1_000_000} MB", where=str(file), hint="send a smaller copy")
    kind = next((kind for begin, kind in _KINDS if data.startswith(begin)), None)
    if kind is None or (kind == "image/webp" and data[8:12] != b"WEBP"):
        raise UsageError("no PNG, JPEG, WebP or GIF by its content", where=str(file))
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}
