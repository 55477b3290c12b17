"""The vision tower and image spans in the text, against an independent reference and against themselves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from packers.shards import Checkpoint
from tests.models.rig import GOLDEN, Threads, load_model, settings
from tided.errors import ConfigError, PairError
from tided.images.geometry import Size
from tided.models.base import Pictured
from tided.models.deepseek_v41.config import read_config
from tided.models.deepseek_v41.moe import Moe
from tided.models.deepseek_v41.names import expected_tensors
from tided.models.deepseek_v41.vision import Vision, tower_bytes

START, IMAGE, LINE_END, END = range(4)
IMAGE_ID = 511
SMALL = Size(84, 98)  # 6 x 7 patches: 2 rows of 3 tokens, 10 with their marks


def seeing(numerics: str, path: Path = GOLDEN, rank: int = 0, group: Any = None, **model: Any) -> Any:
    config = settings(path, numerics=numerics, **model)
    config = replace(config, vision=replace(config.vision, rank=rank))
    return load_model(path, group, config)


@pytest.fixture(scope="module")
def fp32_eyes() -> Any:
    return seeing("fp32")


@pytest.fixture(scope="module")
def native_eyes() -> Any:
    return seeing("native")


@pytest.fixture(scope="module")
def given(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs["vision"]


def picture(height: int, width: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8).tobytes()


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@torch.inference_mode()
@pytest.mark.parametrize("image", [0, 1])
def test_tower_and_aligner(native_eyes, given, rounded, image):
    """To a bf16 step or so: the reference rounds the probabilities of attention too. The second image's grid is filled
    up by the aligner."""
    tower, (rows, columns) = native_eyes.vision.tower, given["grids_vit_hw"][image]
    patches = rounded[f"vision.patches.{image}"].flatten(1)
    assert relative(tower.forward(patches, rows, columns), rounded[f"vision.vit.{image}"]) < 0.006
    seen = tower.aligned(rounded[f"vision.vit.{image}"], rows, columns)
    assert relative(seen, rounded[f"vision.embeds.{image}"]) < 0.003


def test_pixels_become_patches(native_eyes):
    """In reading order; within a patch the colour counts first, then row and column; -1 to 1 in bf16."""
    size = Size(42, 70)
    pixels = torch.frombuffer(bytearray(picture(*size)), dtype=torch.uint8).view(*size, 3)
    patches = native_eyes.vision.tower.patches(pixels)
    assert patches.shape == (3 * 5, 3 * 14 * 14)
    for row, column, colour in ((0, 0, 0), (0, 69, 1), (41, 0, 2), (20, 33, 1), (41, 69, 2), (13, 14, 0)):
        value = torch.tensor((int(pixels[row, column, colour]) / 255 - 0.5) / 0.5).to(torch.bfloat16).float()
        patch, place = row // 14 * 5 + column // 14, colour * 196 + row % 14 * 14 + column % 14
        assert patches[patch, place] == value


def pictured_of(model: Any, given: dict[str, Any], rounded: Any) -> tuple[torch.Tensor, Pictured]:
    """The prompt of two images with the reference's own rows in it."""
    ids, kinds = torch.tensor(given["ids"]), torch.tensor(given["token_types"])
    start, line_end, end = model.vision.tower.marks
    rows = torch.zeros(len(ids), start.shape[0])
    rows[kinds == START], rows[kinds == LINE_END], rows[kinds == END] = start, line_end, end
    rows[kinds == IMAGE] = torch.cat([rounded["vision.embeds.0"], rounded["vision.embeds.1"]])
    places = (kinds >= 0).nonzero().flatten()
    return ids, Pictured(places, rows[places])


def test_spans_in_the_text(native_eyes, given, rounded, taps, monkeypatch):
    """Engram rows exactly; gates are 0 on images; the first layer's picks are made with their own bias. The whole is
    chaotic in a model this small: what the images' rows are off by, the text before them is off by too."""
    ids, pictured = pictured_of(native_eyes, given, rounded)
    ask, seen = native_eyes.engrams.ask, {}

    def see(step, token_ids):
        seen.update(ask(step, token_ids))
        return seen

    monkeypatch.setattr(native_eyes.engrams, "ask", see)
    logits = prefilled(native_eyes, ids, pictured)
    text = torch.tensor(given["token_types"]) < 0
    for i, layer in enumerate((1, 4)):
        asked, gates = seen[layer], rounded[f"vision.engram_gate.{layer}"]
        assert np.array_equal(asked.distinct[asked.index], rounded["vision.engram_ids"][:, i].numpy())
        assert torch.equal(gates.abs().amax(1) > 0, text)
        torch.testing.assert_close(taps[f"engram_gate.{i}"][text], gates[text], rtol=0.1, atol=0.05)
    picks = taps["router_ids.0"].sort(1).values
    assert torch.equal(picks, rounded["vision.router_ids.0"].long().sort(1).values)
    wanted = rounded["vision.logits"]
    assert relative(logits, wanted) < 0.2
    assert relative(prefilled(native_eyes, ids, None), wanted) > 0.8
    assert relative(logits[text], wanted[text]) < 0.2


def test_nothing_is_added_to_an_images_rows(native_eyes, given, rounded, monkeypatch):
    ids, pictured = pictured_of(native_eyes, given, rounded)
    before_and_after = []
    for engram in native_eyes.engrams.layers.values():
        mix = type(engram).mix

        def see(self, streams, asked, step, mix=mix):
            before_and_after.append((streams, mix(self, streams, asked, step)))
            return before_and_after[-1][1]

        monkeypatch.setattr(type(engram), "mix", see)
        break
    prefilled(native_eyes, ids, pictured)
    assert len(before_and_after) == 2
    text = torch.tensor(given["token_types"]) < 0
    for before, after in before_and_after:
        assert torch.equal((before != after).flatten(1).any(1), text)


def prefilled(model: Any, ids: torch.Tensor, pictured: Pictured | None, chunk: int = 512) -> torch.Tensor:
    """Logits of all tokens, or of the last one under bounded replay; images may be cut by the ends of chunks."""
    lane, rows = model.open_lane(0), []
    for first in range(0, len(ids), chunk):
        here = ids[first : first + chunk]
        part = None
        if pictured is not None:
            inside = (pictured.places >= first) & (pictured.places < first + len(here))
            part = Pictured(pictured.places[inside] - first, pictured.rows[inside]) if inside.any() else None
        rows.append(model.prefill(lane, here, "last" if model.replay == "bounded" else "all", part))
    model.close_lane(lane)
    return torch.cat(rows)


def with_an_image(model: Any, first: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, Pictured]:
    """A prompt of so many tokens; an image begins at `first`."""
    rows = model.see(*SMALL, picture(*SMALL, seed))
    ids = torch.randint(3, 500, (tokens,), generator=torch.Generator().manual_seed(1))
    places = torch.arange(first, first + len(rows))
    ids[places] = IMAGE_ID
    return ids, Pictured(places, rows)


@pytest.mark.parametrize("chunk", [1, 16, 21, 33])
def test_chunks_equal_one_chunk(fp32_eyes, chunk):
    """Also where one ends inside an image: n-grams behind it must not reach over it either way."""
    ids, pictured = with_an_image(fp32_eyes, 14, 60)
    whole = prefilled(fp32_eyes, ids, pictured)
    torch.testing.assert_close(prefilled(fp32_eyes, ids, pictured, chunk), whole, rtol=1e-4, atol=1e-4)


def test_text_behind_an_image_is_decoded_as_it_is_prefilled(fp32_eyes):
    ids, pictured = with_an_image(fp32_eyes, 10, 40)
    whole, lane = prefilled(fp32_eyes, ids, pictured), fp32_eyes.open_lane(0)
    fp32_eyes.prefill(lane, ids[:20], "none", pictured)
    rows = torch.cat([fp32_eyes.decode([lane], token.view(1)) for token in ids[20:]])
    fp32_eyes.close_lane(lane)
    torch.testing.assert_close(rows, whole[20:], rtol=1e-4, atol=1e-4)


def test_other_pixels_are_another_answer(fp32_eyes):
    ids, one = with_an_image(fp32_eyes, 10, 40)
    _, other = with_an_image(fp32_eyes, 10, 40, seed=1)
    one_logits, other_logits = (prefilled(fp32_eyes, ids, pictured)[-1] for pictured in (one, other))
    assert not torch.allclose(one_logits, other_logits, atol=0.01)
    assert torch.equal(prefilled(fp32_eyes, ids, one)[-1], one_logits)


def test_bounded_replay_within_a_window_is_the_whole_path(fp32_eyes):
    bounded = seeing("fp32", decoder_replay="bounded")
    ids, pictured = with_an_image(fp32_eyes, 14, 32)  # a window holds 32
    torch.testing.assert_close(
        prefilled(bounded, ids, pictured)[-1], prefilled(fp32_eyes, ids, pictured)[-1], rtol=1e-4, atol=1e-4
    )


def test_bounded_replay_takes_the_images_of_its_tail(monkeypatch):
    bounded, seen = seeing("fp32", decoder_replay="bounded"), {}
    forward = Moe.forward

    def see(self, step, x):
        seen[self.layer] = step.pictured
        return forward(self, step, x)

    monkeypatch.setattr(Moe, "forward", see)
    ids, pictured = with_an_image(bounded, 43, 70)  # the last 32 rows begin at 38
    prefilled(bounded, ids, pictured)
    assert seen[0].nonzero().flatten().tolist() == list(range(43, 53))
    assert seen[9].nonzero().flatten().tolist() == list(range(5, 15))
    assert len(seen[9]) == 32


@pytest.mark.parametrize("holder", [0, 1])
def test_two_ranks_equal_one(fp32_eyes, holder):
    """Whichever rank holds the tower: it alone has the weights, rank 0 alone has the pixels."""
    ids, pictured = with_an_image(fp32_eyes, 14, 40)
    wanted = prefilled(fp32_eyes, ids, pictured)

    def work(group):
        model = seeing("fp32", rank=holder, group=group)
        assert (model.vision.tower is not None) == (group.rank == holder)
        rows = model.see(*SMALL, picture(*SMALL) if group.rank == 0 else None)
        return rows, prefilled(model, ids, Pictured(pictured.places, rows))

    for rows, logits in Threads(2).run(work):
        assert torch.equal(rows, pictured.rows)
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_pixels_belong_to_rank_0_alone(fp32_eyes):
    with pytest.raises(PairError, match="pixels"):
        fp32_eyes.see(*SMALL, None)


def test_what_the_model_takes(fp32_eyes, fp32_model):
    assert fp32_eyes.image_tokens(*SMALL) == 10
    assert fp32_eyes.image_tokens(84, 97) == 0
    assert fp32_eyes.image_tokens(0, 14) == 0
    assert fp32_eyes.image_tokens(42 * 8, 42 * 8) == 0  # 74 tokens, 64 at most
    assert fp32_model.image_tokens(*SMALL) == 0
    with pytest.raises(ConfigError, match="vision"):
        fp32_model.see(*SMALL, picture(*SMALL))


def test_a_tall_and_a_wide_image(fp32_eyes):
    """Rows and columns are told apart: of the grid, of the positions, of the reading order."""
    tall, wide = (fp32_eyes.see(*size, bytes(126 * 42 * 3)) for size in (Size(126, 42), Size(42, 126)))
    start, line_end, end = fp32_eyes.vision.tower.marks
    assert [i for i, row in enumerate(tall) if torch.equal(row, line_end)] == [2, 4, 6]
    assert [i for i, row in enumerate(wide) if torch.equal(row, line_end)] == [4]
    assert torch.equal(tall[0], start)
    assert torch.equal(wide[-1], end)


def test_the_bytes_of_the_tower():
    """What the checkpoint's inventory says, of the small model and of the released one."""
    config = Checkpoint.open(GOLDEN).config
    released = json.loads(json.dumps(config))
    released["vision_config"].update(
        num_hidden_layers=32, hidden_size=1024, num_attention_heads=16, intermediate_size=2816, max_image_tokens=1024
    )
    released["text_config"]["hidden_size"] = 5120
    for raw in (config, released):
        parsed = read_config(raw)
        names = ("vision.", "aligner.", "image_")
        shapes = [spec.shape for name, spec in expected_tensors(parsed).items() if name.startswith(names)]
        assert tower_bytes(parsed) == sum(2 * int(np.prod(shape)) for shape in shapes)
    assert tower_bytes(parsed) / 1e9 == pytest.approx(0.97, abs=0.01)


def test_the_tower_keeps_its_matrices_as_stored(fp32_eyes):
    assert fp32_eyes.vision.tower.aligner1.weight.dtype == torch.bfloat16
    assert isinstance(fp32_eyes.vision, Vision)
