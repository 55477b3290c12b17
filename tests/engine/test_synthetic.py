"""Made-up weights: written or held, the same numbers, and a checkpoint that the engine serves from."""

import json
import math
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kernels.record import ExpertRecord
from packers.generated import MARK, Generated, Mark
from packers.headers import DTYPE_BYTES
from packers.shards import Checkpoint
from tests.models.random_checkpoint import released_config
from tided.chat.glm53 import REQUIRED_SPECIALS
from tided.chat.tokenizer import Tokenizer
from tided.engine import synthetic, synthetic_shapes
from tided.engine.build import open_model
from tided.engine.offline import logits, settings_of
from tided.engine.synthetic_shapes import LIKE
from tided.errors import DataError, UnavailableError, UsageError
from tided.experts.source import CheckpointSource
from tided.models.deepseek_v41.config import read_config
from tided.models.deepseek_v41.names import expected_tensors, routed_expert_names
from tided.models.deepseek_v41.released import SPECIAL, released
from tided.models.glm53 import released as glm53
from tided.models.glm53.config import read_config as read_glm53
from tided.models.glm53.names import linears, plain_tensors
from tided.models.glm53.released import released as released_glm53

IDS = [0, SPECIAL["<｜User｜>"], 70, 71, 72, 73, 74, 75, SPECIAL["<｜Assistant｜>"], 80]

GLM_IDS = [glm53.SPECIAL["[gMASK]"], glm53.SPECIAL["<sop>"], 70, 71, 72, 73, glm53.SPECIAL["<|assistant|>"], 80]


def nothing(done: int, total: int) -> None:
    pass


def small(*args: Any) -> dict[str, Any]:
    """The released configuration's layers, narrow."""
    config = released(*args)
    config["text_config"].update(
        hidden_size=64, moe_intermediate_size=64, num_attention_heads=4, head_dim=64, qk_rope_head_dim=16,
        q_lora_rank=32, o_lora_rank=32, o_groups=2, index_n_heads=2, index_head_dim=64, engram_head_dim=32,
        dspark_markov_rank=32, max_position_embeddings=1024,
    )  # fmt: skip
    config["vision_config"].update(num_hidden_layers=1, hidden_size=64, num_attention_heads=2, intermediate_size=96)
    return config


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic_shapes.ds41, "released", small)
    monkeypatch.setattr(synthetic, "RESERVE_BYTES", 0)


def mark(held: bool, **changes: Any) -> Mark:
    return replace(synthetic.plan("ds41", 4, 8, 300, 5, held), **changes)


def test_its_inventory_is_the_released_one() -> None:
    """The public counts: 48 shards, 96,085 tensors, 510.29 GB (norms of the tower as bf16)."""
    config, said = released()["text_config"], released_config()["text_config"]
    golden = ("rope_scaling", "rms_norm_eps", "max_position_embeddings")  # what the other takes from a small model
    assert {key: value for key, value in config.items() if said[key] != value and key not in golden} == {}
    config = released()
    shards = list(synthetic._shards(Path("/nowhere"), LIKE["ds41"], expected_tensors(read_config(config))))
    assert len(shards) == 48
    assert sum(len(tensors) for _, tensors in shards) == 96_085
    nbytes = sum(tensor.nbytes for _, tensors in shards for tensor in tensors)
    assert nbytes == pytest.approx(510.286e9, rel=1e-5)


@pytest.mark.parametrize("layers", [2, 3, 5, 15, 21, 22, 39])
def test_its_first_layers_are_a_model(layers: int) -> None:
    rows = (384_006_168, 384_016_682)
    t = read_config(released(layers, 8, rows)).text_config
    assert t.kv_source_layer_ids[-1] == t.candidate_source_layer_id
    assert t.compress_ratios[min(20, layers - 1)] == 1


def test_held_and_written_are_the_same_numbers_and_serve(narrow: None, tmp_path: Path) -> None:
    for held in (False, True):
        synthetic.synthesise(tmp_path / str(held), mark(held), nothing)
    written, made = (Checkpoint.open(tmp_path / str(held)) for held in (False, True))
    assert sum(path.stat().st_blocks for path in made.path.glob("*.safetensors")) * 512 < 4 << 20
    assert written.tensors.keys() == made.tensors.keys()
    for name in written.tensors:
        one, other = (checkpoint.read(name).view(torch.uint8) for checkpoint in (written, made))
        assert torch.equal(one, other), name
    record = ExpertRecord(64, 64, 2)
    outs = []
    for checkpoint in (written, made):
        source = CheckpointSource(checkpoint, routed_expert_names(), record, 1)
        out = bytearray(record.slot_bytes)
        source.read(3, 7, memoryview(out))
        source.close()
        outs.append(bytes(out))
    assert outs[0] == outs[1]
    assert len(set(outs[0])) > 200
    Tokenizer.open(made.path).require(SPECIAL)
    rows = [logits(settings_of(one.path), IDS, decode=3, resident=28) for one in (written, made)]
    assert torch.isfinite(rows[0]).all()
    assert torch.equal(rows[0], rows[1])
    assert float(rows[0].std()) > 0.1


def test_another_seed_is_another_model(narrow: None, tmp_path: Path) -> None:
    checkpoints = []
    for seed in (5, 6):
        synthetic.synthesise(tmp_path / str(seed), mark(True, seed=seed), nothing)
        checkpoints.append(Checkpoint.open(tmp_path / str(seed)))
    name = "layers.1.attn.wq_a.weight"
    one, other = (checkpoint.read(name).view(torch.uint8) for checkpoint in checkpoints)
    assert float((one == other).float().mean()) < 0.1
    assert checkpoints[0].identity() != checkpoints[1].identity()


def test_what_is_ended_goes_on(narrow: None, tmp_path: Path) -> None:
    whole, path = tmp_path / "whole", tmp_path / "ended"
    total = synthetic.synthesise(whole, mark(False), nothing)

    def ended(done: int, _: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthetic.synthesise(path, mark(False), ended)
    kept = {file.name: file.stat().st_mtime_ns for file in path.glob("*.safetensors")}
    assert kept
    assert not [file for file in path.iterdir() if file.name.endswith(".part")], "half a file is left"
    with pytest.raises(DataError):
        Checkpoint.open(path)
    told = []
    assert synthetic.synthesise(path, mark(False), lambda done, total: told.append((done, total))) == total
    assert told[-1] == (total, total)
    assert {name: (path / name).stat().st_mtime_ns for name in kept} == kept, "what was whole is written again"
    for file in whole.iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_directory_that_holds_something_else_is_left_alone(narrow: None, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError, match="something else"):
        synthetic.synthesise(tmp_path, mark(False), nothing)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    synthetic.synthesise(tmp_path / "new", mark(True), nothing)
    with pytest.raises(UsageError, match="another kind"):
        synthetic.synthesise(tmp_path / "new", mark(True, experts=9), nothing)


def test_room_is_looked_for_before_anything_large_is_written(
    narrow: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 20))
    with pytest.raises(UnavailableError, match="are needed"):
        synthetic.synthesise(tmp_path / "a", mark(False), nothing)
    assert not list((tmp_path / "a").glob("*.safetensors"))
    synthetic.synthesise(tmp_path / "b", mark(True), nothing)  # headers fit


def test_a_damaged_mark_is_told(narrow: None, tmp_path: Path) -> None:
    synthetic.synthesise(tmp_path / "a", mark(True), nothing)
    (tmp_path / "a" / MARK).write_text(json.dumps({"seed": 1}))
    with pytest.raises(DataError, match="synth"):
        Checkpoint.open(tmp_path / "a")


@pytest.mark.parametrize(("layers", "experts"), [(1, 8), (41, 8), (2, 5), (2, 385)])
def test_impossible_sizes_are_refused(layers: int, experts: int) -> None:
    with pytest.raises(UsageError):
        synthetic.plan("ds41", layers, experts, 300, 0, True)


def test_numbers_are_sane() -> None:
    """No NaN among the codes, and deviations as asked."""
    generated = Generated(3)
    infos = {
        t.name: t for _, tensors in synthetic._shards(Path("/n"), LIKE["ds41"], _narrow_tensors()) for t in tensors
    }
    codes = generated.tensor(infos["layers.1.attn.wo_b.weight"])
    assert not ((codes & 0x7F) == 0x7F).any()
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    assert abs(float(values.std()) - 1) < 0.05
    norm = torch.from_numpy(generated.tensor(infos["layers.1.attn_norm.weight"])).view(torch.bfloat16).float()
    assert abs(float(norm.mean()) - 1) < 0.1
    whole = generated.tensor(infos["layers.1.attn.wo_b.weight"])
    part = torch.empty(100, dtype=torch.uint8).numpy()
    generated.fill(infos["layers.1.attn.wo_b.weight"], 77, part)
    assert (part == whole[77:177]).all()


def _narrow_tensors() -> Any:
    return expected_tensors(read_config(small(2, 8, (1, 1), 300, 500)))


def small_glm53(*args: Any) -> dict[str, Any]:
    return released_glm53(*args) | {
        "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 4,
        "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "index_n_heads": 2, "index_head_dim": 64, "index_topk": 64, "max_position_embeddings": 1024,
    }  # fmt: skip


def test_glm53_s_parameters_are_the_released_ones() -> None:
    """753,329,921,024, the drafting layer's included, the routers' corrections not counted; experts of 2.75 bits, and
    15 GB of all else."""
    c = read_glm53(glm53.released())
    matrices = [*linears(c).values(), *[(c.moe_intermediate_size, c.hidden_size)] * 3 * c.n_routed_experts * 76]
    weights = sum(rows * columns for rows, columns in matrices)
    plain = sum(math.prod(spec.shape) for spec in plain_tensors(c).values())
    assert weights + plain - 76 * 256 == 753_329_921_024
    tensors = glm53.stored_tensors(c)
    words = {name: math.prod(spec.shape) for name, spec in tensors.items() if name.endswith(".trellis")}
    experts = sum(count for name, count in words.items() if ".experts." in name)
    assert 16 * experts / (256 * 76 * 3 * 2048 * 6144) == pytest.approx(2.75, rel=1e-3)
    dense = sum(
        DTYPE_BYTES[str(spec.dtype)] * math.prod(spec.shape)
        for name, spec in tensors.items()
        if ".experts." not in name
    )
    assert 14e9 < dense < 16e9


def as_bytes(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return checkpoint.read(name).flatten().view(torch.uint8)


def test_glm53_made_and_written_are_the_same_and_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On one rank and, cut, on two; experts of four sizes, drafting layer included."""
    monkeypatch.setattr(synthetic_shapes.glm53, "released", small_glm53)
    monkeypatch.setattr(synthetic, "RESERVE_BYTES", 0)
    for held in (False, True):
        synthetic.synthesise(tmp_path / str(held), synthetic.plan("glm53", 5, 16, None, 5, held), nothing)
    written, made = (Checkpoint.open(tmp_path / str(held)) for held in (False, True))
    assert all(as_bytes(written, name).equal(as_bytes(made, name)) for name in made.tensors)
    Tokenizer.open(made.path).require(REQUIRED_SPECIALS)
    settings = settings_of(made.path)
    assert len(open_model(settings).kinds.nbytes) == 4
    rows = [logits(settings, GLM_IDS, decode=3, resident=22, ranks=ranks, numerics="fp32") for ranks in (1, 2)]
    assert torch.isfinite(rows[0]).all()
    assert float(rows[0].std()) > 0.1
    assert torch.allclose(rows[0], rows[1], atol=1e-3)
    assert logits(settings_of(written.path), GLM_IDS, decode=3, resident=22, numerics="fp32").equal(rows[0])
    draft = replace(settings, engine=replace(settings.engine, draft="3"))
    open_model(draft).family.drafter_bytes(made, draft)
