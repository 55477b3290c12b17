"""Checkpoints: what is read is what was written, and what is wrong is refused by file, offset and name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from shard_files import GOLDEN, entry, shard_bytes, small, write_checkpoint, write_index

from packers.headers import read_shard
from packers.shards import Checkpoint, TensorSpec
from tided.errors import DataError, TensorError


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_is_read_as_the_safetensors_library_reads_it():
    checkpoint = Checkpoint.open(GOLDEN)
    compared = 0
    for shard in checkpoint.shards:
        with safe_open(shard.path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                expected, found = file.get_tensor(name), checkpoint.read(name)
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
                assert as_bytes(found) == as_bytes(expected), name
                compared += 1
    assert compared == len(checkpoint.tensors) == 1052
    assert checkpoint.config["text_config"]["hidden_size"] == 128


def test_reading_copies_nothing_and_writing_reaches_no_file(tmp_path):
    checkpoint = Checkpoint.open(small(tmp_path))
    one = checkpoint.read("one")
    assert one.data_ptr() == checkpoint.read("one").data_ptr()
    before = (tmp_path / "a.safetensors").read_bytes()
    one[0] = 99
    assert (tmp_path / "a.safetensors").read_bytes() == before


def mapped(directory):
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line}


def test_unmapping_keeps_what_is_in_use(tmp_path):
    checkpoint = Checkpoint.open(small(tmp_path))
    one = checkpoint.read("one")
    before = as_bytes(one)
    assert mapped(tmp_path)
    checkpoint.unmap()
    assert mapped(tmp_path)
    assert as_bytes(one) == before
    del one
    assert not mapped(tmp_path)
    assert as_bytes(checkpoint.read("one")) == before


def test_headers_are_read_without_torch():
    code = f"""
import sys
from packers.shards import Checkpoint
checkpoint = Checkpoint.open({str(GOLDEN)!r})
checkpoint.identity()
sys.exit('torch' in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_a_single_file_needs_no_index(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(shard_bytes({"x": entry("I32", [2], 0, 8)}, bytes(8)))
    assert Checkpoint.open(tmp_path).read("x").tolist() == [0, 0]


def test_scalars_empty_tensors_and_odd_alignment(tmp_path):
    value = torch.tensor(1.5).numpy().tobytes()
    header = {"e": entry("F32", [0, 3], 1, 1), "odd": entry("U8", [1], 0, 1), "s": entry("F32", [], 1, 5)}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(shard_bytes(header, b"\7" + value))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read("s").item() == 1.5
    assert checkpoint.read("s").data_ptr() % 4 == 0
    assert checkpoint.read("e").shape == (0, 3)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 7527, 7528, 7529, 100_000, -1])
def test_a_truncated_shard_is_refused_by_name(tmp_path, keep):
    directory = tmp_path / "copy"
    shutil.copytree(GOLDEN, directory)
    shard = directory / "model-00003-of-00018.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"model-00003-of-00018\.safetensors:\d+: "):
        Checkpoint.open(directory)


X = {"x": entry("U8", [4], 0, 4)}
WRONG_HEADERS = {
    "overlap": {"x": entry("U8", [4], 0, 4), "y": entry("U8", [2], 2, 4)},
    "overlap and gap of one size": {"x": entry("U8", [3], 0, 3), "y": entry("U8", [1], 0, 1)},
    "gap between": {"x": entry("U8", [1], 0, 1), "y": entry("U8", [2], 2, 4)},
    "gap at the front": {"x": entry("U8", [3], 1, 4)},
    "bytes of no tensor at the end": {"x": entry("U8", [3], 0, 3)},
    "past the end": {"x": entry("U8", [5], 0, 5)},
    "far past the end": {"x": entry("U8", [2**62], 0, 2**62)},
    "more than 64 bits": {"x": entry("U8", [4], 0, 2**70)},
    "shape overflows": {"x": entry("U8", [2**40, 2**40], 0, 4)},
    "shape x dtype": {"x": entry("F32", [4], 0, 4)},
    "unknown dtype": {"x": entry("F4", [8], 0, 4)},
    "dtype with control characters": {"x": entry("\x1b[31m\n", [4], 0, 4)},
    "negative size": {"x": entry("U8", [-4], 0, 4)},
    "two negative sizes": {"x": entry("U8", [-2, -2], 0, 4)},
    "negative offset": {"x": entry("U8", [4], -4, 0)},
    "backwards": {"x": entry("U8", [4], 4, 0)},
    "fraction": {"x": {"dtype": "U8", "shape": [4.0], "data_offsets": [0, 4]}},
    "three offsets": {"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 4]}},
    "no dtype": {"x": {"shape": [4], "data_offsets": [0, 4]}},
    "unknown field": {"x": {**X["x"], "requires": "code"}},
    "no object": [1, 2],
    "nested beyond reason": b"[" * 100_000,
    "nested beyond reason inside": b'{"x":' * 50_000 + b"1" + b"}" * 50_000,
    "not JSON": b"{x: 1}",
    "not UTF-8": b'{"\xff\xfe": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}',
    "empty": b"",
}


@pytest.mark.parametrize("header", WRONG_HEADERS.values(), ids=WRONG_HEADERS.keys())
def test_a_wrong_header_is_refused_with_its_offset(tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(shard_bytes(header, bytes(4)))
    with pytest.raises(DataError, match=r"model\.safetensors:\d+: ") as caught:
        read_shard(path)
    assert str(caught.value).isprintable() or "\n  " in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_the_right_header_is_not_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(shard_bytes({"__metadata__": {"format": "pt"}, **X}, bytes(4)))
    (tensor,) = read_shard(path).tensors
    assert (tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) == ("x", "U8", (4,), 4)
    assert tensor.offset + tensor.nbytes == path.stat().st_size


@pytest.mark.parametrize("length", [5, 100_000_001, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_or_than_any_is_refused(tmp_path, length):
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}  ")
    with pytest.raises(DataError, match="header of"):
        read_shard(path)


def test_a_huge_header_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    with pytest.raises(DataError, match="at most 100000000"):
        read_shard(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="not a regular file"):
        read_shard(tmp_path / "model.safetensors")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_headers_are_refused_or_still_account_for_every_byte(tmp_path, data):
    header = {"__metadata__": {"a": "b"}, "x": entry("F32", [2, 3], 0, 24), "y": entry("BF16", [4], 24, 32)}
    content = bytearray(shard_bytes(header, bytes(range(32))))
    places = st.integers(0, len(content) - 33)
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        content[place] = data.draw(st.one_of(st.sampled_from(b'{}[]",:0123456789-e. '), st.integers(0, 255)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    try:
        shard = read_shard(path)
    except DataError:
        return
    assert shard.data_offset + sum(t.nbytes for t in shard.tensors) == len(content)


# Directory and index


def test_a_missing_directory_config_or_shard_is_refused(tmp_path):
    with pytest.raises(DataError, match="no such directory"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"config\.json: is missing"):
        Checkpoint.open(tmp_path)
    directory = small(tmp_path)
    (directory / "b.safetensors").unlink()
    with pytest.raises(DataError, match=r"b\.safetensors: is missing"):
        Checkpoint.open(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json: "):
        Checkpoint.open(directory)


NO_NAMES = ["../out.safetensors", "/etc/x.safetensors", "sub/../../out.safetensors", "..", "a.bin", ""]


@pytest.mark.parametrize("name", [*NO_NAMES, ".a.safetensors", "a\0.safetensors", "sub/a.safetensors"])
def test_a_file_name_cannot_leave_the_directory(tmp_path, name):
    directory = small(tmp_path / "model")
    shutil.copy(directory / "a.safetensors", tmp_path / "out.safetensors")
    write_index(directory, {"one": name, "two": name})
    with pytest.raises(DataError, match="no name of a shard"):
        Checkpoint.open(directory)


def test_a_link_may_stay_inside_but_not_lead_out(tmp_path):
    directory = small(tmp_path / "model")
    (directory / "a.safetensors").rename(directory / "real.safetensors")
    (directory / "a.safetensors").symlink_to("real.safetensors")
    assert Checkpoint.open(directory).read("one").tolist() == [1, 2, 3, 4]
    (directory / "real.safetensors").rename(tmp_path / "real.safetensors")
    (directory / "a.safetensors").unlink()
    (directory / "a.safetensors").symlink_to("../real.safetensors")
    with pytest.raises(DataError, match="outside the checkpoint"):
        Checkpoint.open(directory)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"one": "a", "two": "a", "three": "b", "four": "b"}, r"1 listed but not in their shard: four \(b"),
        ({"one": "a", "three": "b"}, r"1 in a shard but not listed: two \(a"),
        ({"one": "b", "two": "a", "three": "b"}, r"1 listed .*one \(b.*; 1 in a shard but not listed: one \(a"),
    ],
)
def test_index_and_shards_must_agree(tmp_path, weight_map, message):
    directory = small(tmp_path)
    write_index(directory, {name: f"{file}.safetensors" for name, file in weight_map.items()})
    with pytest.raises(TensorError, match=message):
        Checkpoint.open(directory)


def test_a_model_gets_exactly_the_tensors_it_expects(tmp_path):
    checkpoint = Checkpoint.open(small(tmp_path))
    right = {
        "one": TensorSpec("U8", (4,)),
        "two": TensorSpec(("BF16", "F32"), (2, 1)),
        "three": TensorSpec("BF16", (3,)),
    }
    checkpoint.require(right)
    wrong = {"one": TensorSpec("I8", (4,)), "two": TensorSpec("F32", (1, 2)), "zero": TensorSpec("U8", (1,))}
    with pytest.raises(TensorError) as caught:
        checkpoint.require(wrong)
    text = str(caught.value)
    assert "1 missing: zero" in text
    assert "1 not known to this model: three" in text
    assert "2 of a wrong dtype or shape: one (is U8 [4], must be I8 [4]) in " in text
    assert "two (is F32 [2, 1], must be F32 [1, 2]) in a.safetensors" in text


def test_long_lists_of_missing_tensors_are_counted(tmp_path):
    checkpoint = Checkpoint.open(small(tmp_path))
    with pytest.raises(TensorError, match=r"25 missing: .*t09 and 15 more;"):
        checkpoint.require({f"t{i:02}": TensorSpec("U8", (1,)) for i in range(25)})


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TensorError, match="tensor four is missing"):
        Checkpoint.open(small(tmp_path)).read("four")


# Identity


def test_identity_is_of_the_content_not_of_place_or_formatting(tmp_path):
    first, second = small(tmp_path / "1"), small(tmp_path / "2")
    config = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=4))
    os.utime(second / "a.safetensors", (0, 0))
    assert Checkpoint.open(first).identity() == Checkpoint.open(second).identity()


def test_identity_tells_config_names_layout_and_weights_apart(tmp_path):
    same = {"a.safetensors": {"one": ("U8", [4], b"\1\2\3\4")}}
    variants = [
        (same, {"x": 1}),
        (same, {"x": 2}),
        ({"a.safetensors": {"two": ("U8", [4], b"\1\2\3\4")}}, {"x": 1}),
        ({"a.safetensors": {"one": ("I8", [4], b"\1\2\3\4")}}, {"x": 1}),
        ({"a.safetensors": {"one": ("U8", [2, 2], b"\1\2\3\4")}}, {"x": 1}),
        ({"a.safetensors": {"one": ("U8", [4], b"\1\2\3\5")}}, {"x": 1}),
        ({"b.safetensors": {"one": ("U8", [4], b"\1\2\3\4")}}, {"x": 1}),
    ]
    names = {
        Checkpoint.open(write_checkpoint(tmp_path / str(i), shards, **config)).identity()
        for i, (shards, config) in enumerate(variants)
    }
    assert len(names) == len(variants)


WINDOWS = [i * (500_000 - 4096) // 63 for i in range(64)]  # where each begins: evenly spread, both ends included


@pytest.mark.parametrize("place", [0, 4095, 500_000 - 1, *WINDOWS[1::9], *(begin + 4095 for begin in WINDOWS[5::20])])
def test_identity_sees_the_sampled_windows_of_a_large_shard(tmp_path, place):
    content = bytearray(500_000)
    plain = write_checkpoint(tmp_path / "1", {"a.safetensors": {"w": ("U8", [500_000], bytes(content))}})
    content[place] = 1
    other = write_checkpoint(tmp_path / "2", {"a.safetensors": {"w": ("U8", [500_000], bytes(content))}})
    assert Checkpoint.open(plain).identity() != Checkpoint.open(other).identity()
