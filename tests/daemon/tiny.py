"""The tiny checkpoint of the golden vectors, with a tokenizer that holds the chat format's special tokens."""

import json
import shutil
from pathlib import Path

from tided.chat.deepseek_v41 import REQUIRED_SPECIALS

GOLDEN = Path(__file__).parent.parent / "golden" / "deepseek-v41"
IMAGE_ID = 511
PAIRS = 80  # 10 MoE layers of 8 experts, top 3

PROFILE = """
[model]
path = "{path}"
served_name = "tiny"
prefill_chunk_tokens = 32
[experts]
resident = {resident}
spare_slots = 4
[cache]
context_tokens = 1024
pool_tokens = 2048
"""


def make_checkpoint(directory: Path) -> Path:
    shutil.copytree(GOLDEN, directory, ignore=shutil.ignore_patterns("expected*", "inputs.json"))
    file = directory / "tokenizer.json"
    file.write_text(json.dumps(with_specials(json.loads(file.read_text()))))
    return directory


def with_specials(definition):
    """Two special tokens take the place of the first two, the others that of the last learned ones."""
    vocabulary, merges = definition["model"]["vocab"], definition["model"]["merges"]
    ids = [0, 1, *range(IMAGE_ID - len(REQUIRED_SPECIALS) + 2, IMAGE_ID)]
    kept = [token for token in definition["added_tokens"] if token["id"] not in ids]
    added = [kept[0] | {"id": number, "content": text} for number, text in zip(ids, REQUIRED_SPECIALS, strict=True)]
    remaining = {text: number for text, number in vocabulary.items() if number not in ids}
    model = definition["model"] | {
        "vocab": remaining,
        "merges": [pair for pair in merges if all(text in remaining for text in (*pair, "".join(pair)))],
    }
    return definition | {"added_tokens": sorted(kept + added, key=lambda token: token["id"]), "model": model}


def profile_text(checkpoint: Path, resident: int = 52) -> str:
    return PROFILE.format(path=checkpoint, resident=resident)
