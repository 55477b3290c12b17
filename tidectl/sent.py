"""A profile on its way to another node: TOML with absolute paths, under which the node may lay settings of its own.

`node.toml` in a node's state directory holds them: keys that belong to a node (paths, adapters), in their sections.
Relative paths there count from the state directory."""

import json
from pathlib import Path
from typing import Any

import msgspec
import tomli
from msgspec.structs import replace

from tided.errors import ConfigError
from tided.profile.schema import SECTIONS
from tided.settings import Settings

NODE_FILE = "node.toml"
SENT = "# Sent by `tidectl start`, which replaces it."
OF_ALL = {"parallel.hosts", "parallel.control_port", "parallel.data_port"}  # a node's, and the same on all

Tables = dict[str, dict[str, Any]]


def text_of(settings: Settings) -> str:
    return _dump(msgspec.to_builtins(settings))


def text_for_peer(settings: Settings) -> str:
    """Rank 0 alone serves: its address and its API keys are no other node's matter, and need not lie there."""
    server = replace(settings.server, host="127.0.0.1", api_keys_file="", api_keys_credential="")
    return text_of(replace(settings, server=server))


def adapted(text: str, state_dir: Path) -> str:
    """The profile as it counts on the node of `state_dir`. Raises ConfigError for a node file that is wrong."""
    own = _own(state_dir / NODE_FILE)
    if not own:
        return text
    tables: Tables = tomli.loads(text)
    for section, keys in own.items():
        found = {name: _absolute(section, name, value, state_dir) for name, value in keys.items()}
        tables.setdefault(section, {}).update(found)
    return _dump(tables)


def _absolute(section: str, name: str, value: Any, base: Path) -> Any:
    is_path = SECTIONS[section][name].path and isinstance(value, str) and value
    return str(base / Path(value).expanduser()) if is_path else value


def _own(path: Path) -> Tables:
    try:
        found = tomli.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomli.TOMLDecodeError) as error:
        raise ConfigError(f"it cannot be read: {error}", where=str(path)) from error
    for section, keys in found.items():
        for name in keys if isinstance(keys, dict) else [""]:
            _check(path, section, name)
    return found


def _check(path: Path, section: str, name: str) -> None:
    key = SECTIONS.get(section, {}).get(name)
    dotted = f"{section}.{name}" if name else section
    if key is None:
        raise ConfigError(f"unknown key '{dotted}'", where=str(path), hint="it takes the keys of a profile")
    if key.affects != "node" or dotted in OF_ALL:
        hint = "only what belongs to one node may be set here: paths, adapters, read threads, the key file"
        raise ConfigError(f"'{dotted}' must be the same on all nodes", where=str(path), hint=hint)


def _dump(tables: Tables) -> str:
    lines = [SENT]
    for section, keys in tables.items():
        lines += ["", f"[{section}]", *(f"{name} = {_value(value)}" for name, value in keys.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """TOML's strings, numbers and arrays are JSON's, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
