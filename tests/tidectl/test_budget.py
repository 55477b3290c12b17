"""`tidectl budget`: what an amount means, and what is said of it."""

import pytest

from tests.tidectl.canned import Tidectl
from tidectl.budget import wanted, words
from tidectl.status import budget_line
from tided.control.operator import AskBudget
from tided.errors import UsageError

NOW = {"resident_now": 10_000, "bytes_now": 94_003_200_000}


@pytest.mark.parametrize(
    ("amount", "question"),
    [
        ("70G", AskBudget(nbytes=70_000_000_000)),
        ("70 GB", AskBudget(nbytes=70_000_000_000)),
        ("1.5Gi", AskBudget(nbytes=3 << 29)),
        ("2GiB", AskBudget(nbytes=2 << 30)),
        ("512b", AskBudget(nbytes=512)),
        ("10000 experts", AskBudget(resident=10_000)),
        ("10_000", AskBudget(resident=10_000)),
        ("1 expert", AskBudget(resident=1)),
        ("+5G", AskBudget(nbytes=99_003_200_000)),
        ("-5G", AskBudget(nbytes=89_003_200_000)),
        ("-200 experts", AskBudget(resident=9_800)),
        ("+12", AskBudget(resident=10_012)),
        ("-90000", AskBudget(resident=0)),
        ("-900G", AskBudget(nbytes=0)),
    ],
)
def test_an_amount_is_experts_or_bytes_and_may_be_a_change(amount: str, question: AskBudget) -> None:
    assert wanted(amount, NOW) == question


@pytest.mark.parametrize(
    "amount",
    ["a lot", "70X", "1.5 experts", "--5", "5G experts", "G", "1e9", "9" * 400, "9" * 27 + "T", "1." + "9" * 400],
)
def test_what_is_no_amount_is_refused(amount: str) -> None:
    with pytest.raises(UsageError):
        wanted(amount, NOW)


def test_a_forecast_says_what_moves_and_what_it_takes() -> None:
    found = NOW | {"resident": 9_800, "experts": 15_360, "leave": 200, "come": 0, "bytes": 92_123_136_000}
    found |= {"covered_now": 0.95, "covered": 0.94, "arena_bytes_now": 99_000_000_000}
    found |= {"arena_bytes": 99_000_000_000 + found["bytes"] - found["bytes_now"]}
    experts, memory, expected = words(found)
    assert "10000 -> 9800 of 15360: 200 leave at once" in experts
    assert "94.00 GB -> 92.12 GB on each rank (-1.88 GB)" in memory
    assert expected == "expected  95.00% -> 94.00% of what the next tokens want is in memory"
    assert "40 are read while it serves" in words(found | {"leave": 0, "come": 40})[0]


@pytest.mark.parametrize(
    ("more", "real", "told"),
    [
        (-40_000_000, 0, "(-40.00 MB; the system gets back 0.00 MB, since"),
        (-940_000_000, -872_415_232, "(-0.94 GB; the system gets back 0.87 GB, since"),
        (40_000_000, 67_108_864, "(+40.00 MB; the system gives 67.11 MB, since"),
        (40_000_000, 40_000_000, "(+40.00 MB)"),
    ],
)
def test_what_the_system_gets_back_is_told_where_it_is_something_else(more: int, real: int, told: str) -> None:
    found = NOW | {"resident": 9_800, "experts": 15_360, "leave": 200, "come": 0, "covered_now": 1, "covered": 1}
    sizes = {"bytes": NOW["bytes_now"] + more, "arena_bytes_now": 99 << 30, "arena_bytes": (99 << 30) + real}
    assert told in words(found | sizes)[1]


def test_nothing_that_runs_has_no_budget(tidectl: Tidectl) -> None:
    result = tidectl("budget", "-5G", "--yes")
    assert result.exit_code == 3
    assert "tidectl start PROFILE" in result.stderr


def test_status_tells_of_a_budget_that_is_not_the_profiles() -> None:
    assert budget_line({}) == ""
    assert budget_line({"budget": {"resident": 312, "resident_of_profile": 312}}) == ""
    said = budget_line({"budget": {"resident": 280, "resident_of_profile": 312}})
    assert said == "280 experts until it ends; the profile's: 312"
