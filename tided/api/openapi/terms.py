"""Words that the document's JSON schemas are written in. What a request leaves out and what it sets to null is one."""

from collections.abc import Mapping
from typing import Any

from tided.chat.fields import INT64_MAX

Schema = dict[str, Any]

TRUTH: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
ANY_OBJECT: Schema = {"type": "object"}
ANY_NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def text(least: int = 0, most: int | None = None, pattern: str | None = None) -> Schema:
    """`least`, `most`: characters."""
    limits = {"minLength": least or None, "maxLength": most, "pattern": pattern}
    return {"type": "string"} | {name: value for name, value in limits.items() if value is not None}


def number(low: float, high: float, *, low_open: bool = False) -> Schema:
    return {"type": "number", "exclusiveMinimum" if low_open else "minimum": low, "maximum": high}


def integer(low: int, high: int = INT64_MAX) -> Schema:
    """10.0 is an integer too, as JSON Schema has it."""
    return {"type": "integer", "minimum": low, "maximum": high}


def array(of: Schema, most: int | None = None, *, least: int = 0) -> Schema:
    limits = {"minItems": least or None, "maxItems": most}
    return {"type": "array", "items": of} | {name: value for name, value in limits.items() if value is not None}


def one(*values: Any) -> Schema:
    return {"enum": list(values)}


def always(value: Any) -> Schema:
    return {"const": value}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    kind = schema.get("type")
    if not schema.keys() - {"description"}:
        return schema
    if isinstance(kind, str) and kind != "null":
        return schema | {"type": [kind, "null"]}
    return either(schema, NULL)


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def said(note: str, schema: Schema) -> Schema:
    return schema | {"description": note}


def asked(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object of a request: unknown names are ignored, and null is as good as nothing where a name may be missing."""
    properties = dict(required) | {name: nullable(schema) for name, schema in (optional or {}).items()}
    return {"type": "object", "properties": properties} | ({"required": list(required)} if required else {})


def told(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object of a reply: it holds these names and no others."""
    properties = dict(required) | dict(optional or {})
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
