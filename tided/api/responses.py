"""POST /v1/responses: OpenAI's Responses without a store; items of reasoning, text and calls, and their events."""

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from tided.api.context import CONTEXT, NOTE
from tided.api.exchange import answer_in_pieces, answer_whole, receive
from tided.api.generation import Generation
from tided.api.ids import new_id
from tided.api.responses_request import prepare_response
from tided.api.sse import comment, event
from tided.chat.deltas import CallArguments, CallStarted, Content, Delta, Reasoning
from tided.chat.text import shorten
from tided.errors import RequestError


async def responses(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    generation, shown = await _submitted(request)
    request[NOTE].generation = generation
    wire = ResponseWire(generation, shown, context.served.settings.model.served_name)
    try:
        if generation.prepared.chat.stream:
            return await answer_in_pieces(request, context, generation, wire, request[NOTE])
        return await answer_whole(context, generation, wire)
    finally:
        generation.close()


async def _submitted(request: web.Request) -> tuple[Generation, dict[str, Any]]:
    """And the fields that the reply repeats. What the answer does not need, images above all, is let go here."""
    context = request.app[CONTEXT]
    with context.admission.place(request.content_length) as place:
        response = await receive(request, context, place, prepare_response)
        prepared = await context.images.seen(response.prepared)
        if request.headers.get("x-engine-stats") == "0":
            prepared = prepared.without_stats()
        generation = Generation(context.engine, prepared, context.served, context.limits.keepalive_s)
    return generation, response.shown


class ResponseWire:
    """`exchange.Writer` of responses. One item is open at a time; each event has the next number."""

    def __init__(self, generation: Generation, shown: dict[str, Any], model: str) -> None:
        self._generation, self._chat = generation, generation.prepared.chat
        self._shown, self._model, self._created = shown, model, int(time.time())
        self._number = 0
        self._begun = False
        self._items: list[dict[str, Any]] = []
        self._open = False  # the last item is not done

    def begin(self) -> str:
        if self._begun:
            return ""
        self._begun = True
        return "".join(
            self._event(f"response.{name}", response=self._response("in_progress"))
            for name in ("created", "in_progress")
        )

    def pieces(self, deltas: Sequence[Delta]) -> str:
        return "".join(("" if self._hides(delta) else self.begin()) + self._piece(delta) for delta in deltas)

    def silence(self) -> str:
        return comment("keep-alive")

    def end(self) -> str:
        cut = self._generation.reader.parser.finish_reason == "length"
        text = self.begin() + self._close("incomplete" if cut else "completed")
        name = "incomplete" if cut else "completed"
        return text + self._event(f"response.{name}", response=self._response(name))

    def fault(self, error: RequestError) -> str:
        failed = self._response("failed")
        failed["error"] = {"code": error.code or "server_error", "message": shorten(error, 1000)}
        return self._event("response.failed", response=failed)

    def reply(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        self.pieces(deltas)
        cut = self._generation.reader.parser.finish_reason == "length"
        self._close(status := "incomplete" if cut else "completed")
        return self._response(status)

    def _hides(self, delta: Delta) -> bool:
        return isinstance(delta, Reasoning) and not self._chat.show_reasoning

    def _piece(self, delta: Delta) -> str:
        if self._hides(delta):
            return ""
        match delta:
            case Reasoning(text):
                return self._text("reasoning", text)
            case Content(text):
                return self._text("message", text)
            case CallStarted(_, call_id, name):
                item = {"id": new_id("fc_"), "type": "function_call", "status": "in_progress"}
                return self._add(item | {"call_id": call_id, "name": name, "arguments": ""})
            case CallArguments(_, text):
                self._items[-1]["arguments"] += text
                return self._item_event("response.function_call_arguments.delta", delta=text)

    def _text(self, kind: str, text: str) -> str:
        out = ""
        if not self._open or self._items[-1]["type"] != kind:
            reasoning = kind == "reasoning"
            own: dict[str, Any] = {"summary": []} if reasoning else {"role": "assistant"}
            item = {"id": new_id("rs_" if reasoning else "msg_"), "type": kind, "status": "in_progress", "content": []}
            out = self._add(item | own)
            part = {"type": "reasoning_text", "text": ""} if reasoning else _output_text()
            self._items[-1]["content"].append(part)
            out += self._part_event("response.content_part.added", part=dict(part))
        self._items[-1]["content"][0]["text"] += text
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        return out + self._part_event(f"response.{name}.delta", delta=text, **more)

    def _add(self, item: dict[str, Any]) -> str:
        out = self._close("completed")
        shown = item | ({"content": []} if "content" in item else {})
        self._items.append(item)
        self._open = True
        return out + self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)

    def _close(self, status: str) -> str:
        """The events that end the open item."""
        if not self._open:
            return ""
        self._open, item = False, self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            out = self._item_event("response.function_call_arguments.done", **told)
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            out = self._part_event(f"response.{part['type']}.done", text=part["text"], **more)
            out += self._part_event("response.content_part.done", part=part)
        return out + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _part_event(self, name: str, /, **fields: Any) -> str:
        return self._item_event(name, content_index=0, **fields)

    def _item_event(self, name: str, /, **fields: Any) -> str:
        at = len(self._items) - 1
        return self._event(name, item_id=self._items[at]["id"], output_index=at, **fields)

    def _event(self, name: str, /, **fields: Any) -> str:
        number, self._number = self._number, self._number + 1
        return event({"type": name, "sequence_number": number, **fields})

    def _response(self, status: str) -> dict[str, Any]:
        over = status in ("completed", "incomplete")
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        stats = {"x_engine_stats": self._generation.engine_stats()} if over and self._chat.show_stats else {}
        return {
            "id": self._generation.prepared.request.request_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "model": self._model,
            "output": list(self._items),
            **self._shown,
            "usage": self._usage() if over else None,
            **stats,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_cache_hit_tokens"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


def _output_text() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
