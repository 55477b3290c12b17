"""Which JSON types a parameter may have by its tool's schema, for call formats that do not mark the type."""

import json
from collections.abc import Mapping
from typing import Any

from tided.chat.arguments import as_json

_ALL = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
ONLY_STRING = frozenset({"string"})
_DEEPEST = 16  # a schema may refer to itself


def parameter_types(root: Mapping[str, Any], name: str) -> frozenset[str] | None:
    """None: the schema says nothing of this parameter."""
    properties = root.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return _types(schema, root, 0) if isinstance(schema, dict) else None


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
    if isinstance(value, (int, float)):
        return frozenset({"number", "integer"} if float(value).is_integer() else {"number"})
    return frozenset({"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"})


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return None
    if isinstance(schema.get("$ref"), str):
        return _types(_referred(root, schema["$ref"]), root, depth + 1)
    found = [
        _declared(schema.get("type")),
        *(_union(schema.get(name), root, depth) for name in ("anyOf", "oneOf")),
        _of_values(schema),
    ]
    known = [types for types in found if types is not None]
    return frozenset.intersection(*known) or None if known else None


def _declared(given: Any) -> frozenset[str] | None:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list):
        return None
    types = frozenset(name for name in names if isinstance(name, str)) & _ALL
    return (types | {"integer"} if "number" in types else types) or None


def _union(given: Any, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    if not isinstance(given, list) or not given:
        return None
    types = [_types(choice, root, depth + 1) for choice in given]
    return frozenset().union(*(one or _ALL for one in types))


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
