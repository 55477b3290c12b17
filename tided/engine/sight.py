"""Images of prompts under way: their pixels, which rank 0 alone has, and the rows that they become on every rank.

An image is seen in the step whose chunk first holds a token of it, by all ranks together: sizes come with the request,
so each of them knows what the collectives bring before any begins. Where a chunk ends inside an image, its rows are
kept for the next one. Of a prompt that a snapshot restores, only images that end behind it are seen.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tided.engine.types import ImageSpan, Pixels, Request
from tided.models.base import Model, Pictured


class Sight:
    def __init__(self, model: Model) -> None:
        self._model = model
        self._pixels: dict[str, Sequence[Pixels]] = {}  # by request; rank 0
        self._rows: dict[tuple[int, int], Tensor] = {}  # by lane and image: of those that a chunk has cut

    @property
    def kept(self) -> int:
        """Requests whose pixels are here."""
        return len(self._pixels)

    @property
    def cut(self) -> set[int]:
        """Lanes whose last chunk ended inside an image."""
        return {lane for lane, _ in self._rows}

    def keep(self, request_id: str, pixels: Sequence[Pixels]) -> None:
        """On rank 0, of a request with images, one for each."""
        self._pixels[request_id] = pixels

    def drop(self, request_id: str) -> None:
        """Its prompt is complete, or it is over."""
        self._pixels.pop(request_id, None)

    def forget(self, lane: int) -> None:
        """The lane is released."""
        for key in [key for key in self._rows if key[0] == lane]:
            del self._rows[key]

    def of_chunk(self, lane: int, request: Request, start: int, end: int) -> Pictured | None:
        """What stands in prompt tokens [start, end); None: no image. A collective of all ranks for each new image."""
        places, rows = [], []
        for number, image in enumerate(request.images):
            first, last = max(start, image.first), min(end, image.end)
            if first < last:
                seen = self._seen(lane, request, number)
                places.append(torch.arange(first - start, last - start, device=seen.device))
                rows.append(seen[first - image.first : last - image.first])
                if last < image.end:
                    self._rows[lane, number] = seen
        return Pictured(torch.cat(places), torch.cat(rows)) if places else None

    def _seen(self, lane: int, request: Request, number: int) -> Tensor:
        cut = self._rows.pop((lane, number), None)
        if cut is not None:
            return cut
        held = self._pixels.get(request.request_id)
        image: ImageSpan = request.images[number]
        return self._model.see(image.height, image.width, held[number].data if held else None)
