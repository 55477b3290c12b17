"""Engram's addresses against the released model's, and its rows against the tables on disk."""

import dataclasses
import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kernels import engram
from kernels.formats import fp8_rows
from packers.shards import Checkpoint
from tests.models.random_checkpoint import golden_config, write_checkpoint
from tests.models.rig import CPU, GOLDEN, load_model
from tided.errors import DataError, UnavailableError
from tided.models.deepseek_v41 import engram_rows
from tided.models.deepseek_v41.config import read_config
from tided.models.deepseek_v41.engram import _histories
from tided.models.deepseek_v41.engram_rows import Table
from tided.models.deepseek_v41.hashing import layer_hashing
from tided.models.deepseek_v41.vocabulary import compressed_vocabulary

PREFIX = "layers.1.engram.embed"
PLACE_BYTES = 16  # of a cached row, beside the row itself


@pytest.fixture(scope="module")
def released():
    return json.loads((GOLDEN / "engram_real.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def released_text():
    config = read_config(golden_config())
    return msgspec.structs.replace(
        config.text_config,
        engram_layer_ids=(1, 14),
        engram_num_embeddings=(384006168, 384016682),
        engram_vocab_size=16000000,
        engram_n_heads=8,
        engram_head_dim=256,
        engram_compressed_vocab_size=99092,
    )


class Tail:
    def __init__(self, pad, size=3):
        self.tail = np.full(size, pad, dtype=np.int64)


def test_released_addresses(released, released_text):
    hashing = layer_hashing(released_text)
    for layer in (1, 14):
        part = hashing[layer]
        assert part.multipliers.tolist() == released["multipliers"][str(layer)]
        assert part.primes.tolist() == released["primes"][str(layer)]
        assert part.offsets.flatten().tolist() == released["offsets"][str(layer)]


@pytest.mark.parametrize("cut", [47, 1, 5])
def test_released_hashes_of_a_text(released, released_text, cut):
    """However the text is cut, the tail carries the n-grams over."""
    compressed, lane = np.array(released["compressed"]), Tail(released["pad_compressed_id"])
    parts = [compressed[i : i + cut] for i in range(0, len(compressed), cut)]
    histories = [_histories(lane, part, 4) for part in parts]
    for layer, hashing in layer_hashing(released_text).items():
        rows = np.concatenate([hashing.rows_of(h) for h in histories])
        assert rows.tolist() == released["hash_ids"][str(layer)]


def test_a_table_of_another_size_is_refused(released_text):
    wrong = msgspec.structs.replace(released_text, engram_num_embeddings=(384006168, 384016683))
    with pytest.raises(DataError, match="layer 14 384016683 rows, its hash addresses 384016682"):
        layer_hashing(wrong)


def test_vocabulary_and_rows_of_the_prompt(prompt, rounded):
    config = read_config(golden_config()).text_config
    vocabulary = compressed_vocabulary(GOLDEN / "tokenizer.json", 512, 416)
    assert vocabulary.max() == 415
    history = _histories(Tail(vocabulary[2]), vocabulary[prompt.numpy()], 4)
    for i, hashing in enumerate(layer_hashing(config).values()):
        assert hashing.rows_of(history).tolist() == rounded["prefill.engram_ids"][:, i].tolist()


@pytest.mark.parametrize(
    "alike",
    [
        ("ﬁ１", "fi1"),  # a ligature, a full-width digit
        ("Ａ", "a"),
        ("Éé", "ee"),
        ("e\u0301", "é"),
        (" \t\n ", " "),
        (" x ", "x"),
        ("a\r\n  b", "a b"),
    ],
)
def test_tokens_that_read_alike_share_an_id(tmp_path, alike):
    assert compressed_of(tmp_path, *alike, "other") == [0, 0, 1]


@pytest.mark.parametrize("apart", [("a", "b"), (" ", "x"), ("ß", "s"), ("a b", "ab")])
def test_tokens_that_read_otherwise_do_not(tmp_path, apart):
    assert compressed_of(tmp_path, *apart) == [0, 1]


def compressed_of(tmp_path, *texts):
    """The ids of a tokenizer whose tokens are these texts, which must be two."""
    path = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({text: i for i, text in enumerate(texts)}, unk_token=texts[-1])).save(str(path))
    return compressed_vocabulary(path, len(texts), 2).tolist()


@pytest.fixture
def readers():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def whole_table():
    checkpoint = Checkpoint.open(GOLDEN)
    return fp8_rows(checkpoint.read(f"{PREFIX}.weight"), checkpoint.read(f"{PREFIX}.scale"))


@pytest.mark.parametrize("cached_rows", [0, 7, 5000])
def test_rows_from_disk_and_from_the_cache(readers, cached_rows):
    table = Table(Checkpoint.open(GOLDEN), PREFIX, cached_rows * (66 + PLACE_BYTES), readers)
    expected = whole_table()
    rng = np.random.default_rng(0)
    for _ in range(5):
        rows = rng.integers(0, 1362, (9, 6))
        values = table.ask(rows).take(CPU)
        assert torch.equal(values, expected[torch.from_numpy(rows)].flatten(1))


def test_a_cached_row_is_not_read_again(readers):
    table = Table(Checkpoint.open(GOLDEN), PREFIX, 3 * (66 + PLACE_BYTES), readers)
    for rows, read in (([1, 2, 3], 3), ([1], 0), ([4], 1), ([1, 3], 0), ([2], 1)):
        asked = table.ask(np.array([rows]))
        assert len(asked.wanted) == read, rows
        asked.take(CPU)


def test_the_disk_knows_all_rows_of_a_decode_step_before_one_is_waited_for(monkeypatch, readers):
    seen, table = [], Table(Checkpoint.open(GOLDEN), PREFIX, 0, readers)
    real = os.preadv
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: seen.append((fd, offset, length)))
    monkeypatch.setattr(os, "preadv", lambda fd, out, at: seen.append((fd, at, len(out[0]))) or real(fd, out, at))
    asked = table.ask(np.arange(24).reshape(1, 24))
    asked.raw()
    assert len(asked.reads) == 1
    assert seen[:48] == seen[48:]
    assert len(set(seen)) == 48


def test_a_file_system_that_takes_no_advice_is_read_all_the_same(monkeypatch, readers):
    rows, table = np.arange(24).reshape(1, 24), Table(Checkpoint.open(GOLDEN), PREFIX, 0, readers)
    wanted = table.ask(rows).raw()

    def refuse(*_):
        raise OSError(errno.EINVAL, "no advice")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    assert np.array_equal(table.ask(rows).raw(), wanted)


def test_the_rows_of_a_prompt_are_read_in_few_tasks(readers):
    table = Table(Checkpoint.open(GOLDEN), PREFIX, 0, readers)
    assert [len(table.ask(np.arange(rows)[None]).reads) for rows in (1, 24, 320, 1280)] == [1, 1, 5, 20]


def test_a_table_that_was_cut_off_is_named(tmp_path, readers):
    for file in GOLDEN.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    checkpoint = Checkpoint.open(tmp_path)
    info = checkpoint.tensors[f"{PREFIX}.weight"]
    with info.path.open("r+b") as file:
        file.truncate(info.offset + 64 * 100 + 5)
    table = Table(checkpoint, PREFIX, 0, readers)
    table.ask(np.array([[0, 1, 99]])).take(CPU)
    with pytest.raises(DataError, match=f"row 100 of {PREFIX}.weight"):
        table.ask(np.array([[0, 100]])).take(CPU)


def test_a_disk_that_hangs_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(engram_rows, "READ_TIMEOUT_S", 0.05)
    stuck = threading.Event()
    monkeypatch.setattr(engram_rows._Array, "read", lambda self, row, out: stuck.wait(30))
    with ThreadPoolExecutor(1) as readers:
        asked = Table(Checkpoint.open(GOLDEN), PREFIX, 0, readers).ask(np.array([[0]]))
        with pytest.raises(UnavailableError, match="no Engram rows for"):
            asked.take(CPU)
        stuck.set()


class Read:
    """A read that is done `seconds` after the one before it."""

    def __init__(self, seconds):
        self.seconds = seconds

    def result(self, timeout):
        if self.seconds > timeout:
            raise TimeoutError


def test_a_slow_disk_is_waited_for_as_long_as_it_gives_rows(readers):
    asked = Table(Checkpoint.open(GOLDEN), PREFIX, 0, readers).ask(np.array([[0]]))
    dataclasses.replace(asked, reads=[*asked.reads, Read(50), Read(50)]).take(CPU)
    with pytest.raises(UnavailableError, match="no Engram rows for 60 s"):
        dataclasses.replace(asked, reads=[Read(50), Read(70)]).take(CPU)


def test_a_disk_error_is_named(monkeypatch, readers):
    def fail(fd, buffers, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(engram_rows.os, "preadv", fail)
    with pytest.raises(DataError, match=f"row 3 of {PREFIX}.weight cannot be read: Input/output error"):
        Table(Checkpoint.open(GOLDEN), PREFIX, 0, readers).ask(np.array([[3]])).take(CPU)


def test_a_layer_behind_the_last_source_looks_up_its_own_rows_under_bounded_replay(tmp_path, monkeypatch, prompt):
    """By then the pass has dropped all rows but the last window."""
    path, mix, seen = write_checkpoint(tmp_path, golden_config(engram_layer_ids=[1, 7])), engram.mix, {}
    for replay in ("full", "bounded"):
        keys = seen[replay] = []
        monkeypatch.setattr(engram, "mix", lambda h, k, v, w, keys=keys: keys.append(k) or mix(h, k, v, w))
        model = load_model(path, numerics="fp32", decoder_replay=replay)
        model.prefill(model.open_lane(0), prompt, "last")
    assert [len(keys) for keys in seen["bounded"]] == [101, 32]
    torch.testing.assert_close(seen["bounded"][1], seen["full"][1][-32:])
