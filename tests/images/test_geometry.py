"""The released tower's sizes as its specification states them, and what must hold for any size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tided.errors import DataError
from tided.images.geometry import Geometry, Size

RELEASED = Geometry(patch=14, merge=3, max_tokens=1024, min_pixels=544 * 544)
MINI = Geometry(patch=14, merge=3, max_tokens=64, min_pixels=7056)

SIZES = {
    # (height, width) given: (height, width) seen, tokens = rows * (columns + 1) + 2
    "the least area": ((544, 544), (546, 546), 13 * 14 + 2),
    "one pixel": ((1, 1), (546, 546), 13 * 14 + 2),
    "enlarged, both sides cut": ((100, 300), (322, 952), 8 * 24 + 2),
    "as it is, whole patches": ((900, 700), (910, 700), 22 * 18 + 2),
    "full HD": ((1080, 1920), (966, 1708), 23 * 42 + 2),
    "a square that is too large": ((4000, 4000), (1302, 1302), 31 * 32 + 2),
    "one row": ((2, 16384), (42, 1021 * 42), 1024),
    "one column": ((16384, 2), (511 * 42, 42), 1024),
}


@pytest.mark.parametrize(("given", "seen", "tokens"), SIZES.values(), ids=SIZES)
def test_sizes_of_the_released_tower(given, seen, tokens):
    assert RELEASED.fitted(Size(*given)) == seen
    assert RELEASED.tokens(Size(*seen)) == tokens


@given(st.integers(1, 16384), st.integers(1, 16384), st.sampled_from([RELEASED, MINI]))
def test_any_image_becomes_whole_patches_that_fit(height, width, geometry):
    seen = geometry.fitted(Size(height, width))
    assert seen.height % geometry.patch == seen.width % geometry.patch == 0
    assert 4 <= geometry.tokens(seen) <= geometry.max_tokens
    rows, columns = geometry.grid(seen)
    assert geometry.tokens(seen) == rows * (columns + 1) + 2


@pytest.mark.parametrize("size", [(0, 14), (14, 0), (14, 15), (-14, 14), (42 * 40, 42 * 40)])
def test_sizes_that_the_tower_takes_not(size):
    assert RELEASED.tokens(Size(*size)) == 0


def test_a_checkpoint_without_a_tower_is_told_as_such():
    with pytest.raises(DataError, match="no vision tower"):
        Geometry.of({"model_type": "glm_moe_dsa"})
    vision = {"patch_size": 14, "downsample_ratio": 3, "max_image_tokens": 1024, "min_pixels": 295936}
    assert Geometry.of({"vision_config": vision | {"hidden_size": 1024}}) == RELEASED
