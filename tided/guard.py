"""The boot guard: what a rank declares about itself, and the comparison. Ranks that differ never serve (contract C8).

A fact is `name -> value as text`. Every field of the settings that affects numbers is a fact by construction: the
walk below reads the settings' own annotations, so a new field is in the guard without anybody doing anything.
"""

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from tided.settings import Settings

SOURCE_PACKAGES = ("kernels", "packers", "tided")
LIBRARIES = ("torch", "triton", "numpy")
ENVIRONMENT = (  # read by the libraries below us; each changes bits of a result
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET",
)
ABSENT = "(absent)"

Difference = tuple[str, str, str]
"""(field, our value, their value)"""


def facts(settings: Settings, checkpoint: str, **more: str) -> dict[str, str]:
    """What this rank computes with. `checkpoint` is its content identity; `more` are facts that other rooms add."""
    return {
        **dict(setting_facts(settings)),
        **{f"environment.{name}": os.environ.get(name, "") for name in ENVIRONMENT},
        **{f"library.{name}": _version(name) for name in LIBRARIES},
        "machine": platform.machine(),
        "code": code_digest(),
        "checkpoint": checkpoint,
        **more,
    }


def setting_facts(section: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The resolved value of each field that affects numbers, as JSON, under its name in the profile."""
    for name, annotation in get_type_hints(type(section), include_extras=True).items():
        value = getattr(section, name)
        if isinstance(value, msgspec.Struct):
            yield from setting_facts(value, f"{prefix}{name}.")
        elif affects(f"{prefix}{name}", annotation) == "numbers":
            yield f"{prefix}{name}", msgspec.json.encode(value).decode()


def affects(name: str, annotation: Any) -> str:
    """What a field says that it affects. A field that says nothing is a mistake of ours, found at every start."""
    for meta in getattr(annotation, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.extra and "affects" in meta.extra:
            return str(meta.extra["affects"])
    raise TypeError(f"the setting {name} does not say what it affects")


def machine() -> dict[str, Any]:
    """Told and not compared. `processor`: its name, empty where the system has none for it; `cores`: this process's."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def compare(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[Difference]:
    """Every fact that is not equal, by name; one that a side lacks shows as `(absent)`."""
    pairs = ((name, ours.get(name, ABSENT), theirs.get(name, ABSENT)) for name in sorted(ours.keys() | theirs.keys()))
    return [(name, mine, other) for name, mine, other in pairs if mine != other]


def describe(differences: list[Difference], ours: str, theirs: str) -> str:
    """`field: rank 0 has 4096, rank 1 has 8192`, one a line."""
    return "\n".join(f"  {name}: {ours} has {mine}, {theirs} has {other}" for name, mine, other in differences)


def code_digest(root: Path | None = None, packages: Sequence[str] = SOURCE_PACKAGES) -> str:
    """Over the names and bytes of our own Python sources; by default of those that take part in a step."""
    root = root or Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(path for package in packages for path in (root / package).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT
