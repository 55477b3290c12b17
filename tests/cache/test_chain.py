"""Keys name tokens, their places and everything else that a context depends on."""

from hypothesis import given
from hypothesis import strategies as st

from tided.cache.chain import Image, chain

ids = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=40)


@given(ids, ids, st.integers(1, 8))
def test_two_prompts_share_the_keys_of_the_chunks_they_share_and_no_others(one, other, chunk):
    a, b = chain("s", one, chunk), chain("s", other, chunk)
    for i, (key, twin) in enumerate(zip(a.chunks, b.chunks, strict=False)):
        end = (i + 1) * chunk
        assert (key == twin) == (one[:end] == other[:end])
    assert (a.whole == b.whole) == (one == other)
    assert len(a.chunks) == len(one) // chunk
    assert len({*a.chunks, a.whole}) == len(a.chunks) + 1


def test_a_longer_prompt_does_not_change_the_keys_before():
    assert chain("s", range(20), 4).chunks == chain("s", range(23), 4).chunks
    assert chain("s", range(20), 4).chunks[:3] == chain("s", range(12), 4).chunks


def test_another_seed_shares_nothing():
    assert not {*chain("a", range(8), 4).chunks} & {*chain("b", range(8), 4).chunks}


def test_pixels_count_from_their_chunk_on():
    plain, seen = chain("s", range(12), 4), chain("s", range(12), 4, [Image(5, b"x" * 32)])
    other = chain("s", range(12), 4, [Image(5, b"y" * 32)])
    assert plain.chunks[0] == seen.chunks[0] == other.chunks[0]
    assert len({plain.chunks[1], seen.chunks[1], other.chunks[1]}) == 3
    assert len({plain.whole, seen.whole, other.whole}) == 3
