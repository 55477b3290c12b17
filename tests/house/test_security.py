"""SECURITY.md names tests that exist; and of a model's directory nothing is run."""

import json
from pathlib import Path

from packers.shards import Checkpoint
from tests.house.test_failures import NAMED, ROOT, missing
from tided.chat.tokenizer import Tokenizer
from tided.models.families import family_of


def test_every_row_names_tests_that_exist():
    page = (ROOT / "SECURITY.md").read_text()
    assert missing(page) == []
    table = page.partition("## Known attacks")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| attack")]
    assert len(rows) > 15
    assert all(NAMED.search(row) for row in rows)


def test_code_beside_a_model_is_not_run(tmp_path: Path):
    """Whatever its config names."""
    source = ROOT / "minis" / "deepseek"
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    ran = tmp_path / "ran"
    for name in ("modeling_tide", "configuration_tide", "tokenization_tide", "__init__", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_tide.C", "AutoModelForCausalLM": "modeling_tide.M"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(tmp_path)
    assert family_of(checkpoint.config) is not None
    Tokenizer.open(tmp_path)
    assert not ran.exists()
