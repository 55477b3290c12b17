"""GLM-5.3's contexts in one form and in another: none is read as the other, and a shared one is the whole one."""

from pathlib import Path

import pytest
from real_pair import Form, Served, ask

from tests.bundled import GLM
from tided.engine.offline import logits

TOKENS = GLM.random.prompt


def glm(ranks: int = 1, numerics: str = "native", **cache):
    return Form(GLM, ranks).model(numerics=numerics, lanes=1, **cache)


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        ({"dtype": "bf16"}, {"dtype": "fp8"}),
        ({"dtype": "fp8"}, {"dtype": "bf16"}),
        ({"split": True}, {"split": False}),
        ({"split": False}, {"split": True}),
    ],
)
def test_what_was_written_in_one_form_is_not_read_in_another(wrote, reads, tmp_path: Path):
    """Of one rank the rows of a shared context and of a whole one are of the same size: the name alone tells."""
    disk = {"prefix_disk_bytes": 1 << 26}
    for kept, cached in ((wrote, 0), (wrote, 200), (reads, 0)):
        found = Served(glm(**disk | kept), [ask("first", TOKENS[:200])], cache_dir=tmp_path)
        assert found.faults == []
        assert found.stats("first")["cached_tokens"] == cached
        for rank in found.ranks:
            assert rank.executor.caching.background.flush(60)
            rank.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_greedy_answer_of_a_shared_context_is_that_of_one_rank_that_keeps_all(dtype):
    """Sums in another order differ in the last bits, not in what is drawn. Teacher-forced logits: within 2e-4."""
    found = Served(glm(2, "fp32", split=True, dtype=dtype), [ask("a", TOKENS[:100])])
    assert found.faults == []
    settings = glm(numerics="fp32", dtype=dtype).settings
    tokens = found.tokens("a")
    forced = logits(settings, TOKENS[:100] + tokens[:-1], resident=GLM.random.experts)
    assert forced[99:].argmax(dim=-1).tolist() == tokens
