"""What is refused: checkpoints, configurations and settings that do not fit, each by name."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.formats import fp8_blocks
from packers.shards import Checkpoint
from tests.models.random_checkpoint import golden_config, released_config, write_checkpoint
from tests.models.rig import CPU, GOLDEN, full_bank, load_model, settings
from tided.errors import ConfigError, ContextOverflowError, DataError, TensorError, UnavailableError
from tided.models.base import through
from tided.models.deepseek_v41 import weights
from tided.models.deepseek_v41.config import read_config
from tided.models.deepseek_v41.names import expected_tensors
from tided.models.deepseek_v41.weights import Weights
from tided.models.families import family_of
from tided.models.parallel import Alone


def load_as_it_is(path):
    """Loads with the golden checkpoint's experts, so that only the dense tensors are under test."""
    checkpoint = Checkpoint.open(path)
    bank = full_bank(Checkpoint.open(GOLDEN))
    return family_of(checkpoint.config).load(checkpoint, settings(path), Alone(), bank, CPU)


def yarn(**changes):
    return {"rope_scaling": golden_config()["text_config"]["rope_scaling"] | changes}


@pytest.fixture
def altered(tmp_path):
    """Writes the golden model's tensors with some changed."""

    def write(change):
        path = write_checkpoint(tmp_path, golden_config())
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
        return path

    return write


def test_a_loaded_model_holds_no_file_in_memory(altered):
    path = altered(lambda tensors: None)
    model = load_as_it_is(path)
    assert model.shape.vocab_size == 512
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_share_of_an_fp8_tensor_is_cut_before_it_is_computed(monkeypatch):
    seen = []
    monkeypatch.setattr(weights, "fp8_blocks", lambda w, s: seen.append((w.shape, s.shape)) or fp8_blocks(w, s))
    reader = Weights(Checkpoint.open(GOLDEN), Alone(), CPU, prefix="layers.0.attn.")
    whole = reader.fp8("wq_b")
    assert torch.equal(reader.fp8("wq_b", rows=slice(64, 128)), whole[64:128])
    assert torch.equal(reader.fp8("wq_b", columns=slice(32, 64)), whole[:, 32:64])
    n, k = whole.shape
    assert seen == [((n, k), (n // 32, k // 32)), ((64, k), (2, k // 32)), ((n, 32), (n // 32, 1))]
    with pytest.raises(ValueError, match="48 to 96 cuts through a block"):
        reader.fp8("wq_b", rows=slice(48, 96))


def test_inventory_matches_the_golden_checkpoint():
    checkpoint = Checkpoint.open(GOLDEN)
    checkpoint.require(expected_tensors(read_config(checkpoint.config)))
    assert len(checkpoint.tensors) == 1052


def test_inventory_of_the_released_checkpoint():
    """Its 96,085 tensors and the bytes of its shards, 133,120 less if the vision norms are bf16."""
    width = {"BF16": 2, "F32": 4, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
    specs = expected_tensors(read_config(released_config())).values()
    assert len(specs) == 96085
    total = sum(math.prod(s.shape) * width[s.dtype if isinstance(s.dtype, str) else s.dtype[0]] for s in specs)
    assert total == 510_286_023_000


def test_records_of_the_released_experts():
    family = family_of(released_config())
    assert family.expert_record(Checkpoint(Path(), released_config(), ()), 1).nbytes == 18_800_640
    assert family.expert_record(Checkpoint(Path(), released_config(), ()), 2).share == 1152
    assert family.shape(released_config()).moe_layers == 40


@pytest.mark.parametrize("name", ["layers.3.attn.wq_b.scale", "mtp.2.markov_head.head.weight", "vision.norm.weight"])
def test_a_missing_tensor(altered, name):
    with pytest.raises(TensorError, match=f"1 missing: {name}"):
        load_as_it_is(altered(lambda tensors: tensors.pop(name)))


def test_an_extra_tensor(altered):
    path = altered(lambda tensors: tensors.update({"layers.5.attn.ape": torch.zeros(2)}))
    with pytest.raises(TensorError, match=r"1 not known to this model: layers.5.attn.ape"):
        load_as_it_is(path)


def test_a_misshapen_tensor(altered):
    path = altered(lambda tensors: tensors.update({"layers.0.attn.attn_sink": torch.zeros(7)}))
    with pytest.raises(TensorError, match=r"layers.0.attn.attn_sink \(is F32 \[7\], must be F32 \[8\]\)"):
        load_as_it_is(path)


def test_a_tensor_of_another_dtype(altered):
    path = altered(lambda tensors: tensors.update({"norm.weight": torch.zeros(128)}))
    with pytest.raises(TensorError, match=r"norm\.weight \(is F32"):
        load_as_it_is(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 48}, "head_dim must be a multiple of 32"),
        ({"head_dim": "64"}, "head_dim"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok exceeds"),
        ({"hc_mult": 0}, "hc_mult must be at least 1"),
        ({"compress_ratios": [0] * 10}, "10 entries for 13 blocks"),
        ({"compress_ratios": [0, 0, 4, 4, 4, 4, 1, 1, 1, 1, 0, 0, 0]}, "compress_ratios other than"),
        ({"compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0], "kv_source_layer_ids": [2, 6]}, "another ratio"),
        ({"kv_source_layer_ids": [2, 4, 5]}, "must select among them"),
        ({"index_source_layer_ids": [2, 4, 6, 12]}, "outside the model"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"o_groups": 3}, "o_groups must divide"),
        ({"swiglu_limit": 0.0}, "swiglu_limit must be positive"),
        ({"rms_norm_eps": 0.0, "hc_eps": -1e-6}, "rms_norm_eps, hc_eps must be positive"),
        ({"routed_scaling_factor": -1.5}, "routed_scaling_factor must be positive"),
        ({"rope_theta": 1}, "rope_theta must be above 1"),
        ({"compress_rope_theta": 1.0}, "compress_rope_theta must be above 1"),
        ({"compress_rope_theta": math.nan}, "compress_rope_theta must be above 1"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size must be 2 to 8"),
        ({"engram_max_ngram_size": 9}, "engram_max_ngram_size must be 2 to 8"),
        ({"engram_n_heads": 10**6}, "engram_n_heads must be at most 64"),
        (yarn(factor=0.5), "factor must be at least 1"),
        (yarn(factor=math.inf), "factor must be at least 1"),
        (yarn(beta_fast=0), "beta_slow and beta_fast must be positive and rise"),
        (yarn(beta_slow=0), "beta_slow and beta_fast must be positive and rise"),
        (yarn(beta_slow=32), "beta_slow and beta_fast must be positive and rise"),
        (yarn(original_max_position_embeddings=0), "original_max_position_embeddings must be at least 1"),
    ],
)
def test_an_impossible_configuration(change, message):
    with pytest.raises(DataError, match=message):
        read_config(golden_config(**change))


def test_a_missing_key_is_named():
    config = golden_config()
    del config["text_config"]["q_lora_rank"]
    with pytest.raises(DataError, match="q_lora_rank"):
        read_config(config)


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}, {"model_type": 7}])
def test_an_unknown_family(config):
    with pytest.raises(DataError, match=r"(?s)is not known.*deepseek_v41"):
        family_of(config)


def test_expert_names_follow_the_record():
    names = family_of(golden_config()).expert_names(Checkpoint(Path(), golden_config(), ()))(3, 7)
    assert names[0] == "layers.3.ffn.experts.7.w1.weight"
    assert [n.split(".")[-2:] for n in names] == [[w, kind] for kind in ("weight", "scale") for w in ("w1", "w3", "w2")]


def test_another_tokenizer_is_refused(tmp_path):
    path = write_checkpoint(tmp_path, golden_config())
    text = (path / "tokenizer.json").read_text("utf-8")
    (path / "tokenizer.json").write_text(text.replace("<|noise|>", "<|USER|>"), "utf-8")
    with pytest.raises(DataError, match=r"415 compressed ids for Engram, config\.json states 416"):
        load_as_it_is(path)


def test_a_context_longer_than_the_model():
    with pytest.raises(ConfigError, match="context_tokens 2000 exceeds the model's 1024"):
        load_model(config=settings(context_tokens=2000))


def test_past_the_context():
    model = load_model(config=settings(context_tokens=16))
    lane = model.open_lane(0)
    model.prefill(lane, torch.arange(16), "none")
    with pytest.raises(ContextOverflowError):
        model.decode([lane], torch.tensor([3]))
    assert lane.position == 16


def test_a_pool_that_is_full_leaves_lanes_as_they_were(prompt):
    model = load_model(config=settings(pool_tokens=256), numerics="fp32")
    first, second = model.open_lane(0), model.open_lane(1)
    with pytest.raises(UnavailableError, match="pool_tokens"):
        model.open_lane(2)
    model.prefill(first, prompt, "none")
    with pytest.raises(UnavailableError):
        model.prefill(first, prompt, "none")
    assert first.position == 101
    wanted = model.decode([first], torch.tensor([5]))
    model.close_lane(first)
    model.prefill(second, prompt, "none")
    assert torch.equal(model.decode([second], torch.tensor([5])), wanted)


def test_where_every_row_is_asked_for_every_row_takes_the_whole_path(prompt):
    bounded, full = (load_model(decoder_replay=replay) for replay in ("bounded", "full"))
    wanted = full.prefill(full.open_lane(0), prompt, "all")
    assert len(wanted) == len(prompt)
    assert torch.equal(bounded.prefill(bounded.open_lane(0), prompt, "all"), wanted)
    with torch.inference_mode():
        rows = through(bounded.prefill_by_layer(bounded.open_lane(1), prompt))
        assert torch.equal(bounded.logits(rows), wanted)
