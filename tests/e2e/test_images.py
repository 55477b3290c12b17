"""Images on the mini's own tower, with the official packages: the tower lies on rank 1, the pixels come in at rank 0.

The tower is untrained, so what is seen here is that pixels reach the model, and that the same ones do the same."""

import base64
import io
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from PIL import Image

from tests.daemon.helpers import Running, running
from tests.e2e.conftest import get, mini, post

pytestmark = pytest.mark.xdist_group("images")

CACHE = "[cache]\ncontext_tokens = 1024\npool_tokens = 2048\n"
PLAIN: Any = {"enable_thinking": False, "fidelity": "exact"}


def profile(rank: int, cache_bytes: int = 0) -> str:
    text = mini(extra=f"[vision]\nrank = {rank}\nmax_images = 3\n")
    return text.replace(CACHE.strip(), f"{CACHE}prefix_ram_bytes = {cache_bytes}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(profile(1, 1 << 26), tmp_path_factory.mktemp("images")) as started:
        yield started


def picture(seed: int, size: tuple[int, int] = (120, 90)) -> bytes:
    """A PNG of colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).save(file, "PNG")
    return file.getvalue()


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def block(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


QUESTION = {"type": "text", "text": "Tell me about Japan."}
TOKENS = 3 * (3 + 1) + 2  # 120 x 90 pixels become 126 x 98: 9 x 7 patches, 3 x 3 tokens


@pytest.fixture
async def chat(pair: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture
async def claude(pair: Running) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(api_key="none", base_url=pair.url, max_retries=0, timeout=120) as made:
        yield made


def asked(*content: dict[str, Any], **fields: Any) -> Any:
    body = {"model": "any", "messages": [{"role": "user", "content": list(content)}], "max_tokens": 12}
    return body | {"temperature": 0, "logprobs": True, "top_logprobs": 5, "extra_body": PLAIN} | fields


def firsts(reply: Any) -> dict[str, float]:
    """The likeliest first tokens and their log probabilities."""
    return {one.token: one.logprob for one in reply.choices[0].logprobs.content[0].top_logprobs}


async def test_pixels_change_the_answer_and_the_same_ones_do_not(chat):
    one = await chat.chat.completions.create(**asked(part(picture(1)), QUESTION))
    other = await chat.chat.completions.create(**asked(part(picture(2)), QUESTION))
    none = await chat.chat.completions.create(**asked(QUESTION))
    again = await chat.chat.completions.create(**asked(part(picture(1)), QUESTION))
    assert len({tuple(firsts(reply).values()) for reply in (one, other, none)}) == 3
    assert (again.choices[0].message.content, firsts(again)) == (one.choices[0].message.content, firsts(one))
    # The prompt holds one blank line more, and what the image takes.
    assert one.usage.prompt_tokens_details.image_tokens == TOKENS
    assert none.usage.prompt_tokens_details.image_tokens == 0
    assert one.usage.prompt_tokens - none.usage.prompt_tokens == TOKENS + 1
    # All of it was in the prompt cache by then, and is what it was.
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens >= again.usage.prompt_tokens - 1


async def test_one_rank_and_two_say_the_same(chat, tmp_path):
    body = asked(part(picture(3)), QUESTION, part(picture(4, (60, 200))), max_tokens=24)
    two = await chat.chat.completions.create(**body)
    with running(profile(0), tmp_path, ranks=1) as alone:
        async with openai.AsyncOpenAI(base_url=f"{alone.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            one = await client.chat.completions.create(**body)
    assert one.choices[0].message.content == two.choices[0].message.content
    assert firsts(one) == pytest.approx(firsts(two), abs=0.02)


async def test_what_is_cached_answers_as_what_is_computed(pair, chat, tmp_path):
    """A prompt that goes on behind images, the first chunk ends inside one: with the cache of the pair and without."""
    words = {"type": "text", "text": "Tell me about Japan. " * 9}
    turns = [{"role": "user", "content": [words, part(picture(5, (240, 200))), QUESTION]}]
    first = await chat.chat.completions.create(**asked(messages=turns))
    turns += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": [QUESTION, part(picture(6))]},
    ]
    hit = await chat.chat.completions.create(**asked(messages=turns))
    assert hit.usage.prompt_tokens_details.cached_tokens > 0
    with running(profile(1), tmp_path) as plain:
        async with openai.AsyncOpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            computed = await client.chat.completions.create(**asked(messages=turns))
    assert computed.usage.prompt_tokens_details.cached_tokens == 0
    assert hit.choices[0].message.content == computed.choices[0].message.content
    assert firsts(hit) == firsts(computed)


async def test_streamed_and_in_responses(chat):
    whole = await chat.chat.completions.create(**asked(part(picture(1)), QUESTION))
    text = ""
    async for chunk in await chat.chat.completions.create(**asked(part(picture(1)), QUESTION, stream=True)):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    assert text == whole.choices[0].message.content
    url = part(picture(1))["image_url"]["url"]
    content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": QUESTION["text"]}]
    reply = await chat.responses.create(
        model="any", input=[{"role": "user", "content": content}], max_output_tokens=12, temperature=0, extra_body=PLAIN
    )
    assert reply.output_text == whole.choices[0].message.content


async def test_messages_and_their_count(claude, chat):
    """Both APIs make the same prompt of the same image; a tool result may hold one."""
    body: Any = {
        "model": "claude-mini",
        "messages": [{"role": "user", "content": [block(picture(1)), QUESTION]}],
        "thinking": {"type": "disabled"},
    }
    extra = {"temperature": 0, "fidelity": "exact"}
    reply = await claude.messages.create(**body, max_tokens=12, extra_body=extra)
    whole = await chat.chat.completions.create(**asked(part(picture(1)), QUESTION))
    assert reply.content[0].text == whole.choices[0].message.content
    counted = await claude.messages.count_tokens(**body)
    usage = reply.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens == whole.usage.prompt_tokens
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block(picture(2))]}
    body["messages"] += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    seen = await claude.messages.create(**body, max_tokens=8, extra_body=extra)
    assert seen.usage.input_tokens + seen.usage.cache_read_input_tokens > usage.input_tokens + TOKENS


async def test_refusals_name_the_place(claude, chat):
    with pytest.raises(openai.BadRequestError) as refused:
        await chat.chat.completions.create(**asked(QUESTION, part(picture(1)[:-40])))
    assert refused.value.body["param"] == "messages[0].content[1]"
    with pytest.raises(openai.BadRequestError) as refused:
        await chat.chat.completions.create(
            **asked({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}})
        )
    assert "send a data URL" in refused.value.body["message"]
    with pytest.raises(openai.BadRequestError) as refused:
        await chat.chat.completions.create(**asked(*[part(picture(1))] * 4))
    assert refused.value.body["param"] == "messages[0].content[3]"
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]: the image is refused"):
        await claude.messages.create(
            model="claude-mini", max_tokens=5, messages=[{"role": "user", "content": [block(b"<svg/>")]}]
        )


async def test_the_model_says_that_it_sees(pair):
    _, listed = await get(pair.url, "/v1/models")
    assert listed["data"][0]["capabilities"]["vision"] is True


async def test_an_image_that_does_not_fit_the_context_is_refused_by_its_tokens(pair):
    """Its one placeholder would have fitted."""
    body = {"messages": [{"role": "user", "content": [QUESTION]}], "max_tokens": 1, **PLAIN}
    _, plain = await post(pair.url, body)
    body["messages"][0]["content"].append(part(picture(1)))
    body["max_tokens"] = 1024 - plain["usage"]["prompt_tokens"] - 3
    status, reply = await post(pair.url, body)
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert f"({plain['usage']['prompt_tokens'] + 1 + TOKENS} in the messages" in reply["error"]["message"]
