"""Refused at a start, not when a profile is read: keys that this build does not act on, data that is not here yet."""

from pathlib import Path

from tided.errors import ConfigError, DataError
from tided.profile.checkpoint_files import checkpoint_fault, fetch_command
from tided.profile.problems import Problem, Severity, in_order, render
from tided.profile.reading import Reading
from tided.profile.rules import is_file
from tided.profile.schema import KEYS, value_of
from tided.settings import Settings


def refuse_unread(settings: Settings, reading: Reading) -> None:
    """A setting that nothing reads must not look as if it counted (C8). Raises ConfigError naming the lines."""
    problems = unread(settings, reading, "error")
    if problems:
        raise ConfigError(render(problems))


def refuse_missing(settings: Settings, reading: Reading) -> None:
    """The checkpoint, the packs and the demand seed must be there. Raises DataError naming the line and the path."""
    problems = missing(settings, reading, "error")
    if problems:
        raise DataError(render(problems))


def unread(settings: Settings, reading: Reading, severity: Severity) -> list[Problem]:
    found = [
        reading.source.problem(
            reading.span(key.dotted),
            f"this build does not act on '{key.dotted}', so a start with this value is refused",
            rule=f"leave it out, or set it to its default: {_toml(key.default)}",
            severity=severity,
        )
        for key in KEYS
        if not key.built and value_of(settings, key) != key.default
    ]
    return in_order(found)


def missing(settings: Settings, reading: Reading, severity: Severity) -> list[Problem]:
    path, seed, packs = settings.model.path, settings.tide.seed, settings.experts.pack_dir
    dense = settings.model.dense
    found = (
        (
            "model.path",
            checkpoint_fault(Path(path)),
            f"{fetch_command(Path(path))}, or set model.path to where it is",
        ),
        (
            "model.dense",
            checkpoint_fault(Path(dense)) if dense else "",
            f"{fetch_command(Path(dense), '--dense')}; or set model.dense to where it is, or leave the key out: "
            "then model.path has all weights",
        ),
        (
            "experts.pack_dir",
            _packs_fault(packs) if settings.experts.source == "pack" else "",
            f'make the packs with `tidectl pack {reading.source.file}`, or set experts.source to "checkpoint"',
        ),
        (
            "model.overlay",
            _edit_fault(settings.model.overlay),
            "set model.overlay to where it is, or leave the key out",
        ),
        (
            "model.ablation",
            _edit_fault(settings.model.ablation),
            "`tidectl fit` makes one; set model.ablation to where it is, or leave the key out",
        ),
        ("tide.seed", _seed_fault(seed), "set tide.seed to where it is, or leave the key out"),
    )
    return [
        reading.source.problem(reading.span(dotted), fault, suggestion=suggestion, severity=severity)
        for dotted, fault, suggestion in found
        if fault
    ]


def _packs_fault(directory: str) -> str:
    """Whether this rank's pack is there is judged when the rank, and so its name, is known."""
    try:
        names = [entry.name for entry in Path(directory).iterdir()]
    except OSError as error:
        return f"{directory} cannot be read as a directory of packs ({error.strerror})"
    return (
        ""
        if any(name.endswith((".mxfp4", ".exl3")) for name in names)
        else f"there is no pack of experts in {directory}"
    )


def _seed_fault(seed: str) -> str:
    return f"there is no demand seed at {seed}" if seed and not is_file(seed) else ""


def _edit_fault(path: str) -> str:
    return f"there is no file of edits at {path}" if path and not is_file(path) else ""


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
