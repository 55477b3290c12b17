"""Where the bytes of an image come from: a data URL, or a host that the profile allows."""

import base64
import binascii

from tided.images.types import RefusedImageError

_BLANKS = str.maketrans("", "", " \t\r\n")


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def from_data_url(url: str, most_bytes: int) -> bytes:
    """What the label says of the format does not count. Raises RefusedImageError."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise RefusedImageError("expected a data URL of base64: data:image/png;base64,...")
    text = text.translate(_BLANKS)  # long texts come with line breaks
    if len(text) * 3 // 4 > most_bytes + 2:
        raise too_large(most_bytes)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RefusedImageError("its base64 is not valid") from None
    if len(data) > most_bytes:
        raise too_large(most_bytes)
    return data


def too_large(most_bytes: int) -> RefusedImageError:
    return RefusedImageError(f"larger than {most_bytes} bytes")
