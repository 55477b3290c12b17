"""From an image's size to the size that the vision tower sees, and to the tokens that it takes in a prompt.

An image of rows x columns tokens stands in a prompt as

    start, rows x (columns tokens, line end), end

A token is a square of `merge` x `merge` patches, a patch a square of `patch` x `patch` pixels.
"""

import math
from typing import Any, NamedTuple

import msgspec

from tided.errors import DataError


class Size(NamedTuple):
    height: int
    width: int


class Geometry(msgspec.Struct, frozen=True):
    """Of one vision tower. `max_tokens`: of one image; smaller images than `min_pixels` are enlarged."""

    patch: int
    merge: int
    max_tokens: int
    min_pixels: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Geometry":
        """From a checkpoint's config.json. Raises DataError."""
        try:
            vision = msgspec.convert(config.get("vision_config"), _Vision)
        except msgspec.ValidationError as error:
            raise DataError(
                f"no vision tower that this build knows: vision_config: {error}",
                where="config.json",
                hint="set rank = -1 in [vision]: images are refused then",
            ) from error
        return cls(vision.patch_size, vision.downsample_ratio, vision.max_image_tokens, vision.min_pixels)

    @property
    def cell(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    def grid(self, size: Size) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return -(-size.height // self.cell), -(-size.width // self.cell)

    def tokens(self, size: Size) -> int:
        """Of the whole span. 0 where the tower takes no image of that size."""
        rows, columns = self.grid(size)
        count = rows * (columns + 1) + 2
        whole = min(size) > 0 and size.height % self.patch == 0 and size.width % self.patch == 0
        return count if whole and count <= self.max_tokens else 0

    def fitted(self, given: Size) -> Size:
        """The size to which an image is brought: whole patches, within `max_tokens`."""
        height, width = given
        if height * width < self.min_pixels:
            ratio = (self.min_pixels / (width * height)) ** 0.5
            width, height = int(width * ratio), int(height * ratio)
        size = Size(self._patches(height), self._patches(width))
        return size if self.tokens(size) else self._largest(height, width)

    def _patches(self, side: float) -> int:
        return math.ceil(side / self.patch) * self.patch

    def _largest(self, height: int, width: int) -> Size:
        """The largest size of about these proportions whose tokens fit."""
        ratio, most, cell = height / width, self.max_tokens, self.cell
        columns = math.sqrt((most - 2) / ratio + 0.25) - 0.5
        rows = columns * ratio
        if columns < 1:  # one column
            return Size((most - 2) // 2 * cell, cell)
        if rows < 1:  # one row
            return Size(cell, (most - 3) * cell)
        scale = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
        return Size(*(math.floor(side * scale / self.patch) * self.patch for side in (height, width)))


class _Vision(msgspec.Struct):
    patch_size: int
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
