"""Releases of GLM-5.3 that store their linear layers differently, and checkpoints that are none."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from kernels.packed import Exl3, Fp8, Mxfp4, Plain, Stacked, nbytes
from kernels.record import ExpertRecord
from packers.headers import DTYPE_BYTES
from packers.shards import Checkpoint, TensorInfo
from tests.models.glm53_checkpoint import KEPT, fp8, mxfp4, packed_mxfp4, padded, saved, trellis, with_config, write
from tests.models.rig import GLM, Threads, load_model, settings
from tided.errors import ConfigError, DataError, TensorError
from tided.models.families import family_of
from tided.models.glm53 import load
from tided.models.glm53.attention import Attention
from tided.models.glm53.block import Block
from tided.models.glm53.config import read_config
from tided.models.glm53.indexer import Indexer
from tided.models.glm53.load import context_bytes, dense_bytes, expected_tensors
from tided.models.glm53.mlp import Dense, Moe
from tided.models.glm53.names import experts_of, linears, plain_tensors
from tided.settings import Engine, Parallel

LAYOUTS = {
    "experts in MXFP4": {".experts.": mxfp4},
    "attention in FP8, all else in MXFP4": {"self_attn": fp8("weight_scale"), "mlp": mxfp4},
    "packed": {"mlp": packed_mxfp4, "self_attn": packed_mxfp4},
    "FP8 as released, but for the experts": {".experts.": mxfp4, "": fp8("weight_scale_inv")},
}


def answers(path, ranks=1):
    """-> logits of a prompt in chunks and of two steps behind it."""
    tokens = load_file(GLM / "golden_main.safetensors")["tokens"].long()

    def served(group):
        model = load_model(path, group, numerics="fp32")
        lane = model.open_lane(0)
        parts = [model.prefill(lane, part, "all") for part in tokens[:100].split(64)]
        return torch.cat([*parts, *(model.decode([lane], token.view(1)) for token in tokens[100:102])])

    return Threads(ranks).run(served)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_means_its_numbers(tmp_path, name):
    stored, meant = write(tmp_path, LAYOUTS[name])
    found = answers(stored)
    assert torch.equal(found, answers(meant))
    assert not torch.equal(found, answers(GLM)), "quantising changes something"
    torch.testing.assert_close(answers(stored, ranks=2), found, rtol=0, atol=2e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_trellises_and_what_stands_padded_beside_them(tmp_path, ranks):
    """Down projections and outputs of attention have 256 inputs here: two ranks cut between two blocks."""
    layouts = {"o_proj": trellis, "layers.0.mlp.down_proj": trellis, ".experts.": mxfp4, "_a_proj": padded}
    stored, meant = write(tmp_path, layouts | {"kv_b_proj": padded})
    torch.testing.assert_close(answers(stored, ranks), answers(meant, ranks), rtol=0, atol=2e-4)


PACKED = LAYOUTS | {
    "as the reference, in bf16": {".experts.": mxfp4},
    "trellises": {"o_proj": trellis, "layers.0.mlp.down_proj": trellis, ".experts.": mxfp4, "_a_proj": padded},
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", PACKED)
def test_weights_that_stay_as_they_are_stored(tmp_path, monkeypatch, name, ranks):
    """As on devices that have no room for them in fp32: the same answers, and the bytes that were told before."""
    stored, _ = write(tmp_path, PACKED[name])
    checkpoint, asked = Checkpoint.open(stored), settings(stored, numerics="fp32")
    wide = answers(stored, ranks), dense_bytes(checkpoint, asked)
    monkeypatch.setattr(load, "_is_widened", lambda settings: False)
    torch.testing.assert_close(answers(stored, ranks), wide[0], rtol=0, atol=2e-4)
    c = read_config(checkpoint.config)
    fp32 = 4 * c.num_hidden_layers * math.prod(linears(c)["model.layers.0.self_attn.kv_b_proj"])  # in these numerics
    assert dense_bytes(checkpoint, asked) - fp32 < 0.53 * (wide[1] - fp32)
    asked = replace(asked, parallel=Parallel(ranks=ranks))
    held = Threads(ranks).run(lambda group: kept_bytes(load_model(stored, group, asked)))
    assert held[0] == dense_bytes(checkpoint, asked)
    assert held[-1] == pytest.approx(held[0], rel=1e-4), "a cut inside a block has a scale more"


def kept_bytes(model) -> int:
    """Of all linear layers, and the tensors that are none."""

    def of(holder) -> int:
        if isinstance(holder, Plain | Fp8 | Mxfp4 | Exl3 | Stacked):
            return nbytes(holder)
        if isinstance(holder, torch.Tensor):
            return holder.nbytes
        if isinstance(holder, tuple):
            return sum(map(of, holder))
        if isinstance(holder, Block | Attention | Indexer | Moe | Dense):
            return sum(of(part) for name, part in vars(holder).items() if name not in ("no_sink", "bank", "pool"))
        return 0

    return of((model.embed, model.blocks, model.norm, model.head))


@pytest.mark.parametrize("shape", [[], [1], [0]])
def test_a_marker_is_there_or_not_whatever_it_holds(tmp_path, shape):
    stored, _ = write(tmp_path, {"o_proj": trellis})
    wanted = answers(stored)
    tensors = load_file(stored / "model.safetensors")
    marked = {name: torch.zeros(shape, dtype=torch.int32) for name in tensors if name.endswith(".mcg")}
    assert marked
    save_file(tensors | marked, stored / "model.safetensors")
    assert torch.equal(answers(stored), wanted)


def test_signs_stand_for_scales_in_old_files(tmp_path):
    """A set bit is -1."""
    stored, _ = write(tmp_path, {"o_proj": trellis})
    tensors, plain = load_file(stored / "model.safetensors"), {}
    words = torch.tensor([0b1010_0000_0000_0001, 0x0F0F, 0, 0xFFFF] * 4, dtype=torch.int32).to(torch.int16)
    for name in [name for name in tensors if name.endswith((".suh", ".svh"))]:
        packed = words[: len(tensors.pop(name)) // 16].clone()
        tensors[name.removesuffix("h")] = packed
        bits = [int(word) >> bit & 1 for word in packed for bit in range(16)]
        plain[name] = torch.tensor([-1.0 if bit else 1.0 for bit in bits], dtype=torch.float16)
    old = saved(tmp_path / "old", tensors)
    same = saved(tmp_path / "same", {k: v for k, v in tensors.items() if not k.endswith((".su", ".sv"))} | plain)
    assert torch.equal(answers(old), answers(same))


def test_copies_of_the_vocabulary_behind_the_trunk_are_not_read(tmp_path):
    path = with_config(tmp_path)
    tensors = load_file(path / "model.safetensors")
    for copy in ("embed_tokens", "shared_head.head"):
        tensors[f"model.layers.6.{copy}.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    save_file(tensors, path / "model.safetensors")
    assert torch.equal(answers(path), answers(GLM))


def test_a_file_without_the_layer_behind_the_trunk_serves_without_drafts(tmp_path):
    """Its configuration still tells of one."""
    path = with_config(tmp_path)
    tensors = load_file(path / "model.safetensors")
    trunk = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.6.")}
    save_file(trunk, path / "model.safetensors")
    assert torch.equal(answers(path), answers(GLM))
    drafting = settings(path, numerics="fp32")
    with pytest.raises(TensorError, match=r"model\.layers\.6\..* is missing"):
        load_model(path, config=replace(drafting, engine=replace(drafting.engine, draft="3")))


def test_experts_of_a_layer_are_stored_alike(tmp_path):
    stored, _ = write(tmp_path, {"layers.3.mlp.experts.5.up_proj": mxfp4})
    checkpoint = Checkpoint.open(stored)
    with pytest.raises(
        TensorError, match=r"experts\.5\.up_proj is stored as mxfp4, the first expert of its layer as plain"
    ):
        expected_tensors(checkpoint, read_config(checkpoint.config))


def test_a_release_in_fp8_alone_says_what_is_served(tmp_path):
    stored, _ = write(tmp_path, {"": fp8("weight_scale_inv")})
    checkpoint = Checkpoint.open(stored)
    with pytest.raises(DataError, match="routed experts in FP8 are not served"):
        family_of(checkpoint.config).expert_record(checkpoint, 2)


def test_a_rank_must_get_whole_groups(tmp_path):
    """64 weights of an expert's inner dimension are two groups of 32."""
    stored, _ = write(tmp_path, {".experts.": mxfp4})
    checkpoint = Checkpoint.open(stored)
    assert family_of(checkpoint.config).expert_record(checkpoint, 2).share == 32
    with pytest.raises(ConfigError, match="cannot be cut over 4 ranks"):
        family_of(checkpoint.config).expert_record(checkpoint, 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not sigmoid"),
        ({"n_group": 8, "topk_group": 4}, "n_group and topk_group must be 1"),
        ({"indexer_types": ["shared"] * 6}, "the first layer must choose for itself"),
        ({"indexer_types": ["full"] * 5}, "indexer_types must say full or shared of every layer"),
        ({"rope_parameters": {"rope_theta": 8e6, "rope_type": "yarn"}}, "rope_type 'yarn' is not default"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok exceeds n_routed_experts"),
        ({"first_k_dense_replace": 6}, "no layer has experts"),
        ({"index_topk": 0}, "index_topk must be at least 1"),
        ({"eos_token_id": [512]}, "a token is not in the vocabulary"),
        ({"kv_lora_rank": "64"}, "kv_lora_rank"),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused(change, said):
    config = json.loads((GLM / "config.json").read_text("utf-8"))
    with pytest.raises(DataError, match=said):
        read_config(config | change)


def test_missing_and_extra_tensors_are_named(tmp_path):
    path = with_config(tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.3.mlp.gate.e_score_correction_bias"]
    tensors["model.layers.3.self_attn.indexer.wk.weight"] = torch.zeros(32, 128, dtype=torch.bfloat16)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(TensorError) as failed:
        load_model(path)
    assert "1 missing: model.layers.3.mlp.gate.e_score_correction_bias" in str(failed.value)
    assert "1 not known to this model: model.layers.3.self_attn.indexer.wk.weight" in str(failed.value)


# The released model, by its published sizes.
RELEASED = {
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "vocab_size": 154880,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "indexer_types": None,
    "max_position_embeddings": 1048576,
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
}


@pytest.fixture(scope="module")
def released():
    return read_config(json.loads((GLM / "config.json").read_text("utf-8")) | RELEASED)


def test_the_released_model_has_its_published_parameters(released):
    """753,329,921,024 with the layer behind the trunk; the router's correction is not counted."""
    c = released
    plain = sum(math.prod(spec.shape) for spec in plain_tensors(c).values() if spec.dtype != "F32")
    dense = sum(rows * columns for rows, columns in linears(c).values())
    routed = sum(rows * columns for rows, columns in experts_of(c, 3).values()) * (c.moe_layers + 1)
    assert plain + dense + routed == 753_329_921_024


def test_the_released_model_chooses_in_its_published_layers(released):
    chosen = [layer for layer in range(79) if released.selects(layer)]
    assert chosen == [0, 1, *range(2, 75, 4), 78]


def test_a_released_expert_is_a_whole_number_of_pages(released):
    record = ExpertRecord(released.hidden_size, released.moe_intermediate_size, 1)
    assert record.nbytes == record.slot_bytes == 20_054_016


def test_a_token_of_the_released_model_leaves_its_published_bytes(released):
    """95,232 in bf16 without the drafter's layer, 96,640 with it."""
    settings_of = settings(pool_tokens=128, context_tokens=128)
    drafting = replace(settings_of, engine=replace(settings_of.engine, draft="acceptance"))
    plain = replace(settings_of, engine=replace(settings_of.engine, draft="off"))
    assert context_bytes(released, plain) == 128 * 95_232
    assert context_bytes(released, drafting) == 128 * 96_640


@pytest.mark.parametrize("ranks", [1, 2])
def test_dense_weights_of_the_released_model_take_their_published_bytes(released, ranks):
    """Attention in FP8, MLPs in MXFP4: 18,985,363,008 bytes without the layer behind the trunk, of which 16,952,256,000
    are cut over the ranks; norms are kept as fp32, and kv_b as bf16."""
    tensors = {}

    def stored(name: str, dtype: str, *shape: int) -> None:
        nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
        tensors[name] = TensorInfo(name, dtype, shape, Path("model.safetensors"), 0, nbytes)

    for name, spec in plain_tensors(released).items():
        stored(name, "F32" if spec.dtype == "F32" else "BF16", *spec.shape)
    for name, (rows, columns) in linears(released).items():
        if name.endswith(KEPT):
            stored(f"{name}.weight", "BF16", rows, columns)
        elif "self_attn" in name:
            stored(f"{name}.weight", "F8_E4M3", rows, columns)
            stored(f"{name}.weight_scale", "F32", -(-rows // 128), -(-columns // 128))
        else:
            stored(f"{name}.weight", "U8", rows, columns // 2)
            stored(f"{name}.weight_scale", "U8", rows, columns // 32)
    config = json.loads((GLM / "config.json").read_text("utf-8")) | RELEASED
    checkpoint = SimpleNamespace(config=config, tensors=tensors, path=Path())
    asked = replace(settings(), engine=Engine(device="cuda"), parallel=Parallel(ranks=ranks))
    shared = (
        1_504_051_200 + 360_972_288 + 2 * 1_903_165_440 + 78 * (33_554_432 + 14_680_064 + 100_663_296) * 16388 // 16384
    )
    wider = 78 * 14_680_064 * (2 - 16388 / 16384)
    wanted = 18_985_363_008 - shared + (shared + wider) // ranks
    assert 0 <= dense_bytes(checkpoint, asked) - wanted < 4_000_000
