"""Edits of the bundled models, laid over the stock weights: they are served like a checkpoint whose own weights hold
them, what is cached or learned under one set of weights is not used under another, and ranks tell each other theirs."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from real_pair import Living, Served
from safetensors.torch import load_file, save_file

from packers.overlay import Overlay
from tests.bundled import GLM, MINIS, Mini
from tests.edits import Edit, ablation, edited, first_layers, settings
from tided import boot
from tided.engine.build import OpenedModel, open_model
from tided.engine.facts import facts_of
from tided.engine.offline import logits
from tided.engine.types import Request, Sampling
from tided.errors import TensorError
from tided.guard import compare
from tided.settings import Cache, Engine, Experts, Parallel, Settings, Tide
from tided.tide.history import History

ASKED = ("Tell me about Japan.", "Tell me a short story about a fox.")


@pytest.fixture(scope="module", params=MINIS, ids=str)
def edit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Edit:
    return edited(request.param, tmp_path_factory.mktemp("edit"))


def opened(of: Settings, mini: Mini, ranks: int = 1, **cache: int) -> OpenedModel:
    return open_model(
        replace(
            of,
            model=replace(of.model, prefill_chunk_tokens=16),
            experts=Experts(resident=mini.experts, spare_slots=3),
            tide=Tide(),
            cache=Cache(context_tokens=128, pool_tokens=512, **cache),
            engine=Engine(lanes=2, guard_every_steps=4, prefill_share=0.99),
            parallel=Parallel(ranks=ranks),
        )
    )


def asked(mini: Mini) -> list[Request]:
    """One greedy; one drawn so hot that the least difference tells."""
    drawn = (Sampling(temperature=0.0), Sampling(temperature=3.0, seed=7))
    return [
        Request(request_id=str(n), prompt_ids=mini.ids(text), sampling=sampling, max_tokens=14, stop_ids=())
        for n, (text, sampling) in enumerate(zip(ASKED, drawn, strict=True))
    ]


def answers(of: Settings, mini: Mini, ranks: int = 1) -> list[list[int]]:
    requests = asked(mini)
    served = Served(opened(of, mini, ranks), requests)
    assert served.faults == []
    for rank in served.ranks:
        rank.close()
    return [served.tokens(request.request_id) for request in requests]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_served_is_what_the_edited_checkpoint_serves(edit: Edit, ranks: int) -> None:
    over_stock = answers(edit.over_stock(), edit.mini, ranks)
    assert over_stock == answers(edit.in_weights(), edit.mini, ranks)
    if ranks == 1:
        assert over_stock != answers(settings(edit.stock), edit.mini)


def test_its_logits_are_those_of_the_edited_checkpoint(edit: Edit) -> None:
    """DeepSeek-V4.1's are the same bits; GLM-5.3's differ by what fp32 rounds."""
    ids = edit.mini.ids(ASKED[0])
    ours, theirs, stock = (
        logits(of, ids, decode=3) for of in (edit.over_stock(), edit.in_weights(), settings(edit.stock))
    )
    assert apart(ours, theirs) < 1e-4
    assert ours.equal(theirs) is (edit.key == "overlay")
    assert apart(stock, theirs) > 0.05


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_layers(tmp_path_factory.mktemp("first") / "layers")


@pytest.mark.parametrize(
    ("points", "alpha"), [(("attention",), 3.0), (("attention", "shared"), 2.0), (("attention", "mlp"), 0.5)]
)
def test_every_choice_of_points_at_any_strength(
    three_layers: Path, tmp_path: Path, points: tuple[str, ...], alpha: float
) -> None:
    """Routed experts are edited where they are stored plainly: in bf16, which explains what is left of the last."""
    edit = ablation(tmp_path, [0, 2], alpha, points, three_layers)
    ids = GLM.ids(ASKED[0])
    ours, theirs, stock = (
        logits(of, ids, decode=3) for of in (edit.over_stock(), edit.in_weights(), settings(edit.stock))
    )
    tolerance = 1e-2 if "mlp" in points else 1e-4
    assert apart(ours, theirs) < tolerance
    assert apart(stock, theirs) > 5 * tolerance


# What was computed under other weights


@pytest.fixture(params=["prefix_ram_bytes", "prefix_disk_bytes"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where prompts are kept. What is in memory goes on from engine to engine, as if a process had changed its weights:
    so that nothing but the names of what is kept can tell them apart."""
    if request.param == "prefix_ram_bytes":
        from tided.engine import caching

        stores: dict[object, caching.PrefixCache] = {}
        made = caching.PrefixCache
        monkeypatch.setattr(caching, "PrefixCache", lambda *given: stores.setdefault(given[:2], made(*given)))
    return str(request.param)


def answered(of: Settings, mini: Mini, kept: str, folder: Path) -> tuple[int, list[int]]:
    """A new engine: tokens of the prompt that came from the cache, and the answer."""
    with torch.inference_mode():
        living = Living(opened(of, mini, **{kept: 1 << 26}), cache_dir=folder)
        prompt = mini.ids(" ".join(ASKED))
        living.submit(replace(asked(mini)[1], prompt_ids=prompt[: len(prompt) // 16 * 16 + 2]))
        living.rest()
        living.close()
        for rank in living.ranks:
            assert rank.executor.caching.background.flush(60)
            rank.close()
    return living.end("1").stats["cached_tokens"], living.tokens("1")


def test_a_prompt_cached_under_stock_is_computed_anew_under_an_edit_and_back(
    edit: Edit, kept: str, tmp_path: Path
) -> None:
    """Failure P5: the state of one overlay used under another."""
    ways = (settings(edit.stock), edit.over_stock())
    stock, ours = (answered(of, edit.mini, kept, tmp_path) for of in ways)
    assert stock[0] == ours[0] == 0
    assert stock[1] != ours[1]
    again, under = (answered(of, edit.mini, kept, tmp_path) for of in ways)
    assert again[0] >= 16
    assert under[0] >= 16
    assert (again[1], under[1]) == (stock[1], ours[1])


def test_histories_are_apart(edit: Edit, tmp_path: Path) -> None:
    found: list[History] = [
        boot._history(opened(of, edit.mini), tmp_path) for of in (settings(edit.stock), edit.over_stock())
    ]
    assert found[0].path != found[1].path
    for history in found:
        history.close()


def other_bytes(edit: Edit, folder: Path) -> Settings:
    """The same file but for the last bit of its last number."""
    raw = bytearray(edit.file.read_bytes())
    raw[-4] ^= 1
    (folder / "other.safetensors").write_bytes(raw)
    return settings(edit.stock, **{edit.key: str(folder / "other.safetensors")})


def test_ranks_under_other_files_do_not_pair(edit: Edit, tmp_path: Path) -> None:
    ways = (edit.over_stock(), edit.over_stock(), other_bytes(edit, tmp_path), settings(edit.stock))
    facts = [facts_of(opened(of, edit.mini)) for of in ways]
    assert compare(facts[0], facts[1]) == []
    assert [name for name, *_ in compare(facts[0], facts[2])] == ["overlay"]
    ((name, ours, theirs),) = compare(facts[0], facts[3])
    assert (name, theirs) == ("overlay", "none")
    assert ours == f"{edit.points}, sha256 {Overlay.open(edit.file).sha256}"


def test_the_log_of_a_start_names_it(edit: Edit, caplog: pytest.LogCaptureFixture) -> None:
    class Loop:
        def tell(self, *_: object) -> None: ...

    with caplog.at_level(logging.INFO):
        boot._open(edit.over_stock(), 0, Loop())  # type: ignore[arg-type]
    assert f"overlay: {edit.points}" in caplog.text


Tensors = dict[str, torch.Tensor]


def one_more(tensors: Tensors) -> Tensors:
    return tensors | {"layers.4.attn.wo_a.weight": torch.zeros(2)}


def another_dtype(tensors: Tensors) -> Tensors:
    return tensors | {max(tensors): tensors[max(tensors)].to(torch.bfloat16)}


def another_layer(tensors: Tensors) -> Tensors:
    return {name.replace("layers.5.", "layers.77."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "told"),
    [(one_more, "layers.4.attn.wo_a.weight"), (another_dtype, "is BF16 ["), (another_layer, "layers.77.")],
)
def test_a_wrong_file_is_refused_saying_what_is_wrong(
    edit: Edit, tmp_path: Path, change: Callable[[Tensors], Tensors], told: str
) -> None:
    save_file(change(load_file(edit.file)), tmp_path / "wrong.safetensors")
    with pytest.raises(TensorError) as refused:
        open_model(settings(edit.stock, **{edit.key: str(tmp_path / "wrong.safetensors")}))
    assert told in refused.value.what
    assert "wrong.safetensors" in refused.value.where


def test_a_truncated_file_is_refused_before_anything_is_loaded(edit: Edit, tmp_path: Path) -> None:
    (cut := tmp_path / "cut.safetensors").write_bytes(edit.file.read_bytes()[:-10])
    with pytest.raises(TensorError, match="truncated"):
        open_model(settings(edit.stock, **{edit.key: str(cut)}))
