"""What the server and the processes that decode images for it say to each other of one image."""

from typing import NamedTuple

import msgspec

from tided.images.geometry import Size


class RefusedImageError(Exception):
    """What is wrong with an image, in words for who sent it."""


class Limits(msgspec.Struct, frozen=True):
    """Of one image: pixels in all, as its header says."""

    pixels: int


class Decoded(NamedTuple):
    """`pixels` [height, width, 3]; `digest` names them and their size."""

    size: Size
    pixels: bytes
    digest: bytes
