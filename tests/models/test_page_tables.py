"""What the rows of a step know of their lanes' pages."""

import pytest
import torch

from tests.models.rig import CPU, GLM, load_model, settings
from tided.cache.pool import PAGE_TOKENS
from tided.models.glm53.page_tables import PageTables


def test_the_longest_context_fits_in_a_table_and_a_changed_one_is_told():
    """The pool is for several lanes; a table is as wide as one of them may become."""
    model = load_model(GLM, None, settings(GLM, pool_tokens=8 * PAGE_TOKENS, context_tokens=2 * PAGE_TOKENS + 1))
    assert model.context_pages == 3 < model.pool.pages
    lanes = [model.open_lane(index) for index in range(2)]
    tables = PageTables(2, model.context_pages, CPU)
    tables.tell(lanes)
    assert tables.there.tolist() == [[lane.pages[0]] * 3 for lane in lanes]
    model.make_room([lanes[1]], [model.context_tokens])
    assert len(lanes[1].pages) == 3
    tables.tell(lanes)
    assert tables.there[1].tolist() == list(lanes[1].pages)
    tables.tell(lanes[::-1])
    assert tables.there.tolist() == [list(lanes[1].pages), [lanes[0].pages[0]] * 3]
    model.pool.grow([lanes[1]], model.context_tokens + PAGE_TOKENS)
    with pytest.raises(ValueError, match="broadcast"):  # a row that is cut off would read another's pages
        tables.tell(lanes[::-1])


def test_a_small_pool_bounds_a_context():
    model = load_model(GLM, None, settings(GLM, pool_tokens=2 * PAGE_TOKENS, context_tokens=2 * PAGE_TOKENS))
    assert model.context_pages == model.pool.pages == 2
    assert torch.equal(PageTables(1, 2, CPU).there, torch.zeros(1, 2, dtype=torch.int64))
