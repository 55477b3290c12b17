"""What goes round in circles is ended, data is not; token for token as the plain definition says."""

import logging
from functools import cache
from pathlib import Path

import pytest
import torch
from engine_fakes import Bench, FakeModel, request
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tided.chat.tokenizer import Tokenizer
from tided.engine import loops
from tided.engine.depth import Depths
from tided.engine.loops import DATA_PATIENCE, LONGEST_TOKENS, Loop, LoopWatch, is_data
from tided.models.base import Draft

MINI = Path(__file__).parents[2] / "minis" / "deepseek"
SENTENCES = [
    "I'll write the code now.\n\n",
    "Let me write.",
    " Wait, let me look at the file again.",
    "I am sorry, I cannot do that. ",
    " the",
    " and so on, and so it went,",
    "<!DOCTYPE html>\n",
    "No.\n",
    "**Note:** I should check the logs of line 42 once more, then go on.\n",
    "我不知道该怎么办。",
    "等等，让我再看一下，",
    "Ich weiß es nicht. ",
    "- Check the logs\n",
    "def solve(self):\n    # TODO: think about this case again.\n    pass\n",
    # Marks of cells in prose: behind a quote or stars, in numbers, in code, in lists, as entities.
    'He said "stop," and then he left the room again.\n',
    "**First,** I should look at the file once more.\n",
    "They counted 1,024 lines in the file that I read.\n",
    "Es kostet 3,50 Euro am Tag, wie ich schon sagte.\n",
    "Let me run `cat log.txt | grep error` and look at it again.\n",
    "I should call `f(a,b)` once more and see what it says.\n",
    "If a || b is true then I should look at the case again.\n",
    "I&#39;ll write the code now and then look at it.\n",
    "1.\tCheck the logs again and see what they say.\n",
    "-\tCheck the logs again and see what they say.\n",
    "\t# I should think about this case again.\n",
    "等等,让我再看一下这个文件.\n",
    "Wait, let me look.\nSmith,42,yes and so on it goes. So I said.\n",
    "I should look at it again.\n|\n",
    "-\nI should look at it again.\n-\nSmith,42,yes\n",
]
DATA = [
    "0,0,0\n",
    "alice,42,yes\n",
    "New York,London,Paris\n",
    "1,New York City,United States of America\n",
    "2024-01-01;15.2;ok\n",
    "北京,上海,广州\n",
    "| --- ",
    "+-----",
    "| Alice Smith | yes |\n",
    "│ 12 │ ab │\n",
    "├────┼────┤\n",
    "0, ",
    "[0, 0, 0],\n",
    "True, ",
    '{"id": 1, "ok": true},\n',
    '{"a": ',
    "}",
    "]",
    "<td></td>",
    "0x00, ",
    "-",
    "\n",
    " ",
    "assert x == 1\n",
    # Rows of cells, whatever stands in a cell.
    "J. Smith,42,yes\n",
    "| J. Smith | 42 |\n",
    "│ Dr. Jane Doe │ it is what I said. │\n",
    "+----------+----+\n| J. Smith | 42 |\n",
    "St. Louis,MO,1\n",
    "Dr. Jane Doe,Acme Inc. Ltd,5\n",
    "Error,Connection refused by remote host\n",
    "alice.smith@example.com,Sales Department Northern Region\n",
    "12,The Great Gatsby by F. Scott Fitzgerald,1925\n",
    "name\tThe value of it all\n",
    "1\tThe value of it all\n",
    '"Smith, J.","He said it was all right. So it was.",1\r\n',
    "J. Smith;;-5\n",
    "St. Louis,-5\n",
    "1,024,The Great Gatsby by F. Scott Fitzgerald\n",
    "张三,他说他不知道该怎么办。,42\n",
    "`a`,`the name of the first one`\n",
]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.open(MINI)


def ids_of(text: str) -> list[int]:
    return tokenizer().encode_text(text)


def watched(ids: list[int], repeats: int = 12) -> tuple[int, Loop] | None:
    """After how many tokens the answer is ended, and why."""
    watch = LoopWatch(repeats, tokenizer().token_bytes)
    for count, token in enumerate(ids, 1):
        if (loop := watch.feed(token)) is not None:
            return count, loop
    return None


# Words and data


@pytest.mark.parametrize("text", SENTENCES)
def test_a_sentence_that_never_ends_is_ended_at_the_twelfth(text):
    assert not is_data(text.encode())
    before = ids_of("Once there was a fox. It had 3 friends, and they all lived by the river.\n")
    ended = watched(before + ids_of(text * 40))
    assert ended is not None
    count, loop = ended
    assert loop.repeats == 12
    assert loop.tokens <= len(ids_of(text))
    assert count <= len(before) + len(ids_of(text * 13))


@pytest.mark.parametrize("text", DATA)
def test_data_may_repeat_two_hundred_times_and_not_for_ever(text):
    assert is_data(text.encode())
    assert watched(ids_of(text * 200)) is None
    middle = ids_of(text * 3000)[5:-5]  # words are cut otherwise at both ends
    cycle = next(middle[:n] for n in range(1, len(middle)) if middle[:n] * 3 == middle[: 3 * n])
    ended = watched(cycle * (12 * DATA_PATIENCE + 1))
    assert ended is not None
    assert ended[1].repeats == 12 * DATA_PATIENCE


@pytest.mark.parametrize("text", SENTENCES + DATA)
def test_it_does_not_matter_where_a_cycle_is_cut(text):
    data = text.encode()
    assert {is_data(data[at:] + data[:at]) for at in range(len(data))} == {is_data(data)}


def table(rows: int) -> str:
    line = "+------------+-------+--------+\n"
    head = f"{line}| name       |  size | state  |\n{line}"
    return head + "".join(f"| disk       | {i % 2:5} | ok     |\n" for i in range(rows)) + line


def nested(depth: int, indent: str = "") -> str:
    def opened(level: int) -> str:
        return ("\n" + indent * level if indent else "") + '"child": {' if level else "{"

    closed = "".join(("\n" + indent * level if indent else "") + "}" for level in reversed(range(depth)))
    return "".join(opened(level) for level in range(depth)) + closed


@pytest.mark.parametrize(
    "text",
    [
        "name,city,age\n" + "Smith,New York,42\n" * 200,
        nested(10),
        nested(10, "  "),
        nested(40),
        "[" * 20 + "]" * 20,
        table(60),
        "| a | b |\n| --- | --- |\n" + "| yes | no |\n" * 30,
        "matrix = [\n" + "    [0, 0, 0, 0, 0, 0, 0, 0],\n" * 30 + "]\n",
        "<tr>" + "<td></td>" * 20 + "</tr>\n",
        "Chapter 1 " + "." * 60 + " 3\n",
        "=" * 80 + "\n" + "#" * 80,
    ],
)
def test_data_as_models_write_it_is_left_alone(text):
    assert watched(ids_of(text)) is None


def test_the_texts_that_the_mini_learned_are_left_alone():
    """Its recorded answers, and source code."""
    assert watched(ids_of((MINI / "samples.json").read_text())) is None
    assert watched(ids_of(Path(loops.__file__).read_text())) is None


def test_a_call_for_ever_is_ended_though_it_looks_like_data():
    """Calls are written with special tokens: those are nobody's data."""
    mark = tokenizer().special_ids["</think>"]
    call = [mark, *ids_of('{"city": "Paris", "days": 3}\n')]
    assert watched(call * 40) == (12 * len(call), Loop(len(call), 12))
    assert watched(call[1:] * 40) is None


def test_what_an_unknown_id_spells_is_no_data():
    watch = LoopWatch(3, [b"0"])
    assert [watch.feed(token) for token in (7, 7, 7)] == [None, None, Loop(1, 3)]
    watch = LoopWatch(3, [b"0"])
    assert [watch.feed(0) for _ in range(10)] == [None] * 10


# Against the plain definition


def plain_end(ids: list[int], repeats: int, texts: list[bytes | None]) -> tuple[int, Loop] | None:
    """The first place where the newest tokens are `repeats` copies of a cycle of words, or many of a cycle of data; of
    several cycles the shortest."""
    for end in range(1, len(ids) + 1):
        for period in range(1, min(LONGEST_TOKENS, end) + 1):
            cycle = ids[end - period : end]

            def copies(count: int, cycle: list[int] = cycle, end: int = end) -> bool:
                return end >= count * len(cycle) and ids[end - count * len(cycle) : end] == cycle * count

            if copies(repeats * DATA_PATIENCE):
                return end, Loop(period, repeats * DATA_PATIENCE)
            pieces = [texts[token] for token in cycle]
            data = None not in pieces and is_data(b"".join(pieces))
            if copies(repeats) and not data:
                return end, Loop(period, repeats)
    return None


TEXTS: list[bytes | None] = [b" we", b" go", b",", b"\n", b"7", b".", None]
CYCLES = st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=5)
ANSWERS = st.lists(st.tuples(CYCLES, st.integers(1, 5)), min_size=1, max_size=8).map(
    lambda parts: [token for cycle, times in parts for token in cycle * times]
)


@settings(max_examples=150, deadline=None)
@given(ANSWERS, st.integers(2, 4))
@example([4, 2, 4, 2, 4, 2, 4, 2, 0, 0, 0], 3)
@example([2] * 70, 2)  # data that comes for ever
def test_token_for_token_as_defined(ids, repeats):
    watch = LoopWatch(repeats, TEXTS)
    found = next(((at, loop) for at, token in enumerate(ids, 1) if (loop := watch.feed(token))), None)
    assert found == plain_end(ids, repeats, TEXTS)


@pytest.mark.parametrize("period", [1, 2, 511, 512])
def test_periods_up_to_the_longest_are_seen_across_the_end_of_the_buffer(period):
    texts: list[bytes | None] = [b" w"] * 8000
    lead = [600 + i for i in range(5000)]
    watch = LoopWatch(12, texts)
    ended = next((at, loop) for at, t in enumerate(lead + list(range(period)) * 13, 1) if (loop := watch.feed(t)))
    assert ended == (5000 + 12 * period, Loop(period, 12))


def test_a_longer_cycle_is_not_seen():
    watch = LoopWatch(2, [b" w"] * 600)
    assert not any(watch.feed(token) for token in list(range(513)) * 4)


# In the engine


class Chanter(FakeModel):
    """Says `script`, a verse of token ids, over and over after any prompt; its drafts are always right."""

    script = (10, 11, 12)
    draft_tokens = 5

    def _next(self, lane) -> torch.Tensor:
        done = len(lane.ids) - 5
        return torch.nn.functional.one_hot(torch.tensor(self.script[max(0, done) % len(self.script)]), 64).float() * 9

    def _append(self, lane, token):
        super()._append(lane, token)
        return self._next(lane)

    def decode(self, lanes, token_ids, counts=None):
        rows = zip(lanes, torch.split(token_ids, counts or [1] * len(lanes)), strict=True)
        return torch.stack([self._append(lane, token) for lane, tokens in rows for token in tokens.tolist()])

    def keep(self, lane, rows):
        pass  # whoever says what is expected is never taken back before the answer's end

    def propose(self, lanes, anchors, choose):
        ids = [
            [self.script[(len(lane.ids) - 5 + 1 + place) % len(self.script)] for place in range(self.draft_tokens)]
            for lane in lanes
        ]
        shape = (len(lanes), self.draft_tokens)
        return Draft(torch.tensor(ids), torch.zeros(*shape, 64), torch.zeros(*shape))


def chanting(monkeypatch, depth: int = 0, spells: bytes = b" ha") -> Bench:
    monkeypatch.setattr("engine_fakes.FakeModel", Chanter)
    bench = Bench()
    bench.engine.token_bytes = [spells] * 64
    bench.engine.scheduler.depths = Depths("fixed", depth, depth)
    return bench


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_an_answer_ends_at_its_loop_inside_a_block_too(monkeypatch, caplog, depth):
    bench = chanting(monkeypatch, depth)
    caplog.set_level(logging.WARNING, "tided.engine")
    bench.submit(replace(request("a", max_tokens=300), loop_break=12))
    bench.finish()
    end = bench.end("a")
    assert bench.tokens("a") == list(Chanter.script) * 12
    assert (end.reason, end.completion_tokens, end.stats["loop_break"]) == ("stop", 36, True)
    assert (end.stats["steps"] < 35) == (depth > 0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "request a: ended, the last 3 tokens came 12 times in a row"
    bench.submit(replace(request("b", max_tokens=7), loop_break=12))  # the next one has nothing of it
    bench.finish()
    assert (bench.end("b").reason, bench.end("b").stats["loop_break"]) == ("length", False)


def test_beside_another_lane_each_has_its_own(monkeypatch):
    bench = chanting(monkeypatch)
    bench.submit(
        replace(request("a", max_tokens=300), loop_break=4), replace(request("b", max_tokens=90), loop_break=9)
    )
    bench.finish()
    assert [bench.end(name).completion_tokens for name in "ab"] == [12, 27]


def test_off_and_not_before_the_least(monkeypatch):
    bench = chanting(monkeypatch)
    bench.submit(request("off", max_tokens=90), replace(request("least", max_tokens=90), loop_break=3, min_tokens=50))
    bench.finish()
    assert (bench.end("off").reason, bench.end("off").completion_tokens) == ("length", 90)
    assert (bench.end("least").reason, bench.end("least").completion_tokens) == ("stop", 59)


def test_rows_of_data_go_on(monkeypatch):
    bench = chanting(monkeypatch, spells=b"0,")
    bench.submit(replace(request("a", max_tokens=350), loop_break=4))
    bench.finish()
    assert bench.end("a").reason == "length"


def test_under_a_grammar_too(monkeypatch):
    class Anything:
        mask_s, error, seen = 0.0, "", 0

        def mask(self):
            return b"\xff" * 8

        def advance(self, token):
            self.seen += 1

    bench, guide = chanting(monkeypatch), Anything()
    bench.engine.submit(replace(request("a", max_tokens=300), loop_break=5, guided=True), guide)
    bench.engine.take_in()
    bench.finish()
    assert (bench.end("a").reason, bench.end("a").completion_tokens, guide.seen) == ("stop", 15, 15)
    assert bench.end("a").stats["grammar"]["active"]
