"""A few cells of the table on the real pair of each mini (of GLM by `make faults`, which fills it whole), and that the
table would show what is wrong; kill -9 and SIGSTOP of each rank while it streams are in tests/e2e/test_faults.py."""

import pytest

from tests.bundled import DEEPSEEK, GLM
from tests.faults import table
from tests.faults.clients import EXACT, Heard, asked
from tests.faults.grid import CELLS, FAULTS, case, named, numbers
from tests.faults.link import why_not
from tests.faults.pair import Host, Nodes, make_packs
from tests.faults.run import Outcome, Trial, kept, read_kept, serve, stop
from tests.faults.strike import STAGES
from tests.soak.clients import Answer

pytestmark = [pytest.mark.xdist_group("struck pair"), pytest.mark.timeout(600)]
SLOW_MACHINE_S = 60.0  # what is measured is told by `make faults`; here others may use the machine


LONG = pytest.mark.faults


@pytest.fixture(scope="module", params=[DEEPSEEK, pytest.param(GLM, marks=LONG)], ids=str)
def mini(request):
    return request.param


@pytest.fixture(scope="module")
def packs(mini, tmp_path_factory):
    return make_packs(tmp_path_factory.mktemp("packs"), mini)


@pytest.fixture(scope="module")
def pair(mini, packs, tmp_path_factory):
    pair = Host(tmp_path_factory.mktemp("host"), packs, 6.0, mini)
    try:
        serve(pair)
        yield pair
        stop(pair)
    finally:
        pair.close()


@pytest.fixture(scope="module")
def clean(pair):
    """Before anything was struck; `exact` answers are those of a pair that holds all (tests/e2e/test_exactness.py)."""
    heard = asked(pair.url, list(EXACT))
    assert all(one.finished for one in heard)
    return {one.name: one.answer for one in heard}


CHECKED = [
    pytest.param("corrupt records", "decode", marks=LONG),
    pytest.param("the clock jumps", "swap"),
    pytest.param("full disk", "snapshot"),
    pytest.param("short reads", "prefill", marks=LONG),
    pytest.param("EIO from the disk of experts", "swap", marks=LONG),
    pytest.param("kill -9 of rank 1", "swap", marks=LONG),
]


@pytest.mark.parametrize(("name", "stage"), CHECKED)
def test_nothing_is_wrong_after_it(pair, clean, name, stage):
    if name == "full disk" and not pair.own_disk:
        pytest.skip("no small file system can be mounted here: mount -t tmpfs is refused")
    outcome = Trial(case(FAULTS.index(named(name)), (named(name), stage)), pair, clean, SLOW_MACHINE_S).run()
    assert outcome.faults == [], outcome.line
    assert outcome.compared > 1
    if not name.startswith("EIO"):  # where a disk gives nothing any more the pair ends, where it fails at times not
        assert outcome.ended == name.startswith("kill")


@LONG
def test_two_nodes_without_a_link_end_both_and_start_again(mini, packs, clean, tmp_path):
    if why := why_not():
        pytest.skip(why)
    pair = Nodes(tmp_path, packs, 6.0, mini)
    try:
        serve(pair)
        outcome = Trial(case(1, (named("the link is cut"), "decode")), pair, clean, SLOW_MACHINE_S).run()
        assert outcome.faults == [], outcome.line
        assert outcome.codes == [70, 70]
        stop(pair)
    finally:
        pair.close()


def test_seeds_in_a_row_take_every_cell_once():
    assert {(one.fault.name, one.stage) for one in map(case, range(1, len(CELLS) + 1))} == {
        (fault.name, stage) for fault, stage in CELLS
    }
    assert case(17) == case(17)
    assert {case(seed).rank for seed in range(1, 400, len(CELLS))} <= {0}
    for fault in FAULTS:
        assert set(fault.cannot) < set(STAGES)


def test_outcomes_that_are_kept_come_back(tmp_path):
    one, other = (Outcome(case(seed), "went on", 1.5, [], 3, 1, 2, 0, []) for seed in (5, 9))
    again = Outcome(case(5), "pair ended", 2.25, [70, None], 3, 1, 2, 1, ["another token"])
    file = tmp_path / "outcomes"
    file.write_bytes(kept(one) + kept(other) + kept(again))
    assert read_kept(file) == [again, other]
    assert read_kept(tmp_path / "nothing") == []


def test_seeds_are_named_in_lists():
    assert numbers("3") == [3]
    assert numbers("1-3,9,11-12") == [1, 2, 3, 9, 11, 12]


def heard(name: str, text: str, whole: bool, error: str = "") -> Heard:
    return Heard(name, Answer(text=text, whole=whole, finish="stop" if whole else "", error=error))


def test_another_answer_is_seen_and_one_that_was_cut_off_is_none():
    clean = {"a": Answer(text="Oslo is far.", whole=True, finish="stop")}
    for right in (heard("a", "Oslo is far.", True), heard("a", "Oslo", False, "ended"), heard("", "Paris", True)):
        assert right.fault(clean) == ""
    for wrong in (heard("a", "Oslo is", True), heard("a", "Oslo was", False, "ended"), heard("a", "Paris", True)):
        assert wrong.fault(clean)


def test_each_cell_of_the_table_says_something():
    outcomes = [
        Outcome(one, "went on" if one.seed % 2 else "pair ended", 2.34, [70, 137]) for one in map(case, range(1, 41))
    ]
    outcomes[6].faults.append("another token")
    rows = [line for line in table.render(outcomes, {"nodes": "no root"}).splitlines() if line[:2] == "| "]
    assert len(rows) == 1 + len(FAULTS)
    assert all(len([cell for cell in row.split("|")[1:-1] if cell.strip()]) == 1 + len(STAGES) for row in rows)
    text = "\n".join(rows)
    for words in (
        "goes on",
        "pair ended in 2.3 s (70, 137)",
        "**WRONG (seed 7)**",
        "cannot happen: ",
        "not run: no root",
    ):
        assert words in text


def test_the_table_replaces_what_is_between_its_marks(tmp_path):
    page = tmp_path / "results.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.write_table(page, [Outcome(case(1), "pair ended", 2.0, [137, 70])], {})
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith(f"{table.END}\nafter\n")
    assert "old" not in page.read_text()
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no lines"):
        table.write_table(page, [], {})
