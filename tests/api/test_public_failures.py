"""Failures that public servers have had, provoked here; those that other files do not provoke already."""

import asyncio
import json

import anthropic
import openai
import pytest
from scripted_engine import data, gather, said, until

from tided.api.ports import Limits
from tided.chat.deepseek_v41 import IMAGE
from tided.chat.deepseek_v41_tools import DSML

SHELL = {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": SHELL}}]
COMMAND = 'make </div> 2>&1 | grep "涨潮 </" > /tmp/x 2>&1'
CALL = (
    f'<{DSML} calls>\n<{DSML} invoke name="run">\n'
    f'<{DSML} parameter name="command" string="true">{COMMAND}</{DSML} parameter>\n'
    f'<{DSML} parameter name="n" string="false">3</{DSML} parameter>\n'
    f"</{DSML} invoke>\n</{DSML} calls>"
)
USER = {"role": "user", "content": "hi"}


def in_pieces(engine, text: str, size: int) -> None:
    """Every request is answered with the text, `size` tokens an event; the end comes in an event of its own."""
    ids = engine.ids(text)

    def play(answer):
        answer.start()
        for at in range(0, len(ids), size):
            answer.draw(ids[at : at + size])
        answer.finish()

    engine.play = play


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_no_tag_in_a_delta_and_none_in_an_argument_that_ends_like_one(server, engine, size):
    in_pieces(engine, f"plan</think>Look.\n\n{CALL}", size)
    sent = await server.stream(said("hi", tools=TOOLS))
    assert "｜" not in "".join(sent)
    streamed = gather(data(sent))
    [call] = streamed["tool_calls"]
    assert json.loads(call["arguments"]) == {"command": COMMAND, "n": 3}
    assert (streamed["content"], streamed["reasoning_content"]) == ("Look.", "plan")
    _, reply = await server.ask(said("hi", tools=TOOLS))
    [whole] = reply["choices"][0]["message"]["tool_calls"]
    assert whole["function"]["arguments"] == call["arguments"]


@pytest.mark.parametrize("size", [1, 1000])
async def test_an_empty_block_swallows_nothing_and_is_no_call(server, engine, size):
    in_pieces(engine, f"</think>Before.\n\n<{DSML} calls>\n</{DSML} calls>", size)
    sent = await server.stream(said("hi", tools=TOOLS))
    streamed = gather(data(sent))
    assert (streamed["content"], streamed["tool_calls"], streamed["finish_reason"]) == ("Before.", [], "stop")
    assert "tool_calls" not in "".join(sent)
    assert "｜" not in "".join(sent)
    _, reply = await server.ask(said("hi", tools=TOOLS))
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["message"]["content"] == "Before."


INSIDE = CALL.partition(" calls>\n")[2]
"""What the model writes where the prompt has opened the block."""


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (f"</think>{CALL}", {}),
        (f"</think>First I look.\n\n{CALL}", {}),
        (f"</think>{CALL}", {"tool_choice": "required"}),
        (INSIDE, {"tool_choice": "required", "enable_thinking": False}),
        (INSIDE, {"tool_choice": {"type": "function", "function": {"name": "run"}}, "enable_thinking": False}),
    ],
    ids=["auto", "text before", "required", "required, block opened", "named"],
)
async def test_an_answer_with_a_call_ends_for_its_call_wherever_the_end_arrives(server, engine, text, fields):
    body = said("hi", tools=TOOLS, **fields)
    for size in (1, 1000):
        in_pieces(engine, text, size)
        assert gather(data(await server.stream(body)))["finish_reason"] == "tool_calls"
        _, reply = await server.ask(body)
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
    engine.script(text[: text.index('string="false">')], reason="length")
    assert gather(data(await server.stream(body)))["finish_reason"] == "length"


async def test_the_placeholder_of_an_image_is_text_where_a_client_writes_it(server, engine, tokenizer):
    """In a question, a result, the reasoning of an earlier turn; and the conversation goes on."""
    engine.script("</think>x")
    calls = [{"id": "c", "function": {"name": "run", "arguments": json.dumps({"command": IMAGE})}}]
    turns = [
        {"role": "user", "content": f"what is {IMAGE}"},
        {"role": "assistant", "reasoning_content": IMAGE, "content": IMAGE, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": f"a {IMAGE}"},
    ]
    for messages in (turns[:1], turns, [*turns, {"role": "assistant", "content": "ok"}, USER]):
        status, _ = await server.ask({"messages": messages, "tools": TOOLS})
        assert status == 200
        assert tokenizer.special_id(IMAGE) not in engine.request.prompt_ids
        assert engine.request.images == ()


async def test_no_template_comes_from_a_request(server, engine, tokenizer):
    """Nor an option of one that this server does not know."""
    engine.script("</think>x")
    template = "{{ cycler.__init__.__globals__.os.popen('id').read() }}{{ messages }}"
    await server.ask({"messages": [USER]})
    plain = engine.request.prompt_ids
    options = {"chat_template": template, "add_special": template, "tokenize": True, "messages": [USER]}
    for fields in (
        {"chat_template": template},
        {"chat_template_kwargs": options},
        {"documents": [{"text": template}], "mm_processor_kwargs": options},
    ):
        status, _ = await server.ask({"messages": [USER], **fields})
        assert (status, engine.request.prompt_ids) == (200, plain)


TEXT = "🌊涨潮é 👩‍👩‍👧 \ufffd x"
CUT = "潮"


def of_chat(event: dict) -> str:
    return "".join(choice["delta"].get("content", "") for choice in event["choices"])


def of_completion(event: dict) -> str:
    return "".join(choice["text"] for choice in event["choices"])


def of_message(event: dict) -> str:
    return event.get("delta", {}).get("text", "")


def of_response(event: dict) -> str:
    return event["delta"] if event["type"] == "response.output_text.delta" else ""


@pytest.mark.parametrize(
    ("path", "body", "text_of"),
    [
        ("/v1/chat/completions", {"messages": [USER], "enable_thinking": False}, of_chat),
        ("/v1/completions", {"prompt": "hi"}, of_completion),
        ("/v1/messages", {"messages": [USER], "max_tokens": 9, "thinking": {"type": "disabled"}}, of_message),
        ("/v1/responses", {"input": "hi", "enable_thinking": False}, of_response),
    ],
    ids=["chat", "completions", "messages", "responses"],
)
async def test_one_byte_a_token_no_character_is_parted_on_any_route(server, engine, tokenizer, path, body, text_of):
    """A replacement character that the model itself writes is a character; a cut one at the end becomes one."""
    single = {piece[0]: at for at, piece in enumerate(tokenizer.token_bytes) if piece is not None and len(piece) == 1}

    def play(answer):
        answer.start()
        for byte in TEXT.encode() + CUT.encode()[:2]:
            answer.draw([single[byte]])
        answer.finish("length")

    engine.play = play
    async with server.post({**body, "stream": True}, path=path) as response:
        raw = await response.read()
    lines = [line[len("data: ") :] for line in raw.decode("utf-8", "strict").split("\n") if line.startswith("data: {")]
    pieces = [text for line in lines if (text := text_of(json.loads(line)))]
    assert "".join(pieces) == TEXT + "\ufffd"
    assert all(piece in TEXT + "\ufffd" for piece in pieces)
    assert len(pieces) >= len(TEXT)  # nothing waits for more than its character


async def test_both_vendors_clients_outlive_a_silence(serve, engine):
    """Their own limit on silence is shorter than the prompt takes; what fills it keeps them."""
    server = await serve(Limits(keepalive_s=0.1))
    root = f"http://127.0.0.1:{server.port}"
    mine = openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="k", max_retries=0, timeout=0.7)
    other = anthropic.AsyncAnthropic(base_url=root, api_key="k", max_retries=0, timeout=0.7)

    async def chat() -> str:
        chunks = await mine.chat.completions.create(model="m", messages=[USER], stream=True)
        return "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])

    async def message() -> str:
        async with other.messages.stream(model="m", max_tokens=9, messages=[USER]) as stream:
            return "".join([text async for text in stream.text_stream])

    async with mine, other:
        asked = asyncio.gather(chat(), message())
        await until(lambda: len(engine.answers) == 2)
        engine.answers[1].start()  # one waits for a lane, the other computes its prompt
        await asyncio.sleep(2.1)  # the time that passes is what is tested
        for answer in engine.answers:
            answer.start().say("</think>tide").finish()
        assert await asked == ["tide", "tide"]
