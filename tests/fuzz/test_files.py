"""Files that others may have written: whatever is in them is read, or refused by an error that says so. Nothing else is
raised, nothing hangs, and no memory is taken for what a file merely claims."""

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kernels.record import PAGE_BYTES, ExpertRecord
from packers.exl3_pack import Exl3Header
from packers.headers import read_shard
from packers.mxfp4 import header_of
from packers.pack_header import PackHeader
from packers.packs import _PREFIX, VERSION, Pack, checksum
from packers.shards import Checkpoint
from tests.fuzz.damage import FUZZ, altered, damaged
from tided.cache import bundle
from tided.control.keys import Keys, _decode, _new_pair
from tided.control.state import RankState, rank_file, read_rank
from tided.errors import DataError, TideError
from tided.profile import check, load
from tided.tide.demand import RouterShape
from tided.tide.export import load_export
from tided.tide.seed import load_seed

MOST_BYTES = 300_000_000  # the largest of these files may have nearly as many
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def as_json(value: Any) -> bytes:
    """What no JSON can hold stands as text."""
    return json.dumps(value, default=repr).encode("utf-8", "surrogatepass")


def read_or_refuse(read: Callable[[], Any], *refusals: type[Exception]) -> Any:
    """None where it is refused."""
    tracemalloc.start()
    try:
        return read()
    except refusals:
        return None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MOST_BYTES


HEADER = {
    "__metadata__": {"a": "b"},
    "x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "y": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def shard_of(header: bytes, data: bytes = bytes(range(32))) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


LONG_SHAPE = {"x": {"dtype": "F32", "shape": [2**63 - 1] * 400_000, "data_offsets": [0, 32]}}


@pytest.mark.timeout(20)
def test_a_shard_whose_shape_would_be_multiplied_for_hours(folder):
    path = folder / "x.safetensors"
    path.write_bytes(shard_of(as_json(LONG_SHAPE)))
    with pytest.raises(DataError):
        read_shard(path)


SHARDS = altered(HEADER).map(as_json).map(shard_of) | damaged(shard_of(as_json(HEADER))) | st.binary(max_size=64)


@FUZZ
@given(SHARDS)
def test_a_shard(folder, data):
    path = folder / "x.safetensors"
    path.write_bytes(data)
    shard = read_or_refuse(lambda: read_shard(path), DataError)
    if shard is not None:  # every byte behind the header is one tensor's
        assert shard.data_offset + sum(tensor.nbytes for tensor in shard.tensors) == len(data)
        assert all(shard.data_offset <= one.offset <= len(data) - one.nbytes for one in shard.tensors)


INDEX = {"metadata": {"total_size": 32}, "weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}
CONFIG = {"model_type": "small", "hidden_size": 4, "nested": {"a": [1, 2]}}


@FUZZ
@given(altered(INDEX).map(as_json) | damaged(as_json(INDEX)), altered(CONFIG).map(as_json) | damaged(as_json(CONFIG)))
def test_a_checkpoint(folder, index, config):
    (folder / "a.safetensors").write_bytes(shard_of(as_json(HEADER)))
    (folder / "model.safetensors.index.json").write_bytes(index)
    (folder / "config.json").write_bytes(config)
    opened = read_or_refuse(lambda: Checkpoint.open(folder), DataError)
    if opened is not None:
        assert {tensor.path.parent for tensor in opened.tensors.values()} <= {folder.resolve()}


PACKS: dict[str, PackHeader] = {
    "mxfp4": header_of("ab" * 32, ExpertRecord(hidden=64, intermediate=64, ranks=2), 1, 2, 3),
    "exl3": Exl3Header(
        model="ab" * 32, hidden=128, intermediate=128, rank=0, ranks=1, layers=1, experts=2, matrices="060606080808"
    ),
}


def pack_of(header: PackHeader, text: bytes) -> bytes:
    """A header region that is sealed over `text`, and an index of zeros; records are not looked at."""
    length = -(-(_PREFIX.size + len(text)) // PAGE_BYTES) * PAGE_BYTES
    rest = text.ljust(length - _PREFIX.size, b"\0")
    digest = checksum(_PREFIX.pack(header.MAGIC, VERSION, len(text), bytes(16)) + rest)
    return _PREFIX.pack(header.MAGIC, VERSION, len(text), digest) + rest + bytes(header.index_bytes)


@pytest.mark.parametrize("kind", PACKS)
def test_a_pack(folder, kind):
    header = PACKS[kind]
    header = replace(header, index=checksum(bytes(header.index_bytes)).hex())
    fields, path = msgspec.to_builtins(header), folder / header.file_name

    def written(data: bytes) -> Pack | None:
        path.write_bytes(data)
        os.truncate(path, header.size_bytes)
        return read_or_refuse(lambda: Pack.open(path), DataError)

    whole = pack_of(header, as_json(fields))
    found = written(whole)
    assert found is not None
    assert found.header == header

    @FUZZ
    @given(altered(fields).map(lambda tree: pack_of(header, as_json(tree))) | damaged(whole[:4200]))
    def tried(data: bytes) -> None:
        opened = written(data)
        if opened is not None:  # then all that is said of it fits together
            assert opened.header.size_bytes == path.stat().st_size
            assert opened.number(opened.header.layers - 1, opened.header.experts - 1) == opened.header.records - 1
            with pytest.raises(DataError):
                opened.number(opened.header.layers, 0)

    tried()


PARTS = {"a": torch.arange(6).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "none": torch.empty(0, 4)}
BUNDLE = b"".join(bundle.encode("k", 12, ["p", "q"], PARTS))
HEAD = msgspec.msgpack.decode(BUNDLE[bundle.START : bundle.START + int.from_bytes(BUNDLE[8:16], "little")])


def bundle_of(head: Any) -> bytes:
    """Sealed as its writer does it."""
    try:
        text = msgspec.msgpack.encode(head)
    except (OverflowError, RecursionError, UnicodeEncodeError, ValueError):
        text = msgspec.msgpack.encode(repr(head)[:100].encode("utf-8", "replace"))
    body = text + bytes(-(bundle.START + len(text)) % bundle.ALIGN) + bytes(192)
    sizes = len(text).to_bytes(8, "little") + (len(body) - len(text)).to_bytes(8, "little")
    return bundle.MAGIC + sizes + xxhash.xxh3_128_digest(body) + body


def head_with(shape: list[int]) -> dict[str, Any]:
    return {**HEAD, "parts": [*HEAD["parts"][:2], {**HEAD["parts"][2], "shape": shape}]}


@FUZZ
@example(bundle_of(head_with([0, 2**64 - 1])))
@example(bundle_of(head_with([1] * 1000)))
@given(altered(HEAD).map(bundle_of) | damaged(BUNDLE))
def test_a_context_bundle(data):
    found = read_or_refuse(lambda: bundle.decode(bytearray(data), "k"), bundle.Damaged)
    if found is not None:
        head, parts = found
        assert {part.name: part.shape for part in head.parts} == {name: [*one.shape] for name, one in parts.items()}


SHAPE = RouterShape(2, 3, 1)
DOMAIN = {"tokens": 1000, "counts": [[1000, 0, 0], [0, 500, 500]], "mass": [[800.0, 0, 0], [0, 300.0, 100.0]]}
SEED = {"model_type": "m", "layers": 2, "experts": 3, "top_k": 1, "domains": {"a": DOMAIN, "b": DOMAIN}}
LAYERED = {"model_type": "m", "layers": 2, "experts": 3, "top_k": 1, "layer_residents": [1, 2]}


@FUZZ
@given(altered(SEED).map(as_json) | altered(LAYERED).map(as_json) | damaged(as_json(SEED)))
def test_a_demand_seed(folder, data):
    path = folder / "seed.json"
    path.write_bytes(data)
    seed = read_or_refuse(lambda: load_seed(path, "m", SHAPE), DataError)
    if seed is not None:
        assert seed.prior.shape == (2, 3)
        assert seed.prior.sum(axis=1) == pytest.approx([1, 1])
        assert (seed.prior >= 0).all()


EXPORT = {
    "format": "tidelm-demand", "version": 1, "identity": "ab" * 32, "model_type": "m", "unit": "request",
    "layers": 2, "experts": 3, "top_k": 1, "requests": 5, "counts": DOMAIN["counts"], "mass": DOMAIN["mass"],
}  # fmt: skip


@FUZZ
@given(altered(EXPORT).map(as_json) | damaged(as_json(EXPORT)))
def test_an_exported_history(folder, data):
    path = folder / "export.json"
    path.write_bytes(data)
    found = read_or_refuse(lambda: load_export(path), DataError)
    if found is not None:
        assert found.demand.counts.shape == (found.layers, found.experts)


PAIR = msgspec.to_builtins(_new_pair())
KEYS = {"version": 1, "leader": PAIR, "followers": msgspec.to_builtins(_new_pair())}


@FUZZ
@given(altered(KEYS).map(as_json) | damaged(as_json(KEYS)))
def test_the_keys_of_the_control_plane(data):
    found = read_or_refuse(lambda: _decode(Path("curve.key"), data), DataError)
    assert found is None or isinstance(found, Keys)


STATE = {"rank": 0, "pid": 1, "started": 1.0, "phase": "serving", "since": 2.0, "message": "", "port": 8000}


@FUZZ
@given(altered(STATE).map(as_json) | damaged(as_json(STATE)))
def test_what_a_rank_says_of_itself(folder, data):
    rank_file(folder, 0).write_bytes(data)
    found = read_or_refuse(lambda: read_rank(folder, 0))
    assert found is None or isinstance(found, RankState)


MINI = (ROOT / "profiles" / "mini-deepseek.toml").read_bytes()


@FUZZ
@given(damaged(MINI))
def test_a_profile(folder, data):
    path = folder / "x.toml"
    path.write_bytes(data)
    faults = [problem for problem in check(path) if problem.severity == "error"]
    profile = read_or_refuse(lambda: load(path), TideError)
    assert (profile is None) == bool(faults)
