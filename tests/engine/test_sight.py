"""Prompts with images on a real model: ranks, chunks, the prompt cache and parked lanes do not change an answer, and
other pixels do."""

import hashlib

import numpy as np
import pytest
import torch
from engine_fakes import Bench, request
from msgspec.structs import replace
from real_pair import Living, Served
from test_caches import LONG, RAM, ask, cached, model

from tided.engine.build import OpenedModel, open_model
from tided.engine.scheduler import Scheduler
from tided.engine.sight import Sight
from tided.engine.types import Failed, ImageSpan, Pixels, Request
from tided.errors import PairError, RequestError
from tided.models.deepseek_v41.vision import Vision
from tided.settings import Vision as VisionSettings

IMAGE_ID, HEIGHT, WIDTH, TOKENS = 511, 84, 98, 10


def pixels(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, HEIGHT * WIDTH * 3, dtype=np.uint8).tobytes()


SEEN = {hashlib.blake2b(pixels(seed), digest_size=16).digest(): pixels(seed) for seed in range(4)}
DIGESTS = list(SEEN)


def seeing(*args, rank: int = 0, **kwargs) -> OpenedModel:
    return open_model(replace(model(*args, **kwargs).settings, vision=VisionSettings(rank=rank)))


def looking(name: str, prompt: list[int], *images: tuple[int, int], answer: int = 8, **sampling) -> Request:
    """`images`: (place in the prompt, which)."""
    ids, spans = list(prompt), []
    for first, number in images:
        ids[first : first + TOKENS] = [IMAGE_ID] * TOKENS
        spans.append(ImageSpan(first, TOKENS, HEIGHT, WIDTH, DIGESTS[number]))
    return replace(ask(name, ids, answer, **sampling), images=tuple(spans))


def with_pixels(living: Living) -> None:
    submit = living.engine.submit
    living.engine.submit = lambda one: submit(one, None, [Pixels(SEEN[image.digest]) for image in one.images])


def serve(opened: OpenedModel, requests: list[Request], **kwargs) -> Served:
    served = Served(opened, requests, prepare=with_pixels, **kwargs)
    assert served.faults == []
    sight = served.ranks[0].executor.sight
    assert (sight.kept, sight.cut) == (0, set())
    return served


PROMPT = LONG[:100]
TWO_IMAGES = looking("two", PROMPT, (10, 0), (60, 1))  # chunks of 16 cut both


@pytest.fixture(scope="module")
def alone() -> Served:
    return serve(seeing(), [TWO_IMAGES])


def test_an_answer_is_of_its_images(alone):
    others = serve(
        seeing(), [looking("first", PROMPT, (10, 2), (60, 1)), looking("last", PROMPT, (10, 0), (60, 2)), TWO_IMAGES]
    )
    assert others.tokens("two") == alone.tokens("two")
    assert len({tuple(others.tokens(name)) for name in ("first", "last", "two")}) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_draw_what_one_draws(alone, rank):
    assert serve(seeing(2, rank=rank), [TWO_IMAGES]).tokens("two") == alone.tokens("two")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("replay", ["full", "bounded"])
def test_a_prefix_that_is_hit_is_as_good_as_computed(ranks, replay):
    """Restored behind both images, between them, and inside the second one."""
    ids = TWO_IMAGES.prompt_ids
    requests = [
        TWO_IMAGES,
        replace(TWO_IMAGES, request_id="again"),
        looking("tail", [*ids[:-4], 5, 9, 11, 4], (10, 0), (60, 1)),
        looking("cut", [*ids[:70], 5, 9, 11, 4], (10, 0), (60, 1)),
        looking("between", [*ids[:40], 5, 9, 11, 4, *ids[44:]], (10, 0), (60, 1)),
    ]
    plain = serve(seeing(ranks, replay=replay), requests)
    hit = serve(seeing(ranks, replay=replay, prefix_ram_bytes=RAM), requests)
    for one in requests:
        assert hit.tokens(one.request_id) == plain.tokens(one.request_id), one.request_id
    assert [cached(hit, one.request_id) for one in requests] == [0, 100, 96, 64, 32]


def test_the_same_tokens_with_other_pixels_share_nothing():
    requests = [TWO_IMAGES, looking("other", PROMPT, (10, 0), (60, 2)), looking("none", PROMPT, (10, 3), (60, 1))]
    hit = serve(seeing(prefix_ram_bytes=RAM), requests)
    assert [cached(hit, name) for name in ("two", "other", "none")] == [0, 48, 0]
    plain = serve(seeing(), requests[1:2])
    assert hit.tokens("other") == plain.tokens("other")


def test_what_is_restored_behind_an_image_never_looks_at_it(monkeypatch):
    looked, see = [], Vision.see
    monkeypatch.setattr(Vision, "see", lambda self, size, data: looked.append(size) or see(self, size, data))
    serve(seeing(prefix_ram_bytes=RAM), [TWO_IMAGES, looking("tail", [*PROMPT[:-4], 5, 9, 11, 4], (10, 0), (60, 1))])
    assert looked == [(HEIGHT, WIDTH)] * 2


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunks", [1, 4])
def test_a_lane_that_is_parked_inside_an_image_goes_on(alone, monkeypatch, chunks, ranks, tmp_path):
    """Its last chunk has cut an image: what is left of its rows comes back with it."""
    make_room = Scheduler._make_room

    def park_once(self):
        (running,) = self.running.values() or (None,)
        if running is None or running.computed != 16 * chunks or running.request.request_id in parked:
            return make_room(self)
        parked.append(running.request.request_id)
        running.pages, running.parked = 0, True
        return [running.lane]

    parked: list[str] = []
    monkeypatch.setattr(Scheduler, "_make_room", park_once)
    served = serve(seeing(ranks), [TWO_IMAGES], cache_dir=tmp_path)
    assert served.stats("two")["parked"] == 1
    assert served.tokens("two") == alone.tokens("two")


class Rows:
    """A model that sees rows with their own numbers, and counts how often."""

    def __init__(self) -> None:
        self.seen = 0

    def see(self, height: int, width: int, data: bytes) -> torch.Tensor:
        self.seen += 1
        return torch.arange(TOKENS, dtype=torch.float32).unsqueeze(1) + 100 * data[0]


@pytest.mark.parametrize("chunk", [1, 3, 16, 64, 100])
def test_each_token_gets_its_own_row_however_chunks_cut(chunk):
    rows = Rows()
    sight, found = Sight(rows), {}
    sight.keep("two", [Pixels(b"\1"), Pixels(b"\2")])
    for start in range(0, 100, chunk):
        pictured = sight.of_chunk(0, TWO_IMAGES, start, min(100, start + chunk))
        if pictured is not None:
            found |= dict(zip((pictured.places + start).tolist(), pictured.rows.flatten().tolist(), strict=True))
    assert found == {10 + at: 100 + at for at in range(TOKENS)} | {60 + at: 200 + at for at in range(TOKENS)}
    assert (rows.seen, sight.cut) == (2, set())


def test_a_request_that_is_cancelled_between_chunks_leaves_nothing():
    living = Living(seeing(), prepare=with_pixels)
    living.submit(TWO_IMAGES, looking("waits", PROMPT, (10, 2)))
    living.turn()
    assert living.ranks[0].executor.sight.cut == {0}
    living.cancel("two")
    living.cancel("waits")
    living.rest()
    living.check()
    sight = living.ranks[0].executor.sight
    assert (sight.kept, sight.cut) == (0, set())
    living.close()
    assert [type(living.end(name)).__name__ for name in ("two", "waits")] == ["Finished", "Finished"]


def test_a_rank_without_the_pixels_ends_the_pair():
    """Rank 0 has lost them: nobody goes on with zeros."""
    living = Living(seeing(), prepare=with_pixels)
    living.submit(TWO_IMAGES)
    living.ranks[0].executor.sight.drop("two")
    with pytest.raises(PairError, match="pixels"):
        living.turn()
    assert not isinstance(living.end("two"), Failed)


SPAN = TWO_IMAGES.images[0]
WRONG = {
    "outside the prompt": [replace(SPAN, first=95)],
    "of other tokens": [replace(SPAN, tokens=9)],
    "of half a patch": [replace(SPAN, width=97)],
    "one over another": [SPAN, replace(SPAN, first=19)],
    "before the start": [replace(SPAN, first=-1)],
}


@pytest.mark.parametrize("spans", WRONG.values(), ids=WRONG)
def test_images_that_fit_nowhere_are_refused(spans):
    living = Living(seeing())
    data = [Pixels(bytes(one.height * one.width * 3)) for one in spans]
    with pytest.raises(RequestError, match="image"):
        living.engine.submit(replace(TWO_IMAGES, images=tuple(spans)), None, data)
    living.close()


def test_pixels_are_those_of_the_images():
    living = Living(seeing())
    for data in ([], [Pixels(pixels(0))], [Pixels(pixels(0)), Pixels(pixels(1)[:-1])]):
        with pytest.raises(RequestError, match="pixels"):
            living.engine.submit(TWO_IMAGES, None, data)
    living.close()


def test_a_model_without_eyes_refuses_images():
    bench = Bench()
    with pytest.raises(RequestError, match="image"):
        bench.engine.submit(
            replace(request("a", prompt=20), images=(replace(SPAN, first=0),)), None, [Pixels(pixels(0))]
        )
