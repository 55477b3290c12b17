"""What benchmarks say of their own figures, and when they fail."""

import pytest

from bench import cache_kl, viewers

GOOD = {"slower_percent": 0.4, "slower_standard_error": 0.3, "publisher_core_percent": 0.14}


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        ({}, []),
        ({"slower_percent": 1.6}, []),  # within its error
        ({"slower_percent": 1.7}, ["a step is slower by 1.7 %"]),
        ({"slower_percent": float("nan")}, ["a step is slower by nan %"]),
        ({"slower_percent": -6.68, "slower_standard_error": 12.49}, ["too noisy: run at rest"]),
        ({"slower_standard_error": 0.51}, ["too noisy: run at rest"]),
        ({"publisher_core_percent": 1.01}, ["the publisher takes 1.01 % of a core"]),
    ],
    ids=str,
)
def test_a_comparison_of_viewers_that_tells_nothing_fails_too(figures: dict[str, float], told: list[str]) -> None:
    complaints = viewers.missed(GOOD | figures)
    assert [found.startswith(start) for found, start in zip(complaints, told, strict=True)] == [True] * len(told)


@pytest.mark.parametrize(("mean", "high", "words"), [
    (0.0045, 0.0049, ("within", "within")),
    (0.0045, 0.0057, ("within", "beyond")),
    (0.0063, 0.0080, ("beyond", "beyond")),
])  # fmt: skip
def test_an_interval_that_reaches_beyond_the_bound_is_told(mean: float, high: float, words: tuple[str, str]) -> None:
    row = cache_kl.Row("fp8", 10, 2, mean, 0.0, high, 0.0, 0.0, 1.0, 0.0, 0.0)
    first, second = words
    told = cache_kl.verdict(row, 0.005)
    assert told == f"fp8: the mean KL is {first} 0.005, the upper end of its interval ({high:.2e}) {second} it"
