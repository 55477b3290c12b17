"""Which snapshots fit a number of bytes: the least recently used goes first. Snapshots of one conversation share the
pages of their chunks; a page set goes with the last snapshot that needs it.

A snapshot that was reused by two later prompts is the start of many (a system prompt): it is pinned, and goes only
when no other is left. Pinned ones hold half of the bytes at most; beyond that the least recently used loses its pin."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

REUSES_TO_PIN = 2


@dataclass
class Entry:
    """`needs`: keys of the page sets. `own_bytes`: windows and what else is the snapshot's alone."""

    needs: tuple[str, ...]
    own_bytes: int
    reuses: int = 0
    pinned: bool = False


@dataclass
class Gone:
    """What has no place any more: snapshots, and page sets that no snapshot needs."""

    entries: list[str] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)


class Index:
    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.entries: OrderedDict[str, Entry] = OrderedDict()  # the least recently used first
        self.page_bytes: dict[str, int] = {}
        self.used_bytes = 0
        self._needed: Counter[str] = Counter()

    def add(self, key: str, entry: Entry, page_bytes: Mapping[str, int]) -> Gone | None:
        """Takes a new snapshot in; `page_bytes` has the sizes of what it needs. None: larger than all there is."""
        whole = entry.own_bytes + sum(page_bytes[need] for need in entry.needs)
        if whole > self.budget_bytes:
            return None
        if key in self.entries:
            self.entries.move_to_end(key)
            return Gone()
        self.entries[key] = entry
        self.used_bytes += entry.own_bytes
        for need in entry.needs:
            if need not in self.page_bytes:
                self.page_bytes[need] = page_bytes[need]
                self.used_bytes += page_bytes[need]
            self._needed[need] += 1
        return self._shrink(key)

    def touch(self, key: str) -> None:
        """The snapshot was restored."""
        entry = self.entries[key]
        self.entries.move_to_end(key)
        entry.reuses += 1
        if entry.reuses >= REUSES_TO_PIN and not entry.pinned:
            entry.pinned = True
            self._limit_pins()

    def remove(self, key: str) -> Gone:
        """Of a snapshot that is not here, nothing goes."""
        gone = Gone()
        entry = self.entries.pop(key, None)
        if entry is None:
            return gone
        gone.entries.append(key)
        self.used_bytes -= entry.own_bytes
        for need in entry.needs:
            self._needed[need] -= 1
            if not self._needed[need]:
                del self._needed[need]
                self.used_bytes -= self.page_bytes.pop(need)
                gone.pages.append(need)
        return gone

    def remove_pages(self, page: str) -> Gone:
        """The page set is lost: so are the snapshots that need it."""
        gone = Gone()
        for key in [key for key, entry in self.entries.items() if page in entry.needs]:
            _join(gone, self.remove(key))
        return gone

    def check(self) -> None:
        """Raises AssertionError unless sizes and needs agree with the entries."""
        needed = Counter(need for entry in self.entries.values() for need in entry.needs)
        assert needed == self._needed, "page sets are needed by others than they were counted for"
        assert set(self.page_bytes) == set(needed), "a page set is kept that nobody needs"
        own = sum(entry.own_bytes for entry in self.entries.values())
        assert self.used_bytes == own + sum(self.page_bytes.values()), "bytes were counted wrong"
        assert self.used_bytes <= self.budget_bytes, "more bytes than there may be"

    def _shrink(self, newest: str) -> Gone:
        gone = Gone()
        while self.used_bytes > self.budget_bytes:
            others = [(key, entry) for key, entry in self.entries.items() if key != newest]
            key = next((key for key, entry in others if not entry.pinned), None) or others[0][0]
            _join(gone, self.remove(key))
        return gone

    def _limit_pins(self) -> None:
        pinned = [entry for entry in self.entries.values() if entry.pinned]
        while pinned and self._bytes_of(pinned) > self.budget_bytes // 2:
            oldest = pinned.pop(0)
            oldest.pinned, oldest.reuses = False, 0

    def _bytes_of(self, entries: list[Entry]) -> int:
        pages = {need for entry in entries for need in entry.needs}
        return sum(entry.own_bytes for entry in entries) + sum(self.page_bytes[need] for need in pages)


def _join(gone: Gone, more: Gone) -> None:
    gone.entries += more.entries
    gone.pages += more.pages
