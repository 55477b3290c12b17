"""What is cached or learned under one set of weights is not used under another, and ranks tell each other theirs."""

import logging
from pathlib import Path

import pytest
import torch
from engine_fakes import request
from msgspec.structs import replace
from real_pair import GOLDEN, Living
from safetensors.torch import save_file

from packers.shards import Checkpoint
from tided import boot
from tided.engine.build import OpenedModel, open_model
from tided.engine.facts import facts_of
from tided.engine.offline import settings_of
from tided.guard import compare
from tided.settings import Cache, Engine
from tided.tide.history import History


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    checkpoint, names = Checkpoint.open(GOLDEN), [f"layers.3.attn.wo_b.{kind}" for kind in ("weight", "scale")]
    weight, scale = (checkpoint.read(name) for name in names)
    flipped = weight.view(torch.uint8).flip(0).view(weight.dtype)
    save_file(dict(zip(names, (flipped, scale.clone()), strict=True)), tmp_path / "overlay.safetensors")
    return tmp_path / "overlay.safetensors"


def opened(overlay: Path | None, prefix_ram_bytes: int = 0) -> OpenedModel:
    settings = settings_of(GOLDEN)
    model = replace(settings.model, prefill_chunk_tokens=16, numerics="fp32", overlay=str(overlay or ""))
    cache = Cache(context_tokens=256, pool_tokens=512, prefix_ram_bytes=prefix_ram_bytes, prefix_disk_bytes=1 << 28)
    return open_model(replace(settings, model=model, cache=cache, engine=Engine(lanes=1)))


def answered(overlay: Path | None, folder: Path) -> tuple[int, list[int]]:
    """A new engine over the same folder: tokens of the prompt that came from its cache, and the answer."""
    with torch.inference_mode():
        living = Living(opened(overlay), cache_dir=folder)
        living.submit(replace(request("a", max_tokens=6), prompt_ids=[3 + at % 90 for at in range(100)]))
        living.rest()
        living.check()
        living.close()
        for rank in living.ranks:
            rank.close()
    return living.end("a").stats["cached_tokens"], living.tokens("a")


def test_a_prompt_cached_under_stock_is_computed_anew_under_an_overlay_and_back(overlay: Path, tmp_path: Path) -> None:
    """Failure P5: the state of one overlay used under another."""
    folder = tmp_path / "cache"
    stock, edited = answered(None, folder), answered(overlay, folder)
    assert stock[0] == edited[0] == 0
    assert stock[1] != edited[1]
    again, under = answered(None, folder), answered(overlay, folder)
    assert again[0] > 60
    assert under[0] > 60
    assert (again[1], under[1]) == (stock[1], edited[1])


def test_histories_are_apart(overlay: Path, tmp_path: Path) -> None:
    found: list[History] = [boot._history(opened(file), tmp_path) for file in (None, overlay)]
    assert found[0].path != found[1].path
    for history in found:
        history.close()


def test_ranks_under_other_files_do_not_pair(overlay: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    raw = bytearray(overlay.read_bytes())
    raw[-1] ^= 1
    other.write_bytes(raw)
    facts = [facts_of(opened(file)) for file in (overlay, overlay, other, None)]
    assert compare(facts[0], facts[1]) == []
    assert [name for name, *_ in compare(facts[0], facts[2])] == ["overlay"]
    ((name, ours, theirs),) = compare(facts[0], facts[3])
    assert (name, theirs) == ("overlay", "none")
    assert ours.startswith("layers 3-3 attn.wo_b, sha256 ")


def test_the_log_of_a_start_names_it(overlay: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Loop:
        def tell(self, *_: object) -> None: ...

    model = settings_of(GOLDEN)
    with caplog.at_level(logging.INFO):
        boot._open(replace(model, model=replace(model.model, overlay=str(overlay))), 0, Loop())  # type: ignore[arg-type]
    assert "overlay: layers 3-3 attn.wo_b" in caplog.text
