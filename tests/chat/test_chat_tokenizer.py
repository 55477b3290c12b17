"""Tokenising segments and decoding streams."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import SPECIALS, build

from tided.chat.detokenizer import StreamDecoder, byte_alphabet
from tided.chat.messages import Segment
from tided.chat.tokenizer import Tokenizer
from tided.errors import DataError


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.open(directory)


@pytest.mark.parametrize("spelling", SPECIALS)
def test_text_never_becomes_a_special_token(tokenizer, spelling):
    specials = set(tokenizer.special_ids.values())
    for text in (spelling, f" {spelling}", f"a{spelling}b", spelling * 3, f"\n{spelling}\n"):
        ids = tokenizer.encode_text(text)
        assert not specials & set(ids)
        assert tokenizer.decoder().feed(ids) == text
    assert tokenizer.encode([Segment(spelling, special=True)]) == [tokenizer.special_id(spelling)]


def test_without_its_guard_the_library_would_make_special_tokens(directory, tokenizer):
    """What the promise protects from: without the copy, every spelling is its token."""
    raw = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert all(raw.encode(s, add_special_tokens=False).ids == [tokenizer.special_id(s)] for s in SPECIALS)


def test_segments_are_tokenised_one_by_one(tokenizer):
    segments = [
        Segment(SPECIALS[0], special=True),
        Segment("the ti"),
        Segment("de"),
        Segment(SPECIALS[1], special=True),
    ]
    ids = tokenizer.encode(segments)
    assert ids == [
        tokenizer.special_id(SPECIALS[0]),
        *tokenizer.encode_text("the ti"),
        *tokenizer.encode_text("de"),
        tokenizer.special_id(SPECIALS[1]),
    ]
    assert ids[: len(tokenizer.encode(segments[:2]))] == tokenizer.encode(segments[:2])


def test_byte_alphabet_is_the_librarys():
    assert set(byte_alphabet()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


@settings(max_examples=100, deadline=None)
@given(st.text(), st.lists(st.integers(1, 5), min_size=1))
def test_stream_equals_whole(tokenizer, text, cuts):
    ids = tokenizer.encode_text(text)
    decoder, at, pieces = tokenizer.decoder(), 0, []
    while at < len(ids):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(decoder.feed(ids[at : at + size]))
        at += size
    assert "".join(pieces) + decoder.flush() == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


BYTES = [bytes([value]) for value in range(256)]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=24))
def test_any_bytes_decode_alike_in_every_cutting(data):
    whole = StreamDecoder(BYTES, {})
    expected = whole.feed(data) + whole.flush()
    single = StreamDecoder(BYTES, {})
    assert "".join(single.feed([byte]) for byte in data) + single.flush() == expected
    assert expected == data.decode("utf-8", "replace")


def test_characters_appear_whole_and_without_delay():
    decoder = StreamDecoder(BYTES, {})
    pieces = [decoder.feed([byte]) for byte in "🌊涨é\ufffdx".encode()]
    assert [piece for piece in pieces if piece] == ["🌊", "涨", "é", "\ufffd", "x"]
    assert decoder.feed("潮".encode()[:2]) == ""
    assert decoder.flush() == "\ufffd"


def test_marks_stand_for_special_tokens_and_the_others_have_no_text():
    decoder = StreamDecoder([b"a", None, None, b"\xe6"], {1: "\udc00"})
    assert decoder.feed([0, 1, 0, 2, 0, 99]) == "a\udc00aa"
    assert decoder.feed([3, 1]) == "\ufffd\udc00"


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", '{"model": {"vocab": {"a": 0}}}', '{"added_tokens": [{}], "model": {"vocab": {}}}'],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path)


def test_a_missing_file_and_a_missing_token_are_named(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path)
    with pytest.raises(DataError, match="no such token"):
        tokenizer.require(["no such token"])


def test_a_vocabulary_that_yields_special_tokens_from_text_is_refused(tmp_path, directory):
    definition = json.loads((directory / "tokenizer.json").read_text())
    definition["pre_tokenizer"] = None
    definition["model"]["ignore_merges"] = True
    definition["model"]["vocab"]["a <think>\n<think>"] = next(
        token["id"] for token in definition["added_tokens"] if token["content"] == "<think>"
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(DataError, match="would become that token"):
        Tokenizer.open(tmp_path)
