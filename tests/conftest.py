"""What a module of tests opens ends with it: a worker that kept every file of every module would run out of them."""

import gc
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("house", deadline=None)  # a busy machine is no fault of what is tested
hypothesis.settings.load_profile("house")

MOST_LEFT = 64  # descriptors, for what a session keeps: models whose checkpoint has 18 shards, pipes of a library
ENDS_WITHIN_S = 10.0
WITH_THREADS = (("tided.experts.io", "IoScheduler"), ("tided.cache.background", "Background"))


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    before = descriptors()
    with pytest.MonkeyPatch.context() as patch:
        begun = threads_of(patch)
        yield
    for one in list(begun):
        one.close()
    ends_s = time.monotonic() + ENDS_WITHIN_S
    while (left := descriptors() - before).total() > MOST_LEFT and time.monotonic() < ends_s:
        gc.collect()
        time.sleep(0.05)  # a thread that ends just now holds what it worked on
    assert left.total() <= MOST_LEFT, f"{left.total()} files that this module opened are open: {left.most_common(5)}"


def descriptors() -> Counter[str]:
    """This process's, by what they are open on."""
    found = Counter[str]()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found[str(entry.readlink()).partition(":")[0]] += 1  # sockets and pipes have numbers of their own
    return found


def threads_of(patch: pytest.MonkeyPatch) -> "weakref.WeakSet[Any]":
    """Whatever is made from here on that has threads: while they run, they hold the checkpoint that they read."""
    begun: weakref.WeakSet[Any] = weakref.WeakSet()
    for module, name in WITH_THREADS:
        if module in sys.modules:
            kind = getattr(sys.modules[module], name)
            patch.setattr(kind, "__init__", _noting(kind.__init__, begun))
    return begun


def _noting(plain: Any, begun: "weakref.WeakSet[Any]") -> Any:
    def noted(self: Any, *arguments: Any, **named: Any) -> None:
        plain(self, *arguments, **named)
        begun.add(self)

    return noted
