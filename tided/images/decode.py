"""The bytes of an image file to the pixels that the model sees. Runs in a worker process (`tided.images.worker`): what
is decoded here was sent by anybody.

Formats are told by content, not by label. Sizes are judged by the file's header, before anything is decoded. Texts of
errors are ours: a library's may hold what it should not.
"""

import hashlib
import io

from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from tided.images.geometry import Geometry, Size
from tided.images.types import Decoded, Limits, RefusedImageError

FORMATS = tuple(kind.format for kind in (PngImageFile, JpegImageFile, WebPImageFile, GifImageFile, BmpImageFile))
MOST_SIDE = 16384
_GREY = (127, 127, 127)
_DEEP_GREY = ("I;16", "I;16B", "I;16L", "I;16N", "I")


def decode(data: bytes, geometry: Geometry, limits: Limits) -> Decoded:
    """The first frame, turned as its EXIF says, over white where it is transparent, fitted to `geometry` and padded
    with grey. Raises RefusedImageError."""
    Image.MAX_IMAGE_PIXELS = None  # the limit is ours, and an error
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            _check_size(opened.size, limits)
            ImageOps.exif_transpose(opened, in_place=True)
            colours = _colours(opened)
    except RefusedImageError:
        raise
    except UnidentifiedImageError:
        raise RefusedImageError("not an image of a supported format (PNG, JPEG, WebP, GIF, BMP)") from None
    except MemoryError:
        raise RefusedImageError("decoding it takes too much memory") from None
    except Exception:  # decoders raise what they like: OSError, SyntaxError, struct.error, EOFError, ...
        raise RefusedImageError("damaged or incomplete") from None
    return _fitted(colours, geometry)


def _check_size(size: tuple[int, int], limits: Limits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise RefusedImageError("without pixels")
    if max(width, height) > MOST_SIDE:
        raise RefusedImageError(f"{width} x {height} pixels; a side may have {MOST_SIDE}")
    if width * height > limits.pixels:
        raise RefusedImageError(f"{width} x {height} pixels; an image may have {limits.pixels}")


def _colours(image: Image.Image) -> Image.Image:
    """Red, green and blue of 8 bits each."""
    if image.mode in _DEEP_GREY:  # 16 bits: the upper 8 count
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, (255, 255, 255, 255)), layer).convert("RGB")
    return image.convert("RGB")


def _fitted(image: Image.Image, geometry: Geometry) -> Decoded:
    size = geometry.fitted(Size(image.height, image.width))
    within = ImageOps.contain(image, (size.width, size.height))
    if not min(within.size):  # of the shorter side nothing would be left
        raise RefusedImageError(f"{image.width} x {image.height} pixels: one side is too long for the other")
    pixels = ImageOps.pad(within, (size.width, size.height), color=_GREY).tobytes()
    head = size.height.to_bytes(4, "little") + size.width.to_bytes(4, "little")
    return Decoded(size, pixels, hashlib.blake2b(head + pixels, digest_size=16).digest())
