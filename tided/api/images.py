"""Images of requests: fetched where that is allowed, decoded in worker processes, put into the prompt.

A prompt is rendered and tokenised with one token for each image. What an image really takes is known when it has been
looked at; then the ids are made longer, and the length is judged again, before any reply.
"""

import asyncio
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from msgspec.structs import replace

from tided.api.prepare import Prepared, fitting_max_tokens
from tided.api.served import ServedModel
from tided.chat.fields import refuse
from tided.chat.messages import Image
from tided.engine.types import ImageSpan, Pixels
from tided.errors import ConfigError, RequestError
from tided.images.fetch import Fetcher
from tided.images.geometry import Geometry
from tided.images.source import from_data_url, is_data_url
from tided.images.types import Decoded, Limits, RefusedImageError
from tided.images.workers import Workers

# What decoded images may take that wait for their turn in the engine, of all requests together. One that is still to be
# decoded counts as the largest that there is.
MOST_HELD_BYTES = 1 << 30
MOST_FETCHES = 4  # of all requests together: each holds a file until it is decoded


class Picture(NamedTuple):
    """An image as the model sees it, anywhere in a prompt."""

    span: ImageSpan
    pixels: Pixels


class Images:
    """The desk of one server. `geometry` None: no image comes this far. `wait_s`: for all images of a request.

    Raises ConfigError where one request's images could never have room."""

    def __init__(
        self, served: ServedModel, geometry: Geometry | None, wait_s: float, fetcher: Fetcher | None = None
    ) -> None:
        vision = served.settings.vision
        self._largest_bytes = geometry.max_tokens * 3 * geometry.cell**2 if geometry else 0
        if vision.max_images * self._largest_bytes > MOST_HELD_BYTES:
            raise ConfigError(
                f"{vision.max_images} images of {self._largest_bytes} bytes have no room in {MOST_HELD_BYTES}",
                where="vision.max_images",
                hint=f"At most {MOST_HELD_BYTES // self._largest_bytes}.",
            )
        self._served, self._geometry, self._vision = served, geometry, vision
        self._fetcher = fetcher or Fetcher(vision.url_hosts, vision.max_image_bytes, vision.url_timeout_s)
        self._workers = Workers(geometry, Limits(vision.max_pixels), vision.decode_timeout_s) if geometry else None
        self._fetches = asyncio.Semaphore(MOST_FETCHES)
        self._wait_s = wait_s
        self._held_bytes, self._lock = 0, threading.RLock()  # pixels may be collected while it is held

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()

    async def seen(self, prepared: Prepared) -> Prepared:
        """With its images in the prompt. Raises RequestError."""
        if not prepared.images:
            return prepared
        pictures = await self._look(prepared.images)
        ids, spans = expanded(prepared.request.prompt_ids, self._mark, pictures)
        max_tokens = fitting_max_tokens(prepared.chat, len(ids), self._served, lowers=prepared.lowers)
        request = replace(prepared.request, prompt_ids=ids, images=spans, max_tokens=max_tokens)
        return replace(prepared, request=request, images=(), pixels=tuple(picture.pixels for picture in pictures))

    async def tokens(self, images: Sequence[Image]) -> int:
        """What they take in a prompt. Raises RequestError."""
        return sum(picture.span.tokens for picture in await self._look(images)) if images else 0

    @property
    def _mark(self) -> int:
        return self._served.tokenizer.special_id(self._served.family.image)

    async def _look(self, images: Sequence[Image]) -> list[Picture]:
        most = self._vision.max_images
        if len(images) > most:
            refuse(images[most].param, f"{len(images)} images, at most {most} are allowed")
        self._reserve(len(images))
        tasks = [asyncio.create_task(self._picture(image)) for image in images]
        for task in tasks:  # also for one that is cancelled before it has begun
            task.add_done_callback(lambda _: self._add(-self._largest_bytes))
        try:
            async with asyncio.timeout(self._wait_s):
                return list(await asyncio.gather(*tasks))
        except TimeoutError:
            raise RequestError(
                "Too many images are being decoded; try again in a moment", status=503, kind="server_error"
            ) from None
        finally:
            for task in tasks:  # one was refused, or the client has gone: nobody waits for the others
                task.cancel()

    async def _picture(self, image: Image) -> Picture:
        assert self._geometry is not None
        try:
            size, pixels, digest = await self._decoded(image.url)
        except RefusedImageError as error:
            _refuse_image(image, error)
        span = ImageSpan(0, self._geometry.tokens(size), size.height, size.width, digest)
        return Picture(span, self._hold(pixels))

    async def _decoded(self, url: str) -> Decoded:
        assert self._workers is not None
        if is_data_url(url):
            most_bytes = self._vision.max_image_bytes
            return await asyncio.wrap_future(self._workers.decode(lambda: from_data_url(url, most_bytes)))
        async with self._fetches:
            data = await self._fetcher.fetch(url)
            return await asyncio.wrap_future(self._workers.decode(lambda: data))

    def _reserve(self, images: int) -> None:
        """Room for the largest there are, before any of them is decoded: others come meanwhile."""
        most = images * self._largest_bytes
        with self._lock:
            fits = self._held_bytes + most <= MOST_HELD_BYTES
            self._held_bytes += most if fits else 0
        if not fits:
            raise RequestError(
                "too many images are waiting; try again in a moment",
                status=429,
                kind="rate_limit_error",
                code="queue_full",
            )

    def _hold(self, data: bytes) -> Pixels:
        """Counted until nobody needs them, whoever is the last: the engine, or a client that has gone."""
        pixels = Pixels(data)
        self._add(len(data))
        weakref.finalize(pixels, self._add, -len(data)).atexit = False
        return pixels

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self._held_bytes += nbytes


def _refuse_image(image: Image, error: RefusedImageError) -> NoReturn:
    raise RequestError(f"{image.param}: the image is refused: {error}", param=image.param) from None


def expanded(ids: Sequence[int], mark: int, pictures: Sequence[Picture]) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """`ids` hold one `mark` for each picture, in order: text never becomes one."""
    longer: list[int] = []
    spans, begin = [], 0
    for picture in pictures:
        at = ids.index(mark, begin)
        longer += ids[begin:at]
        spans.append(replace(picture.span, first=len(longer)))
        longer += [mark] * picture.span.tokens
        begin = at + 1
    longer += ids[begin:]
    return longer, tuple(spans)
