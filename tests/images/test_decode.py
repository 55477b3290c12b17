"""Image files of every kind, whole, damaged and hostile, to pixels or to a clear refusal."""

import io
import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tided.images.decode import FORMATS, MOST_SIDE, decode
from tided.images.geometry import Geometry, Size
from tided.images.types import Limits, RefusedImageError

GEOMETRY = Geometry(patch=14, merge=3, max_tokens=64, min_pixels=7056)
LIMITS = Limits(pixels=4_000_000)
RED, GREEN, BLUE, WHITE, GREY = (200, 30, 40), (20, 180, 60), (30, 60, 220), (255, 255, 255), (127, 127, 127)


def file(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def flat(colour=RED, size=(84, 84), mode="RGB") -> Image.Image:
    return Image.new(mode, size, colour)


def seen(data: bytes, limits: Limits = LIMITS) -> np.ndarray:
    """[height, width, 3]"""
    found = decode(data, GEOMETRY, limits)
    return np.frombuffer(found.pixels, np.uint8).reshape(*found.size, 3)


def refused(data: bytes, limits: Limits = LIMITS) -> str:
    with pytest.raises(RefusedImageError) as error:
        decode(data, GEOMETRY, limits)
    assert "0x" not in str(error.value)
    return str(error.value)


def near(pixels: np.ndarray, colour, within: int = 4) -> bool:
    return bool((np.abs(pixels.astype(int) - np.array(colour)) <= within).all())


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format(kind):
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    pixels = seen(file(flat(), kind, **options))
    assert pixels.shape == (84, 84, 3)
    assert near(pixels, RED)


def test_the_label_of_a_file_does_not_count():
    """A TIFF, a PDF, an SVG, a PPM, an icon, text and nothing."""
    others = [file(flat(), kind) for kind in ("TIFF", "PDF", "PPM", "ICO")]
    for data in (*others, b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"hello", b"\x00" * 64, b""):
        assert "supported format" in refused(data)


def test_an_image_is_fitted_as_the_model_was_trained():
    """Bicubic, within the size, centred over grey."""
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (150, 70, 3), dtype=np.uint8))
    size = GEOMETRY.fitted(Size(150, 70))
    wanted = ImageOps.pad(noise, (size.width, size.height), method=Image.Resampling.BICUBIC, color=GREY)
    assert np.array_equal(seen(file(noise)), np.asarray(wanted))
    pixels = seen(file(flat(size=(70, 150))))
    assert near(pixels[:, :1], GREY) == near(pixels[:, -1:], GREY)  # as wide on both sides


def test_one_pixel_fills_the_least_image():
    assert seen(file(flat(size=(1, 1)))).shape == (84, 84, 3)
    assert near(seen(file(flat(size=(1, 1)))), RED)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_images_stand_upright(kind, orientation):
    """The upper half is red as a viewer shows it, however it lies in the file."""
    upright = flat(BLUE, (84, 168))
    upright.paste(flat(RED, (84, 84)))
    turned = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    lying = upright.transpose(turned[orientation]) if orientation in turned else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = seen(file(lying, kind, exif=exif.tobytes(), **({"quality": 95} if kind != "PNG" else {})))
    assert pixels.shape == (168, 84, 3)
    assert near(pixels[4:80], RED, 12)
    assert near(pixels[90:-4], BLUE, 12)


def test_damaged_exif_is_no_reason_to_refuse():
    data = file(flat(), "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff" + b"\xee" * 20)
    assert near(seen(data), RED)


def palette() -> Image.Image:
    image = flat(0, mode="P")
    image.putpalette([*RED, *GREEN])
    return image


TRANSPARENT = {
    "RGBA": (flat((*BLUE, 0), mode="RGBA"), WHITE),
    "half": (flat((0, 0, 0, 128), mode="RGBA"), (127, 127, 127)),
    "grey": (flat((10, 0), mode="LA"), WHITE),
}


@pytest.mark.parametrize(("image", "colour"), TRANSPARENT.values(), ids=TRANSPARENT)
def test_what_is_transparent_is_white(image, colour):
    assert near(seen(file(image)), colour)


def test_colours_that_a_palette_makes_transparent():
    assert near(seen(file(palette())), RED)
    assert near(seen(file(palette(), transparency=0)), WHITE)
    assert near(seen(file(palette(), "GIF", transparency=0)), WHITE)
    assert near(seen(file(flat(RED), transparency=RED)), WHITE)
    assert near(seen(file(flat(7, mode="L"), transparency=7)), WHITE)


def test_other_colour_models():
    assert near(seen(file(flat((0, 255, 255, 0), mode="CMYK"), "JPEG", quality=95)), (255, 0, 0), 8)
    assert near(seen(file(flat(90, mode="L"))), (90, 90, 90))
    assert near(seen(file(flat(1, mode="1"))), WHITE)
    assert near(seen(file(flat(RED).convert("YCbCr"), "JPEG", quality=95)), RED, 6)


def test_sixteen_bits_keep_their_upper_eight():
    deep = Image.fromarray(np.full((84, 84), 90 * 256 + 200, dtype=np.uint16))
    assert near(seen(file(deep)), (90, 90, 90), 1)
    assert near(seen(deep_colours()), RED, 1)


def deep_colours() -> bytes:
    """A PNG of 16 bits a colour, which Pillow reads and does not write."""
    row = b"\x00" + struct.pack(">3H", *(value * 257 for value in RED)) * 84
    head = struct.pack(">2I5B", 84, 84, 16, 2, 0, 0, 0)
    return png(head, zlib.compress(row * 84))


def png(head: bytes, body: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_moving_images_the_first_counts(kind):
    frames = [flat(BLUE), flat(GREEN)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = file(flat(RED), kind, save_all=True, append_images=frames, duration=50, **options)
    assert near(seen(data), RED)


# What is refused


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_ends_early(kind):
    noise = Image.fromarray(np.random.default_rng(2).integers(0, 256, (90, 90, 3), dtype=np.uint8))
    data = file(noise, kind)
    for share in (0.2, 0.5, 0.9):
        assert refused(data[: int(len(data) * share)]) == "damaged or incomplete"


def test_a_header_alone_tells_the_size():
    """100 million pixels in 50 bytes: nothing is decoded."""
    huge = png(struct.pack(">2I5B", 10_000, 10_000, 8, 2, 0, 0, 0), zlib.compress(b"\x00"))
    assert refused(huge) == "10000 x 10000 pixels; an image may have 4000000"
    assert refused(huge, Limits(pixels=100_000_000)) == "damaged or incomplete"


def test_sides_are_limited_by_themselves():
    long = png(struct.pack(">2I5B", MOST_SIDE + 1, 1, 8, 2, 0, 0, 0), zlib.compress(b"\x00"))
    assert refused(long) == f"{MOST_SIDE + 1} x 1 pixels; a side may have {MOST_SIDE}"


def test_the_limit_itself_is_allowed():
    assert seen(file(flat(size=(100, 50))), Limits(pixels=5000)).size
    assert "may have 4999" in refused(file(flat(size=(100, 50))), Limits(pixels=4999))


@pytest.mark.parametrize("size", [(MOST_SIDE, 1), (1, MOST_SIDE)])
def test_a_line_of_which_nothing_would_be_left(size):
    assert refused(file(flat(size=size))) == f"{size[0]} x {size[1]} pixels: one side is too long for the other"


def test_a_long_strip_is_taken():
    """Up to the tower's largest row or column of tokens."""
    pixels = seen(file(flat(size=(4000, 100))))
    assert GEOMETRY.tokens(Size(*pixels.shape[:2])) <= 64
    assert near(pixels[pixels.shape[0] // 2], RED)


def test_text_chunks_that_unfold_are_refused():
    """A PNG's text may be compressed: a bomb of its own."""
    bomb = b"zTXt" + b"a\x00\x00" + zlib.compress(b"\x00" * (1 << 27), 9)
    whole = file(flat())
    at = whole.index(b"IDAT") - 4
    chunk = struct.pack(">I", len(bomb) - 4) + bomb + struct.pack(">I", zlib.crc32(bomb))
    assert refused(whole[:at] + chunk + whole[at:]) == "damaged or incomplete"


def test_the_digest_is_of_size_and_pixels():
    one, same = decode(file(flat()), GEOMETRY, LIMITS), decode(file(flat(), "BMP"), GEOMETRY, LIMITS)
    assert one == same
    assert decode(file(flat(BLUE)), GEOMETRY, LIMITS).digest != one.digest
    wide, tall = (decode(file(flat(GREY, size)), GEOMETRY, LIMITS) for size in ((168, 84), (84, 168)))
    assert wide.pixels == tall.pixels
    assert wide.digest != tall.digest


VALID = [file(flat(size=(30, 20)), kind) for kind in FORMATS]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(VALID), st.data())
def test_bytes_that_are_changed_are_decoded_or_refused(data, draw):
    changed = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 6))):
        changed[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    with suppress(RefusedImageError):
        found = decode(bytes(changed), GEOMETRY, LIMITS)
        assert len(found.pixels) == found.size.height * found.size.width * 3
