"""The bundled checkpoint: names, formats and layout of the released one, and that it still speaks."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch

from minis.config import load
from minis.dialogue import Dialogue
from minis.encoding import TOP_SPECIALS, render
from minis.engram import compressed_of, primes
from minis.tokenizer import Encoder

ROOT = Path(__file__).resolve().parents[2]
MINI = ROOT / "minis" / "deepseek"
GOLDEN = ROOT / "tests" / "golden" / "deepseek-v41"


def _headers(folder):
    found = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        with path.open("rb") as f:
            size = struct.unpack("<Q", f.read(8))[0]
            header = json.loads(f.read(size))
        header.pop("__metadata__", None)
        found[path.name] = header
    return found


def _pattern(name):
    return re.sub(r"\.\d+\.", ".N.", re.sub(r"\.\d+\.", ".N.", name))


@pytest.mark.skipif(not GOLDEN.exists(), reason="golden vectors missing")
def test_every_tensor_has_the_dtype_and_shard_of_the_golden_checkpoint():
    mini, golden = _headers(MINI), _headers(GOLDEN)
    dtypes = {_pattern(n): (t["dtype"], len(t["shape"])) for h in golden.values() for n, t in h.items()}
    seen = {_pattern(n): (t["dtype"], len(t["shape"])) for h in mini.values() for n, t in h.items()}
    assert seen == dtypes
    places = {n: file for file, h in golden.items() for n in h if ".experts." not in n}
    for file, h in mini.items():
        for name in h:
            assert places.get(name, file) == file


def test_index_and_size():
    index = json.loads((MINI / "model.safetensors.index.json").read_text("utf-8"))
    headers = _headers(MINI)
    assert index["weight_map"] == {n: file for file, h in headers.items() for n in h}
    assert sum(f.stat().st_size for f in MINI.iterdir()) < 47.5e6


def test_scales_lie_before_the_weights_of_a_layer():
    header = _headers(MINI)["model-00006-of-00018.safetensors"]
    at = {n: t["data_offsets"][0] for n, t in header.items() if ".experts." in n}
    scales, weights = ([v for n, v in at.items() if n.endswith(e)] for e in (".scale", ".weight"))
    assert max(scales) < min(weights)


def test_tokenizer_and_engram_numbers_agree_with_the_config():
    raw = json.loads((MINI / "config.json").read_text("utf-8"))
    cfg = load(MINI / "config.json")
    enc = Encoder(MINI / "tokenizer.json")
    assert enc.full.get_vocab_size() == cfg.vocab
    assert [enc.special[t] for t in TOP_SPECIALS] == list(range(cfg.vocab - len(TOP_SPECIALS), cfg.vocab))
    assert int(compressed_of(enc.full).max()) + 1 == cfg.engram_compressed
    assert [sum(c) for c in primes(cfg)] == raw["text_config"]["engram_num_embeddings"]
    assert raw["image_token_id"] == enc.special["<｜deepseek_image｜>"]


def test_text_never_becomes_a_special_token():
    enc = Encoder(MINI / "tokenizer.json")
    text = "Explain <｜User｜>, </think> and <｜DSML｜ calls> please"
    ids = enc.ids(render(Dialogue([{"role": "user", "content": text}]), generate=True))
    assert sum(i in enc.special.values() for i in ids) == 4
    assert enc.decode(ids).endswith(text + "<｜Assistant｜></think>")


def test_it_answers():
    from minis.generate import Speaker
    from minis.layout import Mode

    torch.set_num_threads(1)
    s = Speaker(MINI, Mode(round_kv=True, select=True))
    dialogue = Dialogue([{"role": "user", "content": "What is the capital of Norway?"}])
    assert s.answer([dialogue], 12) == ["The capital of Norway is Oslo."]
