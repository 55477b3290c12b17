"""What the small routes answer, and refusals."""

from typing import get_args

from tided.api.errors import ANTHROPIC_TYPES
from tided.api.openapi.terms import (
    ANY_NUMBER,
    ANY_OBJECT,
    COUNT,
    NULL,
    TRUTH,
    Schema,
    always,
    array,
    asked,
    either,
    integer,
    nullable,
    one,
    ref,
    said,
    text,
    told,
)
from tided.engine.types import Fidelity

_NAME = text(1)
_LIBRARIES = ("torch", "triton", "numpy", "nccl")
_PAIRS = array(array(COUNT, 2, least=2))
_NUMBERS = array(ANY_NUMBER)
_DIGITS = said("A digit for each expert of a layer.", array(text(pattern="^[0-9]*$")))

SCHEMAS: dict[str, Schema] = {
    "Error": told(
        {
            "error": told(
                {
                    "message": said("One line.", text(1, pattern=r"^[^\n]*$")),
                    "type": _NAME,
                    "param": said("The field that is wrong.", nullable(text())),
                    "code": nullable(text()),
                }
            )
        }
    ),
    "AnthropicError": told(
        {
            "type": always("error"),
            "error": told(
                {
                    "type": one("invalid_request_error", "api_error", *sorted({*ANTHROPIC_TYPES.values()})),
                    "message": text(1, pattern=r"^[^\n]*$"),
                }
            ),
            "request_id": text(pattern="^[A-Za-z0-9._-]{1,128}$"),
        }
    ),
    "Alive": told({"status": always("ok")}, {"engine": always("tidelm")}),
    "Health": said(
        "The engine's own names may be more.",
        {
            "type": "object",
            "properties": {
                "status": one("ok", "loading", "draining", "fault"),
                "engine": always("tidelm"),
                "model": _NAME,
                "busy": TRUTH,
                "lanes": told({"total": COUNT, "busy": COUNT}),
                "queue": COUNT,
                "overlay": said(
                    "Under which the model is served.", nullable(told({"sha256": _NAME, "changes": _NAME}))
                ),
                "max_context": COUNT,
                "uptime_s": ANY_NUMBER,
                "profile": said("Its name, as a start was given it.", text()),
                "engine_config": said(
                    "Settings that change what is computed, and what the start measured.", ANY_OBJECT
                ),
                "engine_policy": said("Settings on which it depends what is resident, and how fast.", ANY_OBJECT),
                "build": said(
                    "What computes, once it serves: of all ranks. `code`: digest of the sources.",
                    told({"tidelm": _NAME, "code": _NAME}, dict.fromkeys(_LIBRARIES, _NAME)),
                ),
                "machine": said(
                    "Of rank 0, once it serves. `device`: the GPU, on CPU the instructions that are used.",
                    told(
                        {"system": text(), "machine": text(), "processor": text(), "cores": COUNT},
                        {"device": _NAME, "driver": _NAME},
                    ),
                ),
                "checkpoint": said(
                    "Names its content, once it serves. `dense`: of another checkpoint's dense weights, or none.",
                    told(dict.fromkeys(("identity", "dense", "family", "tokenizer"), _NAME)),
                ),
                "fault": _NAME,
            },
            "required": ["status", "engine", "model", "busy", "lanes", "queue", "max_context", "engine_config"],
        },
    ),
    "ModelCard": told(
        {
            "id": _NAME,
            "object": always("model"),
            "type": always("model"),
            "created": COUNT,
            "created_at": _NAME,
            "display_name": _NAME,
            "owned_by": always("tidelm"),
            "max_model_len": COUNT,
            "context_length": COUNT,
            "max_output_tokens": COUNT,
            "capabilities": told({"vision": TRUTH, "tools": TRUTH, "reasoning": TRUTH}),
        }
    ),
    "ModelList": told(
        {
            "object": always("list"),
            "data": array(ref("ModelCard"), least=1),
            "first_id": _NAME,
            "last_id": _NAME,
            "has_more": always(False),
        }
    ),
    "Audit": told(
        {
            "request_id": _NAME,
            "fidelity": one(*get_args(Fidelity)),
            "tokens": COUNT,
            "exact_loss": said("Nats a token of the answer, with every expert.", ANY_NUMBER),
            "exact_top1": ANY_NUMBER,
            "resident_loss": said("At the answer's fidelity, with the experts that are resident now.", ANY_NUMBER),
            "residency_loss": ANY_NUMBER,
            "substituted_weight_share": nullable(ANY_NUMBER),
            "reads": COUNT,
            "read_bytes": COUNT,
            "seconds": ANY_NUMBER,
            "tries": said("More than 1: it had to begin again.", COUNT),
            "differ": said("Tokens that would be others; null: drawn under a grammar.", nullable(COUNT)),
            "differences": array(
                told(
                    {"at": COUNT, "token_id": COUNT, "exact_id": COUNT, "rank": COUNT, "logprob": ANY_NUMBER}
                    | {"text": text(), "exact_text": text()}
                )
            ),
            "ends_alike": nullable(TRUTH),
        }
    ),
    "Residency": said("What a request wanted of the experts, missed and got: numbers of the engine.", ANY_OBJECT),
    "ExpertMap": told(
        {
            "version": always(1),
            "sampled_at": ANY_NUMBER,
            "model": _NAME,
            "busy": TRUTH,
            "fault": text(),
            "rank": COUNT,
            "world_size": COUNT,
            "layers": COUNT,
            "experts_per_layer": COUNT,
            "total_experts": COUNT,
            "states": _DIGITS,
            "state_names": array(_NAME),
            "counts": {"type": "object", "additionalProperties": COUNT},
            "resident_per_layer": array(COUNT),
            "generation": COUNT,
            "activity": told({"sequence": COUNT, "active": _PAIRS, "recent": _PAIRS}),
            "heat": nullable(_DIGITS),
            "arena_slots": COUNT,
            "last_request_miss_rate": nullable(ANY_NUMBER),
        },
        {"slots": said("-1: none.", array(array({"type": "integer", "minimum": -1})))},
    ),
    "ExpertEvent": said(
        "By the event's name.",
        {
            "anyOf": [
                said(
                    "map: `cells` is base64 of a byte an expert, layer by layer: its state times 16, and its heat, 0 "
                    "to 9 (15: nobody follows it).",
                    told({"model": _NAME, "layers": COUNT, "experts": COUNT, "states": array(_NAME), "cells": text()}),
                ),
                said(
                    "cells: base64 of three bytes a change, the highest first: its place in `cells` times 64, and its "
                    "new byte. Of several in one event none repeats.",
                    told({"cells": text()}),
                ),
                said(
                    "tide: samples, a column each; with `whole` all that are kept. Counters stand as they are, so a "
                    "difference may be taken over any span: 1 - missed / weight is the coverage.",
                    told(
                        {
                            "at": _NUMBERS,
                            "weight": _NUMBERS,
                            "missed": _NUMBERS,
                            "substituted": _NUMBERS,
                            "swaps": array(COUNT),
                            "hot_reads": array(COUNT),
                            "read_bytes": array(COUNT),
                            "tokens": array(COUNT),
                            "held": array(nullable(ANY_NUMBER)),
                        },
                        {"whole": TRUTH},
                    ),
                ),
                said(
                    "now: the engine's own names may be more.",
                    {
                        "type": "object",
                        "properties": {"state": _NAME, "lanes": array(ANY_OBJECT), "counts": ANY_OBJECT},
                        "required": ["state", "fault", "queue", "lanes_total", "lanes", "tok_s", "counts"],
                    },
                ),
            ]
        },
    ),
    "Stats": told({"object": always("list"), "data": array(ANY_OBJECT)}),
    "TokenizeRequest": either(
        asked({"prompt": text()}, {"add_special_tokens": TRUTH, "return_token_strs": TRUTH}),
        {"allOf": [asked({}, {"prompt": NULL, "return_token_strs": TRUTH}), ref("ChatRequest")]},
    ),
    "Tokenized": told({"count": COUNT, "max_model_len": COUNT, "tokens": array(COUNT)}, {"token_strs": array(text())}),
    "DetokenizeRequest": asked({"tokens": array(integer(0))}),
    "Detokenized": told({"prompt": text()}),
    "DebugRequest": said("One of /v1/messages with the header anthropic-version.", ref("ChatRequest")),
    "DebugPrompt": told(
        {
            "prompt": text(),
            "prompt_token_ids": array(COUNT),
            "special_token_spans": said("In characters, from and to.", _PAIRS),
            "thinking": TRUTH,
            "effort": nullable(COUNT),
            "grammar": said("Whether one would hold the answer.", TRUTH),
        }
    ),
    "Document": ANY_OBJECT,
}
