"""Long texts are tokenised in parts: the ids are those of the whole."""

import json
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import build
from tokenizers import Regex, pre_tokenizers

from tided.chat import cuts
from tided.chat.messages import Segment
from tided.chat.tokenizer import Tokenizer
from tided.errors import DataError, RequestError

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def splits(*patterns: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(p), "isolated") for p in patterns), BYTES])


WORDS = {
    "deepseek": splits(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    ),
    "glm": splits(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
}
TEXTS = st.text(
    st.sampled_from("abzé7 0  \n\n\r\t.,!?\"'-_()[]{}涨潮あ가אμ\u3000，。🌊\u0301\u200d\xa0¼²"), max_size=30
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.open(directory)


def words(kind: str, text: str) -> list[str]:
    return [word for word, _ in WORDS[kind].pre_tokenize_str(text)]


@pytest.mark.parametrize("kind", WORDS)
@settings(max_examples=500, deadline=None)
@given(TEXTS)
def test_the_words_of_the_parts_are_those_of_the_whole(kind, text):
    for place in cuts._CUT.finditer(text):
        assert words(kind, text[: place.start()]) + words(kind, text[place.start() :]) == words(kind, text)


@settings(max_examples=200, deadline=None)
@given(st.text() | TEXTS)
def test_the_ids_of_the_parts_are_those_of_the_whole(tokenizer, text):
    with pytest.MonkeyPatch.context() as patch:
        whole = tokenizer.encode_text(text)
        patch.setattr(cuts, "PIECE_CHARACTERS", 1)
        patch.setattr("tided.chat.tokenizer.BATCH_CHARACTERS", 1)
        assert "".join(cuts.pieces(text)) == text
        assert tokenizer.encode_text(text) == whole


@pytest.mark.parametrize(
    "text",
    [
        "the tide comes in\n" * 20_000,
        '{"a":1.5,"b":"x"},' * 20_000,
        "涨潮，" * 100_000,
        "word " * 70_000,
        "1,2," * 70_000,
    ],
    ids=lambda text: text[:8],
)
def test_long_texts_of_every_kind_are_cut(tokenizer, text):
    assert max(map(len, cuts.pieces(text))) < cuts.PIECE_CHARACTERS + 100
    parts = list(tokenizer.encode_in_parts([Segment(text)]))
    assert len(parts) > 1
    assert list(chain.from_iterable(parts)) == tokenizer._plain.encode(text, add_special_tokens=False).ids


def test_parts_are_made_one_by_one(tokenizer):
    """Whoever stops after the first has the others' work saved: what is behind cannot even be tokenised."""
    endless = (Segment("the tide " * 20_000) for _ in iter(int, 1))
    assert len(next(tokenizer.encode_in_parts(endless))) > 1000


def test_a_long_text_without_a_place_to_cut_is_refused(tokenizer):
    word = "a" * cuts.MOST_WORD_CHARACTERS
    assert list(cuts.pieces(word)) == [word]
    with pytest.raises(RequestError, match="without a space") as refusal:
        tokenizer.encode_text("x " + word + "a")
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


@settings(max_examples=200, deadline=None)
@given(st.text() | TEXTS | st.sampled_from(["the tide " * 50, "涨潮" * 50]))
def test_the_least_number_of_tokens_is_never_too_high(tokenizer, text):
    segments = [Segment("<think>", special=True), Segment(text)]
    assert tokenizer.least_tokens(segments) <= len(tokenizer.encode(segments))


def test_the_least_number_of_tokens_is_worth_something(tokenizer, directory):
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    longest = max(map(len, vocabulary))
    assert tokenizer.least_tokens([Segment("a" * longest * 7)]) == 7


@pytest.mark.parametrize(
    ("normalizer", "least"),
    [
        (None, 1),
        ({"type": "Sequence", "normalizers": []}, 1),
        ({"type": "Replace", "pattern": {"String": "a"}, "content": ""}, 0),
    ],
    ids=["absent", "empty", "deletes"],
)
def test_of_a_text_that_may_become_shorter_nothing_is_sure(directory, tmp_path, normalizer, least):
    definition = json.loads((directory / "tokenizer.json").read_text()) | {"normalizer": normalizer}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    assert min(Tokenizer.open(tmp_path).least_tokens([Segment("a" * 1000)]), 1) == least


@pytest.mark.parametrize("pattern", [None, r"[\w ]+", r"\w+\W?", r"\n\w+"])
def test_a_tokenizer_whose_words_go_on_where_we_cut_is_refused(directory, tmp_path, pattern):
    definition = json.loads((directory / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    definition["pre_tokenizer"] = split if pattern else None
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(DataError, match="where long texts are cut"):
        Tokenizer.open(tmp_path)
