"""`tidectl eval`: what its figures mean, what it reads and writes, and the engine in this process."""

import json
import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from packers.shards import Checkpoint
from tests.bundled import DEEPSEEK, GLM, Mini
from tests.tidectl.canned import Tidectl
from tidectl.evals import answers, figures, plot, points, show
from tidectl.evals.run import Options, chosen
from tidectl.evals.targets import Scorer, Start
from tidectl.evals.texts import FILE, read
from tidectl.waiting import Show
from tided.engine.offline import logits
from tided.engine.types import TokenLogprob
from tided.errors import DataError

PROFILES = Path(__file__).parents[2] / "profiles"
VOCAB = 12
weights = st.lists(st.floats(-6, 6), min_size=VOCAB, max_size=VOCAB)


def told(values: list[float], token: int, top: int) -> TokenLogprob:
    total = math.log(sum(map(math.exp, values)))
    logs = [one - total for one in values]
    order = sorted(range(VOCAB), key=lambda at: -logs[at])
    return TokenLogprob(token, logs[token], [(at, logs[at]) for at in order[:top]], 1 + order.index(token))


def kl(theirs: list[float], ours: list[float]) -> float:
    p, q = ([one - math.log(sum(map(math.exp, of))) for one in of] for of in (theirs, ours))
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


@settings(max_examples=100, deadline=None)
@given(weights, weights, st.integers(0, VOCAB - 1), st.integers(1, VOCAB))
def test_divergence_is_that_of_the_distributions_and_never_more(ours, theirs, token, top):
    found, covered = figures.divergence(told(ours, token, top), told(theirs, token, top))
    whole = kl(theirs, ours)
    assert -1e-9 <= found <= whole + 1e-6
    if top == VOCAB:
        assert found == pytest.approx(whole, abs=1e-6)
        assert covered == pytest.approx(1)
    assert figures.divergence(told(ours, token, top), told(ours, token, top))[0] == pytest.approx(0, abs=1e-9)


def judged(domain: str, losses: list[float], row: int = 1) -> figures.Judged:
    none = [0.0] * len(losses)
    return figures.Judged(domain, row, losses, [loss < 1 for loss in losses], none, [False] * len(losses), none, 0.25)


def test_domains_weigh_alike_and_the_rise_is_paired():
    reference = [judged("a", [1.0, 2.0]), judged("a", [3.0, 0.5]), judged("b", [0.5])]
    given_ = [judged("a", [2.0, 3.0]), judged("a", [4.0, 1.5]), judged("b", [0.75])]
    found = figures.summary(reference)
    assert found["domains"]["a"]["loss"] == pytest.approx(6.5 / 4)
    assert found["mean"]["loss"] == pytest.approx((6.5 / 4 + 0.5) / 2)
    assert found["mean"]["top1"] == pytest.approx((1 / 4 + 1) / 2)
    assert found["mean"]["tokens"] == 5
    assert found["substituted_weight_share"] == 0.25
    rise = figures.rise(given_, reference)
    assert rise["mean"] == pytest.approx((1 + 0.25) / 2)
    assert (rise["low"], rise["high"]) == (None, None)  # one row says nothing of how much rows differ
    assert show.interval(rise) == "–"


def test_the_interval_of_a_rise_is_of_rows_drawn_anew():
    """Worked by hand: of two rows a quarter of the draws has the one twice, a quarter the other, so that the quantiles
    at 2.5 and 97.5 % are the rows' own rises. A row's two answers are drawn together: by themselves they would rise by
    2 and 0, and three of three draws be the second one in 1 of 27."""
    reference = [judged("a", [1.0], 1), judged("a", [1.0], 1), judged("a", [1.0, 2.0], 2),
                 judged("b", [1.0], 3), judged("b", [2.0], 4)]  # fmt: skip
    given_ = [judged("a", [3.0], 1), judged("a", [1.0], 1), judged("a", [6.0, 3.0], 2),
              judged("b", [1.0], 3), judged("b", [2.0], 4)]  # fmt: skip
    rise = figures.rise(given_, reference)  # of a: 1 and 3 a token, together 2; of b: nothing; both weigh alike
    assert rise == pytest.approx({"mean": 1.0, "low": 0.5, "high": 1.5})
    assert rise["low"] < rise["mean"] < rise["high"]
    assert figures.rise(reference, reference) == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert show.interval(rise) == "+0.5000 to +1.5000"


def test_texts_of_a_file_of_ones_own(tmp_path: Path):
    file = tmp_path / "mine.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}] * 2
    lines = [{"domain": "mine", "text": "The sea is wide and calm today. " * 20}, {"messages": turns}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    for mini in (DEEPSEEK, GLM):
        found = read(mini.path, 10_000, file)
        assert list(found) == ["mine", "texts"]
        assert found["mine"][0].prompt_tokens == 48
        assert [mini.tokenizer.decoder().feed(text.ids[text.prompt_tokens :])[:6] for text in found["texts"]] == [
            "Hello."
        ] * 2
        assert [text.row for text in (*found["mine"], *found["texts"])] == [1, 2, 2]
        assert found["texts"][0].cut(1).row == 2
        assert found["texts"][0].ids == found["texts"][1].ids[: len(found["texts"][0].ids)]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2"),
        ("{}", "line 2: expected text or messages"),
        ('{"text": "a", "messages": [{"role": "user", "content": "x"}]}', "line 2: expected text or messages"),
        ('{"text": 5}', "line 2"),
        ('{"messages": [{"content": "x"}]}', "line 2"),
        ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}], "tools": [{}]}', "line 2 is no"),
    ],
)
def test_a_line_that_is_no_text_is_named(tmp_path: Path, line: str, told: str):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"text": "good"}) + "\n" + line)
    with pytest.raises(DataError, match=told):
        read(DEEPSEEK.path, 100, file)


def row(case: str, share: float, loss: float, **changes) -> dict:
    mean = {"loss": loss, "top1": 0.5, "kl": 0.0, "other": 0.0, "tokens": 3}
    experts = {"residents": round(share), "experts": 100}
    name = {"model": "m", "texts": "k", "top": 50, "reference": "exact", "case": case, "overlay": "", "share": share}
    return name | {"mean": mean} | experts | changes


def test_points_of_several_starts_are_kept_and_the_newest_of_a_case_counts(tmp_path: Path):
    file = tmp_path / "points.jsonl"
    points.kept(file, [row("fast", 50, 2.0), row("exact", 50, 1.0)])
    points.kept(file, [row("fast", 50, 9.0, texts="others")])
    found = points.kept(file, [row("fast", 50, 1.9), row("fast", 80, 1.2)])
    assert [(one["case"], one["share"], one["mean"]["loss"]) for one in found] == [
        ("exact", 50, 1.0), ("fast", 50, 1.9), ("fast", 80, 1.2)
    ]  # fmt: skip
    assert len(file.read_text().splitlines()) == 4
    # Another number of likeliest tokens is another measure of KL, and another reference another one of rise.
    [alone] = points.kept(file, [row("fast", 50, 1.9, top=5)])
    assert alone["top"] == 5
    found = points.kept(file, [row("fast", 50, 1.8, reference="all resident")])
    assert [(one["share"], one["reference"]) for one in found] == [
        (50, "exact"), (50, "exact"), (80, "exact"), (50, "all resident")
    ]  # fmt: skip
    assert len(file.read_text().splitlines()) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["points.jsonl"]
    file.write_text("[]")
    with pytest.raises(DataError, match="no points"):
        points.kept(file, [row("fast", 50, 1.9)])
    assert file.read_text() == "[]"


def test_a_curve_ends_with_all_experts_and_is_drawn(tmp_path: Path):
    curves = plot.series([row("all resident", 100, 1.0), row("fast", 50, 3.0), row("fast", 80, 2.0)])
    assert curves["fast"] == [(50, 3.0), (80, 2.0), (100, 1.0)]
    lines = plot.terminal(curves)
    assert sum(line.count("x") for line in lines[:-3]) == 3
    assert "│x" in lines[0] + lines[1]
    plot.draw(tmp_path / "loss.png", curves, "mini: loss by budget")
    with Image.open(tmp_path / "loss.png") as image:
        assert image.size == plot.SIZE
        colours = {colour for _, colour in image.getcolors(1 << 16)}
    assert {(0, 0x72, 0xB2), (0xD5, 0x5E, 0)} <= colours
    assert plot.terminal({"fast": [(50, 1.0)]})  # nothing between the ends
    assert plot.terminal({"fast": [(50, 0.0), (50, 0.0)]})


def test_answers_that_degenerate_are_seen():
    good = "<table><tr><td>Earth</td></tr></table>\n```python\nx = [1, 2]\n```\nA line<br> and <img src='a'/> the end."
    assert answers.look(good, True).open_ == []
    assert answers.look("<div><p>a</div>", True).open_ == ["p"]
    assert answers.look("a</b> <i>c", True).open_ == ["b", "i"]
    assert answers.look("```\ncode", True).open_ == ["```"]
    assert answers.look("<div>", False).open_ == []  # it was cut
    assert not answers.look(good, True).loops
    assert answers.look("So it goes. " * 8, True).loops
    assert not answers.look("So it goes. " * 7 + "And ends.", True).loops
    assert answers.distinct(["a", "b", "a", "b"], 1) == 0.5
    assert answers.distinct(["a", "b", "a", "b"], 2) == pytest.approx(2 / 3)
    assert answers.distinct([], 3) == 1.0


def evaluated(tidectl: Tidectl, mini: Mini, *options: str) -> dict:
    domains = ("--domain", "story", "--domain", "code", "--texts", "2", "--longest", "120")
    ran = tidectl("eval", str(PROFILES / f"mini-{mini.name}.toml"), *domains, *options, "--json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["schema"] == "tidectl.eval/1"
    assert found["texts"]["file"] == str(FILE)
    return found


@pytest.mark.parametrize("mini", [DEEPSEEK, GLM], ids=str)
def test_the_figures_of_known_texts_are_those_of_their_logits(tidectl: Tidectl, mini: Mini, tmp_path: Path):
    """Of every token of an answer, and of no other: against the logits of the whole text."""
    file = tmp_path / "mine.jsonl"
    turns = [{"role": "user", "content": "Where do foxes live?"}, {"role": "assistant", "content": "By the blue sea."}]
    file.write_text(
        json.dumps({"text": "The tide goes out and comes back. " * 12}) + "\n" + json.dumps({"messages": turns})
    )
    ran = tidectl(
        "eval", str(PROFILES / f"mini-{mini.name}.toml"), "--data", str(file), "--budget", "100", "--json",
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    whole = report["rows"][0]
    assert (whole["top"], whole["reference"], report["reference"]) == (50, "all resident", "all resident")
    losses, hits = [], []
    for text in read(mini.path, 10_000, file)["texts"]:
        assert text.answer_tokens > 1
        rows = logits(mini.path, text.ids).log_softmax(-1)[text.prompt_tokens - 1 : -1]
        answer = text.ids[text.prompt_tokens :]
        losses += [-float(row[token]) for row, token in zip(rows, answer, strict=True)]
        hits += [int(row.argmax()) == token for row, token in zip(rows, answer, strict=True)]
    assert whole["mean"]["tokens"] == len(losses)
    assert whole["mean"]["loss"] == pytest.approx(sum(losses) / len(losses), abs=2e-3)
    assert whole["mean"]["top1"] == pytest.approx(sum(hits) / len(hits))


@pytest.mark.parametrize("mini", [DEEPSEEK, GLM], ids=str)
def test_a_small_budget_costs_and_exact_does_not(tidectl: Tidectl, mini: Mini, tmp_path: Path):
    png = tmp_path / "loss.png"
    asked = ("--budget", "35", "--fidelity", "fast", "--fidelity", "exact", "--plot", str(png))
    found = evaluated(tidectl, mini, *asked)
    whole, fast, exact = found["rows"]
    assert (whole["case"], whole["share"], fast["case"], exact["case"]) == ("all resident", 100, "fast", "exact")
    assert fast["share"] == pytest.approx(35, abs=0.5)
    assert fast["mean"]["loss"] > whole["mean"]["loss"] + 0.05
    assert fast["mean"]["kl"] > 0.05
    assert fast["substituted_weight_share"] > 0.05
    assert exact["domains"] == whole["domains"]
    assert exact["rise"] == whole["rise"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert exact["mean"]["kl"] == pytest.approx(0, abs=1e-9)
    assert found["plot"] == str(png)
    assert png.exists()


def test_an_overlay_is_compared_with_the_model_without_it(tidectl: Tidectl, tmp_path: Path):
    checkpoint, names = Checkpoint.open(DEEPSEEK.path), [f"layers.3.attn.wo_b.{kind}" for kind in ("weight", "scale")]
    weight, scale = (checkpoint.read(name) for name in names)
    edited = weight.view(torch.uint8).flip(0).view(weight.dtype)
    save_file(dict(zip(names, (edited, scale.clone()), strict=True)), tmp_path / "edited")
    stock, under = evaluated(tidectl, DEEPSEEK, "--overlay", str(tmp_path / "edited"))["rows"]
    assert (stock["overlay"], stock["rise"]["mean"], len(under["overlay"])) == ("", 0, 64)
    assert (stock["share"], under["share"]) == (100, 100)
    assert under["mean"]["loss"] > stock["mean"]["loss"] + 0.01
    assert under["mean"]["kl"] > 0.01


class _Known(NamedTuple):
    """A target that is asked for nothing but this."""

    name: str = "mini"
    tokenizer: Path = DEEPSEEK.path
    context_tokens: int = 4096

    def started(self, start: Start, show: Show) -> AbstractContextManager[Scorer]:
        raise AssertionError("nothing is scored")


def test_a_domain_with_too_few_texts_is_told_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "mine.jsonl"
    turns = [{"role": "user", "content": "So many words. " * 40}, {"role": "assistant", "content": "Yes."}]
    rows = [{"domain": "mail", "text": f"The sea is wide, and calm on day {n} of {n} days. " * 8} for n in range(3)]
    rows += [{"domain": "support", "messages": turns}, {"domain": "open", "messages": turns[:1]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = chosen(_Known(), Options(data=file, texts=3, longest=100))
    assert {domain: one.as_data() for domain, one in found.items()} == {
        "mail": {"texts": 3, "too_long": 0}, "support": {"texts": 0, "too_long": 1}, "open": {"texts": 0, "too_long": 0}
    }  # fmt: skip
    assert capsys.readouterr().err.splitlines() == [
        "support: no text, so it is in no figure (left out, with prompts of 100 tokens and more: 1; see --longest)",
        "open: no text, so it is in no figure (no line of it has an answer)",
    ]
    chosen(_Known(), Options(data=file, texts=4, longest=400, domains=["mail"]))
    assert capsys.readouterr().err == "mail: 3 of 4 texts (the file has no more)\n"
    with pytest.raises(DataError, match="no text is left"):
        chosen(_Known(), Options(data=file, longest=100, domains=["support"]))
    capsys.readouterr()
    chosen(_Known(), Options())  # the bundled ones are enough
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("option", "place", "told"),
    [
        ("--plot", "absent/loss.png", "absent is no directory"),
        ("--plot", "mine.jsonl/loss.png", "mine.jsonl is no directory"),
        ("--plot", "loss.jpg", "a plot is a PNG"),
        ("--plot", ".", "a plot is a PNG"),
        ("--plot", "dir.png", "is a directory"),
        ("--plot", "x" * 300 + ".png", "File name too long"),
        ("--points", "absent/points.jsonl", "absent is no directory"),
        ("--points", ".", "is a directory"),
        ("--points", "mine.jsonl", "no points of an evaluation"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_scored(
    tidectl: Tidectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, place: str, told: str
):
    monkeypatch.setattr("tidectl.evals.run.Offline", lambda *_: pytest.fail("the engine was started"))
    monkeypatch.setattr("tidectl.evals.run.Server", lambda *_: pytest.fail("a server was asked"))
    (tmp_path / "mine.jsonl").write_text("{}")
    (tmp_path / "dir.png").mkdir()
    for where in (["mini-deepseek"], ["--url", "http://127.0.0.1:1"]):
        ran = tidectl("eval", *where, option, str(tmp_path / place))
        assert ran.exit_code in (2, 65, 69)
        assert told in ran.stderr
        assert {path.name for path in tmp_path.iterdir()} == {"mine.jsonl", "dir.png"}
    assert (tmp_path / "mine.jsonl").read_text() == "{}"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["mini-deepseek", "--domain", "nowhere"], "no texts of nowhere"),
        (["mini-deepseek", "--answers", "2"], "needs a server that runs"),
        (["--budget", "50", "--url", "http://127.0.0.1:1"], "a server that runs has its budget"),
        (["--fidelity", "best"], "no fidelity 'best'"),
    ],
)
def test_what_cannot_be_is_refused(tidectl: Tidectl, arguments: list[str], told: str):
    ran = tidectl("eval", *arguments)
    assert ran.exit_code == 2
    assert told in str(ran.exception) + ran.output
