"""The families of text formats: found by a checkpoint's configuration, each whole."""

import json
from pathlib import Path

import pytest

from tided.chat.families import DEEPSEEK_V41, FAMILIES, GLM53, family_of
from tided.chat.schema_types import types_of
from tided.errors import DataError

MINI = Path(__file__).parents[2] / "minis" / "deepseek"


def test_a_family_is_found_by_the_configuration():
    assert family_of(json.loads((MINI / "config.json").read_text())) is DEEPSEEK_V41
    assert family_of({"model_type": "glm_moe_dsa"}) is GLM53


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}, {"model_type": ["deepseek_v41"]}])
def test_a_model_without_a_known_format_is_refused_by_name(config):
    with pytest.raises(DataError, match="no text format is known") as refused:
        family_of(config)
    assert "deepseek_v41, glm_moe_dsa" in refused.value.hint


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_what_ends_an_answer_or_marks_it_is_required_of_a_tokenizer(family):
    needed = {*family.begin, *family.stop_tokens, *family.marks, family.end_think}
    assert needed <= set(family.required_specials)
    assert set(family.barred_from_reasoning) == ({*family.stop_tokens, *family.marks} - {family.end_think})


def test_a_schema_that_refers_to_itself_everywhere_is_read_once():
    """Followed along every way it would take 20 to the power of the depth."""
    branches = [{"$ref": "#/$defs/node"}] * 20
    root = {"$defs": {"node": {"anyOf": [{"type": "integer"}, *branches]}}}
    assert types_of({"$ref": "#/$defs/node"}, root) is not None
    assert types_of({"anyOf": branches}, root) is not None
