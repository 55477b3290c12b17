"""The rooms import downwards only, and data never becomes code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernels", "packers", "tided", "tidectl")

# Each room and the rooms it may import. What COMMON names is for all.
COMMON = {"tided.errors", "tided.files", "tided.settings", "tided.engine.types"}
FLOORS: dict[str, set[str]] = {
    "kernels": set(),
    "packers": {"kernels"},
    "tided.errors": set(),
    "tided.files": set(),
    "tided.settings": set(),
    "tided.engine.types": set(),
    "tided.profile": set(),
    "tided.guard": set(),
    "tided.processes": set(),
    "tided.tide": set(),
    "tided.control": {"tided.guard"},
    "tided.experts": {"kernels", "packers"},
    "tided.cache": {"kernels"},
    "tided.images": {"tided.processes"},
    "tided.models": {"kernels", "packers", "tided.experts", "tided.cache", "tided.images.geometry"},
    "tided.engine": {
        "kernels", "packers", "tided.tide", "tided.experts", "tided.cache", "tided.models", "tided.control",
        "tided.profile", "tided.guard",
    },
    # Plays the engine's other parts around what decides; policy and decisions are the engine's own.
    "tided.sim": {"tided.tide", "tided.engine.moments", "tided.engine.motion", "tided.control.messages"},
    "tided.chat": {"tided.processes"},
    "tided.api": {"tided.chat", "tided.images", "packers.overlay"},
    # A rank: `daemon` the process, `life` its loop, `front` the HTTP side of it, `boot` the engine thread's side.
    "tided.front": {
        "tided.api", "tided.chat", "tided.engine", "tided.control", "tided.images.geometry", "tided.models", "packers",
    },
    "tided.boot": {"packers", "tided.tide", "tided.experts", "tided.models", "tided.engine", "tided.control"},
    "tided.life": {"tided.front", "tided.boot", "tided.engine", "tided.control"},
    "tided.daemon": {"tided.life", "tided.control", "tided.profile"},
    # A daemon is reached by its files, its socket or HTTP; the offline command computes without one.
    "tidectl": {
        "packers",
        "tided.profile",
        "tided.guard",
        "tided.control.state",
        "tided.control.keys",
        "tided.control.operator",
        "tided.engine.offline",
        "tided.engine.offline_scores",
        "tided.engine.build",
        "tided.engine.facts",
        "tided.engine.memory",
        "tided.engine.devices",
        "tided.engine.slots",
        "tided.engine.synthetic",
        "tided.models.deepseek_v41.limits",
        "tided.engine.packing",
        "tided.tide",
        "tided.sim",
        "tided.chat",
        "tided.api.chat_request",
        "tided.api.messages",
        "tided.api.shape",
    },
}  # fmt: skip

BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "jinja2", "yaml"}
BANNED_CALLS = {"eval", "exec", "torch.load", "torch.save"}
BANNED_METHODS = {"send_pyobj", "recv_pyobj"}


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """The longest entry of FLOORS that holds the module."""
    rooms = [room for room in FLOORS if module == room or module.startswith(room + ".")]
    return max(rooms, key=len, default=None)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level


def upward_imports(module: str, tree: ast.AST) -> list[str]:
    room = room_of(module)
    if room is None:
        return [f"{module}: belongs to no room"]
    wrong = []
    for line, name in imports(tree):
        target = room_of(name)
        if name.startswith("."):
            wrong.append(f"{module}:{line}: relative import")
        elif (
            target
            and target != room
            and target not in COMMON | FLOORS[room]
            and not any(name == allowed or name.startswith(allowed + ".") for allowed in FLOORS[room])
        ):
            wrong.append(f"{module}:{line}: {room} may not import {name}")
    return wrong


def code_in_data(module: str, tree: ast.AST) -> list[str]:
    wrong = [f"{module}:{line}: imports {name}" for line, name in imports(tree) if name.split(".")[0] in BANNED_MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in BANNED_CALLS or called.split(".")[-1] in BANNED_METHODS:
                wrong.append(f"{module}:{node.lineno}: calls {called}")
    return wrong


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=module_of)
def test_imports_go_downwards(path: Path) -> None:
    if module_of(path) in {"tided", "tidectl"}:
        assert not path.read_text().strip(), "top packages are empty: importing one room must not load another"
        return
    assert upward_imports(module_of(path), ast.parse(path.read_text())) == []


@pytest.mark.parametrize("path", sources(*PACKAGES, "minis", "bench"), ids=module_of)
def test_no_code_in_data(path: Path) -> None:
    assert code_in_data(module_of(path), ast.parse(path.read_text())) == []


def test_policy_imports_no_torch() -> None:
    for path in sources("tided/tide", "tided/sim"):
        assert not [name for _, name in imports(ast.parse(path.read_text())) if name.split(".")[0] == "torch"], path


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("kernels.linear", "from tided.experts import arena"),
        ("tided.tide.planner", "import tided.engine.core"),
        ("tided.models.base", "from tided.engine import core"),
        ("tided.api.app", "from tided.engine.core import Engine"),
        ("tided.api.app", "from ..engine import core"),
        ("tidectl.main", "from tided.daemon import main"),
        ("tidectl.main", "from tided.control.lockstep import Leader"),
    ],
)
def test_the_floor_check_sees_a_wrong_import(module: str, code: str) -> None:
    assert upward_imports(module, ast.parse(code))


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from torch import load\nimport marshal", "eval(x)", "torch.load(f)", "socket.recv_pyobj()"],
)
def test_the_data_check_sees_code(code: str) -> None:
    assert code_in_data("x", ast.parse(code))
