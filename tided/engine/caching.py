"""What a step says about contexts that leave the pool and come back, done on this rank: parked lanes, snapshots of the
prompt cache, and what is read back for either. Called by the executor between steps; the files are `tided.cache`'s."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from tided.cache.background import Background, Run, at_once, private_folder
from tided.cache.bundle import Parts
from tided.cache.chain import Chain, Image, chain
from tided.cache.park import ParkedLanes
from tided.cache.prefix import PrefixCache, Snapshot
from tided.control.messages import Recall, Restore
from tided.engine.recall import Candidate
from tided.engine.types import Request
from tided.errors import PairError
from tided.models.base import LaneState, Model

log = logging.getLogger("cache")

PAGE = "page."  # the unfinished pages of a snapshot, among its own parts
LOGITS = "logits"  # of the last token, where a prompt is snapshot whole
PARKED = "pool."  # all pages of a parked context


class Answer(NamedTuple):
    """What this rank says to a `Recall` (`messages.Recalled`)."""

    ticket: int
    held: list[int]
    loaded: int


@dataclass(frozen=True)
class CachePlan:
    """`seed` names what a context depends on beside its tokens; `folder` None: nothing is written to disk. `strict`: a
    snapshot serves only under the routable set that it was computed under."""

    seed: str = ""
    chunk_tokens: int = 1
    ram_bytes: int = 0
    disk_bytes: int = 0
    folder: Path | None = None
    strict: bool = False

    @property
    def snapshots(self) -> bool:
        return self.ram_bytes > 0 or (self.disk_bytes > 0 and self.folder is not None)


class Caching:
    """Raises OSError when a folder cannot be used."""

    def __init__(self, model: Model, plan: CachePlan = CachePlan(), run: Run = at_once) -> None:
        """`run`: how pieces of the files come to their turn on the disk."""
        self.plan, self._model = plan, model
        self.background = Background(run)
        folder = plan.folder
        if folder is not None:
            private_folder(folder.parent)
            private_folder(folder)
        self.parked = ParkedLanes(folder / "parked" if folder else None, self.background)
        self.prefixes = PrefixCache(
            plan.ram_bytes, plan.disk_bytes, folder / "prefix" if folder else None, self.background
        )
        self._lock = threading.Lock()  # of the two that the reader's thread shares: what is found is always asked for
        self._asked: set[int] = set()
        self._found: dict[int, tuple[Answer, Snapshot | None]] = {}  # read, and not told yet
        self._read: dict[int, Snapshot] = {}

    # Reading back

    @property
    def recalling(self) -> int:
        """Recalls that this rank has not answered."""
        return len(self._asked)

    def recall(self, recall: Recall) -> None:
        with self._lock:
            self._asked.add(recall.ticket)
        self.background.read(lambda: self._find(recall))

    def _find(self, recall: Recall) -> None:
        """On the reader's thread. What nobody asks for any more is not read; nor is it kept, where it was."""
        with self._lock:
            if recall.ticket not in self._asked:
                return
        found = self._answer(recall)
        with self._lock:
            if recall.ticket in self._asked:
                self._found[recall.ticket] = found

    def _answer(self, recall: Recall) -> tuple[Answer, Snapshot | None]:
        """Whatever goes wrong is an answer too: others wait for it."""
        try:
            if recall.lane >= 0:
                there = self.parked.load(recall.lane)
                return Answer(recall.ticket, [0] * there, 0 if there else -1), None
            held, loaded, snapshot = self.prefixes.read(recall.keys)
        except Exception:
            log.exception("what was asked for cannot be read back")
            return Answer(recall.ticket, [], -1), None
        return Answer(recall.ticket, held, loaded), snapshot

    def answers(self) -> list[Answer]:
        """Those since the last call."""
        with self._lock:
            found, self._found = self._found, {}
            self._asked -= found.keys()
        self._read |= {ticket: snapshot for ticket, (_, snapshot) in found.items() if snapshot is not None}
        return [answer for answer, _ in found.values()]

    def forget(self, ticket: int) -> None:
        with self._lock:
            self._asked.discard(ticket)
            self._found.pop(ticket, None)
        self._read.pop(ticket, None)

    # Snapshots

    def chain(self, request: Request, mask: int) -> Chain:
        """The keys of a prompt. `exact` answers never begin with what was substituted for another request."""
        seed = f"{self.plan.seed} {request.fidelity}" + (f" {mask:016x}" if self.plan.strict else "")
        seed += f" salt {request.cache_salt}" if request.cache_salt else ""
        images = [Image(image.first, image.digest) for image in request.images]
        return chain(seed, request.prompt_ids, self.plan.chunk_tokens, images)

    def candidates(self, request: Request, mask: int) -> Sequence[Candidate]:
        """What this rank holds of a prompt, the longest first."""
        if not self.plan.snapshots or request.scored:
            return ()
        keys = self.chain(request, mask)
        ends = [Candidate((i + 1) * keys.chunk_tokens, key) for i, key in enumerate(keys.chunks)]
        inner = [end for end in ends if end.tokens < keys.tokens]
        return [c for c in (Candidate(keys.tokens, keys.whole), *reversed(inner)) if self.prefixes.holds(c.key)]

    def source(self, restore: Restore | None) -> str:
        """Where this rank found what a lane is about to begin with."""
        snapshot = self._read.get(restore.ticket) if restore else None
        return snapshot.source if snapshot else "none"

    def restore(self, index: int, restore: Restore) -> tuple[LaneState, Tensor | None]:
        """The lane, and the logits of its last token where the prompt is whole. Raises PairError for a snapshot that
        rank 0 counts on and this rank has not."""
        snapshot = self._read.pop(restore.ticket, None)
        if snapshot is None or snapshot.tokens != restore.tokens:
            raise PairError(f"the snapshot of {restore.tokens} tokens is not here, which all ranks had read")
        firsts = self._firsts(len(snapshot.pages))
        pages = list(zip(firsts, snapshot.pages, strict=True))
        own, state = _split(snapshot.state, PAGE)
        if own:
            pages.append((self._first(len(snapshot.pages)), own))
        logits = state.pop(LOGITS, None)
        return self._model.restore_lane(index, restore.tokens, state, pages), logits

    def save(self, lane: LaneState, keys: Chain, logits: Tensor | None) -> None:
        """The lane stands at the end of a chunk, or of the prompt (then with its logits)."""
        tokens, chunk = lane.position, keys.chunk_tokens
        done = tokens // chunk
        firsts, last = self._firsts(done), -(-tokens // self._model.page_tokens)

        def pages(number: int) -> Parts:
            return self._model.page_parts(lane, firsts[number], self._first(number + 1))

        def state() -> Parts:
            own = self._model.page_parts(lane, self._first(done), last) if last > self._first(done) else {}
            return self._model.lane_parts(lane) | {PAGE + name: part for name, part in own.items()}

        def whole() -> Parts:
            assert logits is not None
            return {**state(), LOGITS: logits.to("cpu", copy=True)}

        needs = keys.chunks[:done]
        if tokens % chunk == 0:
            self.prefixes.save(keys.chunks[done - 1], tokens, needs, pages, state)
        if logits is not None:
            self.prefixes.save(keys.whole, tokens, needs, pages, whole)

    def _first(self, chunk: int) -> int:
        """The first page that is not complete at the end of so many chunks."""
        return chunk * self.plan.chunk_tokens // self._model.page_tokens

    def _firsts(self, chunks: int) -> list[int]:
        return [self._first(chunk) for chunk in range(chunks)]

    # Parked lanes

    def park(self, lane: LaneState) -> None:
        """Copies the context out of the pool, and closes it."""
        pages = self._model.page_parts(lane, 0, -(-lane.position // self._model.page_tokens))
        parts = self._model.lane_parts(lane) | {PARKED + name: part for name, part in pages.items()}
        self.parked.park(lane.index, lane.position, parts)
        self._model.close_lane(lane)

    def resume(self, index: int) -> LaneState:
        try:
            tokens, parts = self.parked.take(index)
        except KeyError:
            raise PairError(f"the parked lane {index} is not here, which all ranks had read") from None
        pages, state = _split(parts, PARKED)
        return self._model.restore_lane(index, tokens, state, [(0, pages)])

    @property
    def kept(self) -> int:
        """Snapshots that were read back and wait for a lane."""
        return len(self._read)

    def check(self, parked: Sequence[int]) -> None:
        """Raises PairError unless the books of the caches agree, what was read is asked for, and these lanes are the
        parked ones."""
        try:
            self.prefixes.check()
        except AssertionError as error:
            raise PairError(f"the prompt cache: {error}") from error
        with self._lock:
            stray = self._found.keys() - self._asked
        if stray:
            raise PairError(f"{len(stray)} contexts are read back for nobody")
        if self.parked.lanes != sorted(parked):
            raise PairError(f"contexts of lanes {self.parked.lanes} are parked, where {sorted(parked)} should be")

    def close(self) -> None:
        self.background.close()


def _split(parts: Parts, prefix: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those under the prefix, without it, and the others."""
    inner = {name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)}
    return inner, {name: part for name, part in parts.items() if not name.startswith(prefix)}
