"""Contexts that leave the pool and come back, on real models, of every family and however they are kept: nothing of an
answer tells (C5)."""

import queue
import threading
import weakref

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from real_pair import FORMS, Form, Served, forms
from real_pair import ask as asked
from small_model import small_pages as small

from tests.bundled import DEEPSEEK
from tided.cache.prefix import Snapshot
from tided.control.messages import Recall, Restore
from tided.engine.build import build_rank
from tided.engine.caching import CachePlan, Caching
from tided.engine.offline import first_pairs
from tided.engine.types import Request
from tided.errors import PairError
from tided.experts.io import Priority
from tided.models.parallel import Alone

PROMPT = DEEPSEEK.random.prompt
RAM = 1 << 26
TAIL = [5, 9, 11, 4, 8, 3]


def model(ranks: int = 1, lanes: int = 1, replay: str = "full", **given):
    """One lane after the other."""
    return Form(DEEPSEEK, ranks, replay).model(lanes=lanes, **given)


def ask(name: str, prompt: list[int], answer: int = 8, **sampling) -> Request:
    return asked(name, prompt, answer, **{"temperature": 1.0, "seed": 7} | sampling)


def long(form: Form) -> list[int]:
    return form.mini.random.prompt[:230]


def other_end(form: Form) -> list[int]:
    return [*long(form)[: -len(TAIL)], *TAIL]


LONG = PROMPT[:230]
SIMPLE = pytest.mark.parametrize("form", [FORMS[name] for name in ("deepseek", "glm")], ids=["deepseek", "glm"])
PAIRS = pytest.mark.parametrize(
    "form", [FORMS[f"{name}, two ranks"] for name in ("deepseek", "glm")], ids=["deepseek", "glm"]
)


def cached(served: Served, name: str) -> int:
    return served.stats(name)["cached_tokens"]


@forms("deepseek, bounded, two ranks", "glm, split")
def test_a_prefix_that_is_hit_is_as_good_as_computed(form):
    prompt = long(form)
    requests = [ask("first", prompt), ask("again", prompt, seed=8)]
    requests += [ask("other", other_end(form)), ask("half", prompt[:100])]
    plain = Served(form.model(lanes=1), requests)
    hit = Served(form.model(lanes=1, draft="3", prefix_ram_bytes=RAM), requests)
    assert hit.faults == []
    for request in requests:
        assert hit.tokens(request.request_id) == plain.tokens(request.request_id), request.request_id
    assert [cached(hit, name) for name in ("first", "again", "other", "half")] == [0, 230, 224, 96]
    assert [cached(plain, name) for name in ("again", "other")] == [0, 0]
    told = [{"source": "none", "restored_tokens": 0}, {"source": "ram", "restored_tokens": 230}]
    assert [hit.stats(name)["prefix"] for name in ("first", "again")] == told
    # Only what is computed is prefilled, and only that votes.
    picks = [hit.stats(name)["prefill"]["routed_picks"] for name in ("first", "again", "other")]
    assert picks[1:] == [0, picks[0] * 6 // 230]


@forms("deepseek, bounded", "deepseek, bounded, two ranks", "glm, two ranks", "glm, split")
def test_a_prefix_from_disk_outlives_the_process(form, tmp_path):
    disk = form.model(lanes=1, prefix_disk_bytes=RAM)
    first = Served(disk, [ask("a", long(form))], cache_dir=tmp_path)
    for rank in first.ranks:
        assert rank.executor.caching.background.flush(60)
        rank.close()
        assert rank.residents.reads[Priority.PREFIX].reads > 0
    later = Served(disk, [ask("b", other_end(form))], cache_dir=tmp_path)
    assert all(rank.residents.reads[Priority.PREFIX].reads > 0 for rank in later.ranks)
    plain = Served(form.model(lanes=1), [ask("b", other_end(form))])
    assert (later.faults, cached(later, "b")) == ([], 224)
    assert later.stats("b")["prefix"] == {"source": "disk", "restored_tokens": 224}
    assert later.tokens("b") == plain.tokens("b")


@PAIRS
def test_ranks_that_hold_different_snapshots_begin_where_both_can(form, tmp_path):
    disk = form.model(lanes=1, prefix_disk_bytes=RAM)
    first = Served(disk, [ask("a", long(form))], cache_dir=tmp_path)
    for rank in first.ranks:
        assert rank.executor.caching.background.flush(60)
        rank.close()
    states = sorted((tmp_path / "1" / "prefix").glob("*.state"), key=lambda p: p.stat().st_mtime_ns)
    for path in states[-4:]:  # 192, 208, 224 and the whole prompt
        path.unlink()
    damaged = states[-5]  # 176: rank 1 finds out when it reads
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    later = Served(disk, [ask("b", other_end(form))], cache_dir=tmp_path)
    plain = Served(form.model(lanes=1), [ask("b", other_end(form))])
    assert later.faults == []
    assert cached(later, "b") == 160
    assert later.tokens("b") == plain.tokens("b")


@pytest.fixture
def small_pages():
    """Two short answers fill a pool of them."""
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        yield


@forms("deepseek, bounded", "deepseek, bounded, two ranks", "glm, split")
def test_an_answer_that_was_parked_is_as_if_it_never_was(form, small_pages, tmp_path):
    """In the memory of one rank, and on the disks of two."""
    on_disk = form.ranks > 1
    requests = [ask("a", long(form)[:31], 28), ask("b", long(form)[10:24], 40, seed=3)]
    roomy = Served(form.model(context_tokens=80, pool_tokens=160), requests)
    tight = Served(form.model(context_tokens=80, pool_tokens=80), requests, cache_dir=tmp_path if on_disk else None)
    assert tight.faults == []
    assert (tight.stats("a")["parked"], roomy.stats("b")["parked"]) == (0, 0)
    assert tight.stats("b")["parked"] >= 1
    for name in "ab":
        assert tight.tokens(name) == roomy.tokens(name)
        assert tight.stats(name)["experts"]["routed_picks"] == roomy.stats(name)["experts"]["routed_picks"]
    for rank in tight.ranks:
        rank.executor.check()
        pieces = rank.residents.reads[Priority.PREFIX].reads  # of files: behind every read of an expert
        assert (pieces > 0) == on_disk
    assert not list(tmp_path.rglob("*.context"))


@SIMPLE
def test_a_prefix_of_another_fidelity_or_of_substitutes_is_not_reused(form):
    exact = replace(ask("exact", long(form)), fidelity="exact")
    requests = [ask("fast", long(form)), exact, replace(exact, request_id="twice")]
    served = Served(form.model(lanes=1, prefix_ram_bytes=RAM), requests)
    assert [cached(served, name) for name in ("fast", "exact", "twice")] == [0, 0, 230]


class SlowDisk:
    """A rank's caches, whose every read brings a snapshot once it may: what is alive of those is counted."""

    def __init__(self) -> None:
        self.caching = Caching(None, CachePlan(ram_bytes=RAM))  # type: ignore[arg-type]  # no lane is restored
        self.caching.prefixes.read = self._read  # type: ignore[method-assign]
        self.begun: queue.Queue[str] = queue.Queue()
        self.may_end = threading.Semaphore(0)
        self.read = 0
        self._parts: list[weakref.ref[torch.Tensor]] = []

    def _read(self, keys):
        self.begun.put(keys[0])
        assert self.may_end.acquire(timeout=60)
        self.read += 1
        part = torch.zeros(1)
        self._parts.append(weakref.ref(part))
        return [0], 0, Snapshot(keys[0], 1, {"window": part}, ())

    def all_read(self) -> None:
        """Whatever was handed to the reader is done."""
        done = threading.Event()
        self.caching.background.read(done.set)
        assert done.wait(60)

    @property
    def kept(self) -> int:
        return sum(ref() is not None for ref in self._parts)


def test_of_what_was_forgotten_before_it_was_read_nothing_is_read_or_kept():
    """Forgotten inside its read, behind it, and before it; as by clients that hang up while the disk is slow."""
    disk = SlowDisk()
    caching = disk.caching
    for ticket in range(39):
        caching.recall(Recall(ticket, [str(ticket)]))
        if ticket == 0:
            assert disk.begun.get(timeout=60) == "0"
        caching.forget(ticket)
    caching.recall(Recall(39, ["39"]))
    disk.may_end.release(40)
    disk.all_read()
    assert (disk.read, disk.kept, caching.recalling) == (2, 1, 1)
    caching.check([])
    caching.forget(39)
    assert (disk.kept, caching.recalling, caching.answers()) == (0, 0, [])
    caching.close()


def test_what_is_asked_for_is_answered_once_and_kept_until_it_is_forgotten():
    disk = SlowDisk()
    caching = disk.caching
    disk.may_end.release(2)
    for ticket in (1, 2):
        caching.recall(Recall(ticket, ["a"]))
    disk.all_read()
    assert caching.recalling == 2
    assert [answer.ticket for answer in caching.answers()] == [1, 2]
    assert (caching.answers(), caching.recalling, caching.kept, disk.kept) == ([], 0, 2, 2)
    for ticket in (1, 2):
        caching.forget(ticket)
    assert (caching.kept, disk.kept) == (0, 0)
    caching.close()


def test_books_that_hold_an_answer_for_nobody_are_told():
    disk = SlowDisk()
    disk.may_end.release()
    disk.caching.recall(Recall(1, ["a"]))
    disk.all_read()
    disk.caching._asked.clear()
    with pytest.raises(PairError, match="for nobody"):
        disk.caching.check([])
    disk.caching.close()


def lane_at(rank, prompt, chunk: int = 16):
    lane, logits = rank.model.open_lane(0), None
    for i in range(0, len(prompt), chunk):
        logits = rank.model.prefill(lane, torch.tensor(prompt[i : i + chunk]), "last")
    return lane, logits


@forms(*(name for name, form in FORMS.items() if form.ranks > 1))
@pytest.mark.parametrize("chunk", [16, 24, 15])  # odd: a remainder waits; 15 and 24: boundaries inside pages
def test_the_bits_of_a_restored_context(form, chunk):
    opened_model, tokens = form.model(lanes=1, chunk=chunk, prefix_ram_bytes=RAM), long(form)
    rank = build_rank(opened_model, Alone(), first_pairs(opened_model), lambda *_: None)
    with torch.inference_mode():
        caching, request = rank.executor.caching, ask("a", tokens)
        keys = caching.chain(request, 0)
        at = 9 * chunk
        lane, _ = lane_at(rank, tokens[:at], chunk)
        caching.save(lane, keys, None)
        straight = [rank.model.prefill(lane, torch.tensor(tokens[at : at + chunk]), "last")]
        straight += [rank.model.decode([lane], torch.tensor([token])) for token in (5, 6, 7)]
        rank.model.close_lane(lane)
        # Other tenants have the pages in between.
        dirty, _ = lane_at(rank, tokens[::-1], chunk)
        rank.model.close_lane(dirty)
        caching.recall(Recall(1, [keys.chunks[8]]))
        while not (answers := caching.answers()):
            pass
        assert answers[0].loaded == 0
        back, _ = caching.restore(1, Restore(1, at))
        restored = [rank.model.prefill(back, torch.tensor(tokens[at : at + chunk]), "last")]
        restored += [rank.model.decode([back], torch.tensor([token])) for token in (5, 6, 7)]
        for expected, found in zip(straight, restored, strict=True):
            assert torch.equal(expected, found)
        assert back.position == lane.position
        for name in vars(lane).keys() - {"index", "pages", "page_table"}:  # whatever else a context comes to be
            assert same(getattr(lane, name), getattr(back, name)), name
    caching.close()
    rank.reads.close()


def same(one, other) -> bool:
    """Bit by bit, through dicts, lists and objects of fields."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return same(vars(one), vars(other)) if hasattr(one, "__dict__") else one == other


@SIMPLE
def test_a_restored_prefix_leaves_the_residents_alone(form):
    """The set changes between the two: the second begins with the first's context and routes by the new set."""
    tested = form.model(form.mini.random.some, lanes=1, prefix_ram_bytes=RAM)
    seen = []

    def exchange(served: Served) -> None:
        residents = served.ranks[0].residents
        absent = [pair for pair in tested.all_pairs if pair not in residents.pairs]
        inner = served.engine.scheduler._admissions

        def admissions():
            admitted = inner()
            if admitted and admitted[0].request.request_id == "again":
                seen.append((residents.state(), served.ranks[0].executor.plan_version))
            elif admitted:
                served.engine.motion.take_plan([(residents.pairs[-1], absent[-1])], "test")
            return admitted

        served.engine.scheduler._admissions = admissions

    served = Served(tested, [ask("a", long(form), 40), ask("again", long(form))], prepare=exchange)
    assert served.faults == []
    (before, generation), residents = seen[0], served.ranks[0].residents
    assert (residents.state(), served.ranks[0].executor.plan_version) == (before, generation)
    assert generation == 1
    assert cached(served, "again") == 230


@pytest.mark.parametrize(("strict", "reused"), [(True, 0), (False, 230)])
@SIMPLE
def test_strict_serves_under_the_same_set_alone(form, strict, reused):
    tested = form.model(form.mini.random.some, lanes=1, prefix_ram_bytes=RAM, prefix_strict=strict)

    def exchange(served: Served) -> None:
        residents, finish = served.ranks[0].residents, served.engine.ledger._finish
        absent = [pair for pair in tested.all_pairs if pair not in residents.pairs]

        def finished(request_id, reason, lane):
            finish(request_id, reason, lane)
            if request_id == "b":
                served.engine.motion.take_plan([(residents.pairs[-1], absent[-1])], "test")

        served.engine.ledger._finish = finished

    requests = [ask(name, long(form)) for name in "abcd"]
    requests.insert(2, ask("move", long(form)[:20], 40))
    served = Served(tested, requests, prepare=exchange)
    assert [cached(served, name) for name in "abcd"] == [0, 230, reused, 230]
