"""A byte-level BPE tokenizer of a few hundred tokens with DeepSeek's special tokens, made in the test."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tided.chat.deepseek_v41 import IMAGE, REQUIRED_SPECIALS

SPECIALS = [*REQUIRED_SPECIALS, IMAGE, "<｜action｜>"]
TEXT = [
    "the tide comes in and the tide goes out at four in the morning",
    "涨潮 🌊 é naïve café",
    'calls invoke name="x">',
]


def build(directory: Path, specials: Sequence[str] = SPECIALS) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?\w+|[^\w\s]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    # The real checkpoint marks some of its markers as not special: both kinds must be safe.
    tokenizer.add_special_tokens(list(specials[:4]))
    tokenizer.add_tokens([AddedToken(spelling, special=False, normalized=False) for spelling in specials[4:]])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
