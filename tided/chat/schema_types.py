"""Which JSON types a parameter may have by its tool's schema, for call formats that do not mark the type."""

import json
from collections.abc import Mapping
from typing import Any

from tided.chat.arguments import as_json

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
ONLY_STRING = frozenset({"string"})
_DEEPEST = 16  # a schema may refer to itself


def parameter_types(root: Mapping[str, Any], name: str) -> frozenset[str] | None:
    """None: the schema says nothing of this parameter."""
    properties = root.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return types_of(schema, root) if isinstance(schema, dict) else None


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """The types that a schema allows, `root` being what it may refer to. None: it does not say."""
    return _types(schema, root, 0, {})


_Known = dict[str, frozenset[str] | None]
"""What references allow. One that is being followed says nothing of itself, so each is followed once."""


def _types(schema: Any, root: Mapping[str, Any], depth: int, references: _Known) -> frozenset[str] | None:
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in references:
            references[reference] = None
            references[reference] = _types(_referred(root, reference), root, depth + 1, references)
        return references[reference]
    found = [
        _declared(schema.get("type")),
        *(_union(schema.get(name), root, depth, references) for name in ("anyOf", "oneOf")),
        _of_values(schema),
    ]
    known = [types for types in found if types is not None]
    return frozenset.intersection(*known) or None if known else None


def typed_json(raw: str, types: frozenset[str] | None) -> str:
    """JSON of a value written as `raw`: what the schema allows decides, then what the text is. Never invalid JSON."""
    if types is None:
        return as_json(raw, None)
    if "string" not in types:
        return as_json(raw, "false")
    value = as_json(raw, None)
    return value if _type_of(json.loads(value)) & types else json.dumps(raw, ensure_ascii=False)


def _type_of(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, (int, float)):  # an integer may be beyond what a float holds
        whole = isinstance(value, int) or value.is_integer()
        return frozenset({"number", "integer"} if whole else {"number"})
    return frozenset({"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"})


def _declared(given: Any) -> frozenset[str] | None:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list):
        return None
    types = frozenset(name for name in names if isinstance(name, str)) & ALL_TYPES
    return (types | {"integer"} if "number" in types else types) or None


def _union(given: Any, root: Mapping[str, Any], depth: int, references: _Known) -> frozenset[str] | None:
    if not isinstance(given, list) or not given:
        return None
    types = [_types(choice, root, depth + 1, references) for choice in given]
    return frozenset().union(*(one or ALL_TYPES for one in types))


def _of_values(schema: Mapping[str, Any]) -> frozenset[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values:
        return None
    return frozenset().union(*(_type_of(value) for value in values))


def _referred(root: Mapping[str, Any], reference: str) -> Any:
    """A reference within the tool's own schema ("#/$defs/place")."""
    at: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, dict) else None
    return at if reference.startswith("#") else None
