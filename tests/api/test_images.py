"""Images in the bodies of both APIs: where they may stand, what they take, what is refused and how it is told."""

import asyncio
import base64
import gc
import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scripted_engine import Server, said, until

from tided.api import images as module
from tided.api.images import Picture, expanded
from tided.api.ports import Limits
from tided.api.slots import SHORT_BYTES
from tided.chat.deepseek_v41 import IMAGE
from tided.engine.types import ImageSpan, Pixels
from tided.errors import ConfigError
from tided.images.geometry import Geometry
from tided.images.types import RefusedImageError
from tided.settings import Cache, Vision

GEOMETRY = Geometry(patch=14, merge=3, max_tokens=64, min_pixels=7056)
PATIENT = Limits(keepalive_s=5.0, stall_s=5.0, body_s=5.0)


def png(number: int = 0, size: tuple[int, int] = (84, 84)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (number, 90, 30)).save(file, "PNG")
    return file.getvalue()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def part(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(png(*args, **kwargs))}}


def block(*args: Any, **kwargs: Any) -> dict[str, Any]:
    data = base64.b64encode(png(*args, **kwargs)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def text(words: str = "hi") -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], **fields}


SMALL, WIDE = 2 * 3 + 2, 2 * 5 + 2  # 84 x 84: 2 x 2 tokens; 84 high, 168 wide: 2 x 4


@pytest.fixture
def eyes(serve):
    async def start(limits: Limits = PATIENT, server: dict[str, Any] | None = None, **vision: Any) -> Server:
        return await serve(limits=limits, geometry=GEOMETRY, vision=Vision(rank=0, **vision), **(server or {}))

    return start


@pytest.fixture
async def sees(eyes, engine) -> Server:
    engine.script("</think>ok")
    return await eyes()


def pixels(server: Server) -> list[int]:
    """Red of the first pixel of each image, in the order of the prompt."""
    return [one.data[0] for one in server.engine.answers[-1].pixels]


def is_consistent(server: Server, tokenizer) -> bool:
    """Spans lie where the image's token is, and nowhere else is one."""
    request, mark = server.engine.request, tokenizer.special_id(IMAGE)
    inside = [at for span in request.images for at in range(span.first, span.end)]
    return inside == [at for at, token in enumerate(request.prompt_ids) if token == mark]


async def test_an_image_takes_its_tokens(sees, tokenizer):
    _, plain = await sees.ask(user(text("a"), text("b")))
    _, reply = await sees.ask(user(text("a"), part(7), part(9, size=(168, 84)), text("b")))
    first, second = sees.engine.request.images
    assert (first.tokens, first.height, first.width) == (SMALL, 84, 84)
    assert (second.tokens, second.height, second.width) == (WIDE, 84, 168)
    assert pixels(sees) == [7, 9]
    assert [len(one.data) for one in sees.engine.answers[-1].pixels] == [84 * 84 * 3, 84 * 168 * 3]
    assert is_consistent(sees, tokenizer)
    usage = reply["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == SMALL + WIDE
    assert usage["prompt_tokens"] == len(sees.engine.request.prompt_ids)
    assert plain["usage"]["prompt_tokens_details"]["image_tokens"] == 0


async def test_the_same_pixels_have_one_digest_whatever_the_file(sees):
    bmp = io.BytesIO()
    Image.open(io.BytesIO(png(3))).save(bmp, "BMP")
    await sees.ask(user(part(3), {"type": "image_url", "image_url": url(bmp.getvalue())}, part(4)))
    one, same, other = (span.digest for span in sees.engine.request.images)
    assert one == same != other


async def test_all_ways_to_write_an_image(sees, tokenizer):
    """OpenAI's two, Responses', Anthropic's: one prompt."""
    one = part(5)["image_url"]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", user(text(), {"type": "image_url", "image_url": one})),
        ("/v1/chat/completions", user(text(), {"type": "image_url", "image_url": one["url"]})),
        ("/v1/chat/completions", user(text(), {"type": "image_url", "image_url": one | {"detail": "high"}})),
        ("/v1/responses", {"input": [{"role": "user", "content": [
            {"type": "input_text", "text": "hi"},
            {"type": "input_image", "image_url": one["url"], "detail": "auto"}]}]}),
        ("/v1/messages", user(text(), block(5), max_tokens=9)),
    ]  # fmt: skip
    seen = []
    for path, body in bodies:
        status, reply = await sees.ask(body, path=path)
        assert status == 200, reply
        assert is_consistent(sees, tokenizer)
        assert pixels(sees) == [5]
        seen.append((sees.engine.request.prompt_ids, sees.engine.request.images))
    assert all(one == seen[0] for one in seen)


async def test_images_of_tool_results_stand_in_the_order_of_the_calls(sees, tokenizer):
    """As their texts do: each keeps its own pixels."""
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ("a", "b")]
    results = [{"role": "tool", "tool_call_id": name, "content": [text(name), part(ord(name))]} for name in ("b", "a")]
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": calls}, *results]
    status, reply = await sees.ask({"messages": messages})
    assert status == 200, reply
    assert pixels(sees) == [ord("a"), ord("b")]
    assert is_consistent(sees, tokenizer)
    uses = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in ("a", "b")]
    found = [{"type": "tool_result", "tool_use_id": name, "content": [block(ord(name))]} for name in ("b", "a")]
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": uses},
                {"role": "user", "content": found}]  # fmt: skip
    status, reply = await sees.ask({"messages": messages, "max_tokens": 9}, path="/v1/messages")
    assert status == 200, reply
    assert pixels(sees) == [ord("a"), ord("b")]


async def test_text_that_spells_the_mark_is_text(sees, tokenizer):
    """In a message of a user, a tool result and in reasoning, beside an image and alone."""
    messages = [
        {"role": "user", "content": f"say {IMAGE}"},
        {"role": "assistant", "reasoning_content": IMAGE, "content": IMAGE,
         "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": f'{{"x": "{IMAGE}"}}'}}]},
        {"role": "tool", "tool_call_id": "a", "content": [text(IMAGE), part(8), text(IMAGE)]},
    ]  # fmt: skip
    for given, images in ((messages, 1), (messages[:1], 0)):
        status, reply = await sees.ask({"messages": given})
        assert status == 200, reply
        assert len(sees.engine.request.images) == images
        assert is_consistent(sees, tokenizer)


async def test_several_answers_share_the_pixels(sees):
    await sees.ask(user(part(6), n=3))
    one, two, three = sees.engine.answers[-3:]
    assert one.pixels[0] is two.pixels[0] is three.pixels[0]
    assert one.request.images == two.request.images == three.request.images


async def test_a_count_is_what_the_answer_counts(sees):
    body = user(text("a"), block(1), block(2, size=(168, 84)))
    _, counted = await sees.ask(body, path="/v1/messages/count_tokens")
    _, reply = await sees.ask(body | {"max_tokens": 5}, path="/v1/messages")
    assert counted["input_tokens"] == reply["usage"]["input_tokens"] == len(sees.engine.request.prompt_ids)
    assert counted["input_tokens"] > SMALL + WIDE


async def test_the_card_says_what_the_model_sees(sees, serve):
    for server, vision in ((sees, True), (await serve(), False)):
        async with server.session.get("/v1/models") as reply:
            assert (await reply.json())["data"][0]["capabilities"]["vision"] is vision


# What is refused

BROKEN = {
    "damaged": (url(png()[:60]), "damaged or incomplete"),
    "no image": (url(b"%PDF-1.7 hello"), "not an image of a supported format"),
    "an svg": ("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(), "supported format"),
    "no base64": ("data:image/png;base64,%%%", "its base64 is not valid"),
    "not base64 at all": ("data:image/png,abc", "expected a data URL of base64"),
    "http": ("http://127.0.0.1:1/a.png", "only https URLs are fetched"),
    "https": ("https://example.com/a.png", "send a data URL"),
    "a file": ("file:///etc/passwd", "only https URLs are fetched"),
    "metadata": ("https://169.254.169.254/latest/meta-data", "send a data URL"),
    "nothing like a URL": ("hello", "only https URLs are fetched"),
}


@pytest.mark.parametrize(("address", "words"), BROKEN.values(), ids=BROKEN)
async def test_what_is_wrong_is_told_with_its_place(sees, address, words):
    image = {"type": "image_url", "image_url": {"url": address}}
    error = await sees.refused(
        {"messages": [{"role": "user", "content": "a"}, *user(text(), part(), image)["messages"]]}
    )
    assert error["param"] == "messages[1].content[2]"
    assert error["message"].startswith("messages[1].content[2]: the image is refused: ")
    assert words in error["message"]
    assert len(address) < 30 or address[24:] not in error["message"]  # nothing of what was sent
    body = {"input": [{"role": "user", "content": "a"},
                      {"role": "user", "content": [{"type": "input_image", "image_url": address}]}]}  # fmt: skip
    error = await sees.refused(body, path="/v1/responses")
    assert error["param"] == "input[1].content[0]"
    source = {"type": "url", "url": address}
    body = user(
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}, max_tokens=5
    )
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        status, reply = await sees.ask(body, path=path)
        assert status == 400
        assert reply["error"]["message"].startswith("messages[0].content[0].content[0]: the image is refused: ")


@pytest.mark.parametrize(
    "image",
    [{"type": "image_url"}, {"type": "image_url", "image_url": {}}, {"type": "image_url", "image_url": {"url": 5}},
     {"type": "image_url", "image_url": 7}, {"type": "image_url", "image_url": {"url": ""}}],
    ids=str,
)  # fmt: skip
async def test_a_part_without_a_url(sees, image):
    error = await sees.refused(user(image))
    assert error["param"].startswith("messages[0].content[0].image_url")


async def test_limits_of_number_bytes_and_pixels(eyes):
    server = await eyes(max_images=2, max_image_bytes=2000, max_pixels=10_000)
    error = await server.refused(user(part(), part(), part(), part()))
    assert (error["param"], "at most 2 are allowed" in error["message"]) == ("messages[0].content[2]", True)
    error = await server.refused(user(part(size=(101, 100))))
    assert error["message"].endswith("101 x 100 pixels; an image may have 10000")
    noise = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(noise, "PNG")
    error = await server.refused(user({"type": "image_url", "image_url": url(noise.getvalue())}))
    assert error["message"].endswith("larger than 2000 bytes")


async def test_system_messages_hold_no_image(sees):
    for role in ("system", "developer"):
        messages = [{"role": role, "content": [text(), part()]}, {"role": "user", "content": "a"}]
        error = await sees.refused({"messages": messages})
        assert error["param"] == "messages[0].content[1]"
    body = {"system": [text(), block()], "max_tokens": 5, **said("a")}
    _, reply = await sees.ask(body, path="/v1/messages")
    assert reply["error"]["message"].startswith("system[1]: an image may stand in")


async def test_where_the_model_sees_nothing_the_first_image_is_named(serve):
    server = await serve()
    error = await server.refused(user(text(), part()))
    assert (error["param"], error["code"]) == ("messages[0].content[1]", "image_input_not_supported")
    body = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url(png())}]}]}
    error = await server.refused(body, path="/v1/responses")
    assert (error["param"], error["code"]) == ("input[0].content[0]", "image_input_not_supported")
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        status, reply = await server.ask(user(text(), block(), max_tokens=5), path=path)
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
        assert "messages[0].content[1]: images are not supported" in reply["error"]["message"]


async def test_an_image_counts_before_the_context_is_full(eyes, engine, ids):
    server = await eyes(server={"cache": Cache(context_tokens=256, pool_tokens=256)})
    _, plain = await server.ask(user(text(), max_tokens=1), path="/v1/messages/count_tokens")
    room = 256 - plain["input_tokens"]
    error = await server.refused(user(text(), part(), max_tokens=room - SMALL))
    assert error["code"] == "context_length_exceeded"
    wide = [block(size=(168, 168))] * 16
    status, reply = await server.ask(user(text(), *wide, max_tokens=5), path="/v1/messages")
    assert (status, "prompt is too long" in reply["error"]["message"]) == (400, True)
    for long in (
        user(text(), *wide),
        user({"type": "text", "text": "tide " * 900}, *wide),
    ):
        _, counted = await server.ask(long, path="/v1/messages/count_tokens")
        _, reply = await server.ask(long | {"max_tokens": 5}, path="/v1/messages")
        assert reply["error"]["message"] == f"prompt is too long: {counted['input_tokens']} tokens > 256 maximum"
    engine.script("</think>ok")
    status, _ = await server.ask(user(text(), block(), max_tokens=600), path="/v1/messages")  # lowered to the room
    assert status == 200
    assert engine.request.max_tokens == 256 - len(engine.request.prompt_ids)


# By URL, with a fetcher that never leaves the process


class Fetched:
    def __init__(self, answers: dict[str, bytes | str]) -> None:
        self.answers, self.asked, self.together, self.most = answers, [], 0, 0

    async def fetch(self, address: str) -> bytes:
        self.asked.append(address)
        self.together += 1
        self.most = max(self.most, self.together)
        await asyncio.sleep(0)
        self.together -= 1
        found = self.answers[address.partition("#")[0]]
        if isinstance(found, str):
            raise RefusedImageError(found)
        return found


async def test_images_of_allowed_hosts(sees, tokenizer):
    fetcher = sees.context.images._fetcher = Fetched({"https://a/1": png(11), "https://a/2": "gone"})
    image = {"type": "image_url", "image_url": {"url": "https://a/1"}}
    status, reply = await sees.ask(user(part(10), image))
    assert status == 200, reply
    assert pixels(sees) == [10, 11]
    assert is_consistent(sees, tokenizer)
    source = {"type": "url", "url": "https://a/1"}
    status, _ = await sees.ask(user({"type": "image", "source": source}, max_tokens=5), path="/v1/messages")
    assert (status, pixels(sees)) == (200, [11])
    error = await sees.refused(user(text(), {"type": "image_url", "image_url": {"url": "https://a/2"}}))
    assert (error["param"], error["message"].endswith(": gone")) == ("messages[0].content[1]", True)
    many = [{"type": "image_url", "image_url": {"url": f"https://a/1#{at}"}} for at in range(12)]
    await sees.ask(user(*many))
    assert len(fetcher.asked) == 3 + 12
    assert fetcher.most <= module.MOST_FETCHES


# Under load


RESPONSES = {"input": [{"role": "user", "content": [
    {"type": "input_image", "image_url": url(png(size=size))} for size in ((84, 84), (168, 84))]}]}  # fmt: skip
BODIES = {
    "/v1/chat/completions": user(part(), part(size=(168, 84))),
    "/v1/messages": user(block(), block(size=(168, 84)), max_tokens=5),
    "/v1/responses": RESPONSES,
}


@pytest.mark.parametrize(("path", "body"), BODIES.items(), ids=BODIES)
async def test_what_nobody_needs_any_more_is_not_counted(sees, engine, path, body):
    engine.play = None
    asking = asyncio.create_task(sees.ask(body, path=path))
    await until(lambda: len(engine.answers) == 1)
    images = sees.context.images
    assert images._held_bytes == 84 * 84 * 3 + 84 * 168 * 3
    engine.answers[0].pixels = ()  # the prompt is computed
    gc.collect()
    assert images._held_bytes == 0
    engine.answers[0].start().say("</think>x").finish()
    await asking


LARGEST = 64 * 3 * 42 * 42


class Stuck:
    """Images that are being decoded until they are let go."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_go, self._plain = 0, asyncio.Event(), server.context.images._decoded
        monkeypatch.setattr(server.context.images, "_decoded", self.decoded)

    async def decoded(self, address: str) -> Any:
        self.begun += 1
        await self.let_go.wait()
        return await self._plain(address)


async def test_too_many_images_at_once_are_refused_and_later_ones_are_not(eyes, engine, monkeypatch):
    """Those that are being decoded count as the largest there are."""
    monkeypatch.setattr(module, "MOST_HELD_BYTES", 2 * LARGEST)
    engine.script("</think>ok")
    server = await eyes(max_images=2)
    images, stuck = server.context.images, Stuck(server, monkeypatch)
    asking = asyncio.create_task(server.ask(user(part(), part())))
    await until(lambda: stuck.begun == 2)
    for _ in range(2):  # the one that is refused takes nothing
        async with server.post(user(part())) as reply:
            assert reply.status == 429
            assert int(reply.headers["Retry-After"]) >= 1
            assert "too many images" in (await reply.json())["error"]["message"]
    asking.cancel()
    await until(lambda: images._held_bytes == 0)
    stuck.let_go.set()
    status, _ = await server.ask(user(part(), part()))
    assert status == 200
    assert images._held_bytes == 2 * 84 * 84 * 3  # what they really take: the engine has them
    engine.answers[-1].pixels = ()
    gc.collect()
    assert images._held_bytes == 0
    await server.refused(user(part(), {"type": "image_url", "image_url": url(b"none")}))
    gc.collect()
    await until(lambda: images._held_bytes == 0)


async def test_more_images_than_ever_have_room_are_refused_at_the_start(eyes, monkeypatch):
    monkeypatch.setattr(module, "MOST_HELD_BYTES", 3 * LARGEST - 1)
    await eyes(max_images=2)
    with pytest.raises(ConfigError, match="3 images") as refused:
        await eyes(max_images=3)
    assert (refused.value.where, refused.value.hint) == ("vision.max_images", "At most 2.")


@pytest.mark.parametrize("path", ["/tokenize", "/v1/debug/prompt", "/v1/messages/count_tokens"])
async def test_who_waits_for_its_images_is_at_a_desk(sees, monkeypatch, path):
    """With its body, whose data URLs are what waits."""
    stuck, admission = Stuck(sees, monkeypatch), sees.context.admission
    body = json.dumps(user(block() if "messages" in path else part(), max_tokens=5) | {"ignored": "x" * SHORT_BYTES})
    asking = [asyncio.create_task(sees.ask(body, path=path)) for _ in range(3)]
    await until(lambda: stuck.begun == 3)
    assert (admission.at_desks, admission.held_bytes) == (3, 3 * len(body))
    stuck.let_go.set()
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 3
    assert (admission.at_desks, admission.held_bytes) == (0, 0)


async def test_an_image_that_waits_too_long_is_told(eyes, monkeypatch):
    server = await eyes(limits=Limits(keepalive_s=5.0, stall_s=5.0, body_s=5.0, prepare_s=0.2))

    async def never(address: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(server.context.images, "_decoded", never)
    error = await server.refused(user(part()), status=503)
    assert "images" in error["message"]


async def test_where_one_is_refused_nobody_goes_on_with_the_others(sees, monkeypatch):
    given_up = asyncio.Event()

    async def decoded(address: str) -> None:
        if address == url(png(1)):
            raise RefusedImageError("no")
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    monkeypatch.setattr(sees.context.images, "_decoded", decoded)
    error = await sees.refused(user(part(0), part(1)))
    assert error["param"] == "messages[0].content[1]"
    await asyncio.wait_for(given_up.wait(), 10)


async def test_decoding_delays_nobody_else(sees, monkeypatch, engine):
    """While an image is at work, and when its client goes, others are answered."""
    begun, gone = asyncio.Event(), asyncio.Event()

    async def never(address: str) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    monkeypatch.setattr(sees.context.images, "_decoded", never)
    asking = asyncio.create_task(sees.ask(user(part())))
    await asyncio.wait_for(begun.wait(), 10)
    for _ in range(4):
        status, _ = await sees.ask(said("hi"))
        assert status == 200
    asking.cancel()
    await asyncio.wait_for(gone.wait(), 10)
    assert len(engine.answers) == 4


def test_ids_are_made_longer_where_their_images_are():
    pictures = [Picture(ImageSpan(0, tokens, 84, 84, b""), Pixels(b"")) for tokens in (3, 1)]
    ids, spans = expanded([1, 9, 2, 2, 9], 9, pictures)
    assert ids == [1, 9, 9, 9, 2, 2, 9]
    assert [(span.first, span.end) for span in spans] == [(1, 4), (6, 7)]
    assert expanded([1, 2], 9, []) == ([1, 2], ())
