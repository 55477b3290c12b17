"""The keys that a profile may have, read from the types of `tided.settings`: nothing is written down twice."""

import typing
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from tided.settings import Section, Settings


class Key(NamedTuple):
    """One key of a profile. `default` is meaningless where `required`."""

    section: str
    name: str
    type: Any
    text: str
    affects: str
    built: bool
    path: bool
    required: bool
    default: Any

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"


def _keys_of(section: str, struct: type[Section]) -> dict[str, Key]:
    hints = typing.get_type_hints(struct, include_extras=True)
    keys = {}
    for field in msgspec.structs.fields(struct):
        meta = next(extra for extra in hints[field.name].__metadata__ if isinstance(extra, Meta))
        facts = meta.extra or {}
        keys[field.name] = Key(
            section,
            field.name,
            hints[field.name],
            meta.description or "",
            facts["affects"],
            facts["built"],
            facts["path"],
            field.required,
            None if field.required else field.default,
        )
    return keys


SECTIONS: dict[str, dict[str, Key]] = {
    field.name: _keys_of(field.name, field.type) for field in msgspec.structs.fields(Settings)
}
KEYS: tuple[Key, ...] = tuple(key for keys in SECTIONS.values() for key in keys.values())


def value_of(settings: Settings, key: Key) -> Any:
    return getattr(getattr(settings, key.section), key.name)


def wanted(annotation: Any) -> str:
    """What a value of this type must be, in words: `an integer from 1 to 8192`."""
    base, limits = _unwrap(annotation)
    origin = typing.get_origin(base)
    if origin is UnionType or origin is typing.Union:
        return ", or ".join(wanted(part) for part in typing.get_args(base))
    if origin is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in typing.get_args(base))
    if origin is tuple:
        return f"an array of values, each {wanted(typing.get_args(base)[0])}"
    if base is bool:
        return "true or false"
    if base is str:
        return "a string that is not empty" if limits and limits.min_length else "a string"
    return ("an integer" if base is int else "a number") + _range(limits)


def choices(annotation: Any) -> tuple[str, ...]:
    base, _ = _unwrap(annotation)
    parts = typing.get_args(base) if typing.get_origin(base) in (UnionType, typing.Union) else (base,)
    return tuple(choice for part in parts if typing.get_origin(part) is Literal for choice in typing.get_args(part))


def element_type(annotation: Any) -> Any:
    """The type of an array's elements, or None where no array is wanted."""
    base, _ = _unwrap(annotation)
    return typing.get_args(base)[0] if typing.get_origin(base) is tuple else None


def _unwrap(annotation: Any) -> tuple[Any, Meta | None]:
    if typing.get_origin(annotation) is not Annotated:
        return annotation, None
    base, *extras = typing.get_args(annotation)
    return base, next((extra for extra in extras if isinstance(extra, Meta)), None)


def _range(limits: Meta | None) -> str:
    if limits is None:
        return ""
    low = f"from {limits.ge}" if limits.ge is not None else f"above {limits.gt}" if limits.gt is not None else ""
    below = f"{'to below' if low else 'below'} {limits.lt}" if limits.lt is not None else ""
    high = f"to {limits.le}" if limits.le is not None else below
    if low.startswith("from") and not high:
        return f" of {limits.ge} or more"
    return "".join(f" {part}" for part in (low, high) if part)
