"""What a rank declares about itself in the boot guard: of the settings and of the checkpoint that it has opened.

Nothing is loaded for it: `tidectl guard` compares the same before a start."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from packers.joined import Joined, experts_of
from tided import guard
from tided.engine.build import OpenedModel

NVIDIA_DRIVER = Path("/sys/module/nvidia/version")


def facts_of(opened: OpenedModel) -> dict[str, str]:
    """Ranks that differ in one of them never serve together."""
    overlay = opened.checkpoint.overlay
    dense = opened.checkpoint.dense if isinstance(opened.checkpoint, Joined) else None
    return guard.facts(
        opened.settings,
        experts_of(opened.checkpoint).identity(),
        dense=dense.identity() if dense else "none",
        family=opened.shape.family,
        overlay=f"{overlay.points}, sha256 {overlay.sha256}" if overlay else "none",
        tokenizer=_tokenizer(opened.checkpoint.path),
        **_device(opened.settings.engine.device),
    )


def about(facts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """For /health, which anybody may ask: of the facts those that a figure is of, and this node's machine. Nothing of
    the environment. `device`: the GPU's name, on CPU the instructions that torch computes with."""
    libraries = {name.removeprefix("library."): fact for name, fact in facts.items() if name.startswith("library.")}
    driver = {"driver": facts["driver"]} if "driver" in facts else {}
    return {
        "build": {"tidelm": version("tidelm"), "code": facts["code"], **libraries},
        "machine": guard.machine() | {"device": facts["processor"]} | driver,
        "checkpoint": {"identity": facts["checkpoint"]}
        | {name: facts[name] for name in ("dense", "family", "tokenizer")},
    }


def _tokenizer(checkpoint: Path) -> str:
    """Rank 0 alone makes tokens of text; another file elsewhere means another release."""
    with suppress(OSError), (checkpoint / "tokenizer.json").open("rb") as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
    return guard.ABSENT


def _device(device: str) -> dict[str, str]:
    """Replicated arithmetic must give the same bits; a collective needs one NCCL on both ends."""
    if device != "cuda":
        return {"processor": torch.backends.cpu.get_cpu_capability()}
    driver = guard.ABSENT
    with suppress(OSError):
        driver = NVIDIA_DRIVER.read_text().strip()
    return {
        "processor": torch.cuda.get_device_name(),
        "driver": driver,
        "library.nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    }
