"""`tidectl version`. Versions are read from package metadata: importing torch to ask it would take seconds."""

import platform
from importlib.metadata import PackageNotFoundError, version

from tidectl.output import emit

PARTS = ("torch", "triton", "safetensors", "tokenizers", "pyzmq", "aiohttp")


def show(as_json: bool) -> None:
    parts = {"python": platform.python_version(), **{name: _version(name) for name in PARTS}}
    if as_json:
        emit("version/1", {"version": _version("tidelm"), "parts": parts})
        return
    print(line())
    for name, found in parts.items():
        print(f"  {name} {found or 'not installed'}")


def build() -> dict[str, str | None]:
    """What a figure depends on: our version, the digest of our code, the libraries below it."""
    from tided.guard import code_digest

    return {"tidelm": _version("tidelm"), "code": code_digest(), **{name: _version(name) for name in PARTS}}


def line() -> str:
    return f"tidelm {_version('tidelm')}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
