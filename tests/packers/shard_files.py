"""Writes safetensors files, right and wrong ones, byte by byte."""

import json
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "deepseek-v41"


def shard_bytes(header: object, data: bytes, pad: int = 8) -> bytes:
    """`header`: an object for JSON, or bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % pad)
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_checkpoint(
    directory: Path, shards: dict[str, dict[str, tuple[str, list[int], bytes]]], **config: object
) -> Path:
    """`shards`: file -> its tensors, laid out in this order. With an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for file, tensors in shards.items():
        header, data = {}, b""
        for name, (dtype, shape, content) in tensors.items():
            header[name] = entry(dtype, shape, len(data), len(data) + len(content))
            data += content
        (directory / file).write_bytes(shard_bytes(header, data))
    write_index(directory, {name: file for file, tensors in shards.items() for name in tensors})
    return directory


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def small(directory: Path) -> Path:
    """Two shards, three tensors."""
    return write_checkpoint(
        directory,
        {
            "a.safetensors": {"one": ("U8", [4], b"\1\2\3\4"), "two": ("F32", [2, 1], bytes(8))},
            "b.safetensors": {"three": ("BF16", [3], b"\0\1\2\3\4\5")},
        },
        model_type="small",
        hidden_size=4,
    )
