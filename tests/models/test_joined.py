"""Routed experts out of one directory, all other weights out of another."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from packers.joined import experts_of
from packers.shards import Checkpoint
from tests.models.glm53_checkpoint import fp8, mxfp4, write
from tests.models.rig import GLM, GOLDEN, full_bank, settings
from tided.errors import ConfigError, DataError, TensorError
from tided.models.families import family_of, open_checkpoint
from tided.models.parallel import Alone

TOKENS = load_file(GLM / "golden_main.safetensors")["tokens"].long()
CPU = torch.device("cpu")


def directory(path: Path, tensors, source: Path = GLM, **changes) -> Path:
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((source / "config.json").read_text("utf-8")) | changes
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    for extra in source.glob("tokenizer*"):
        shutil.copyfile(extra, path / extra.name)
    return path


def is_expert(name: str) -> bool:
    return ".experts." in name


def only(tensors, chosen):
    return {name: tensor for name, tensor in tensors.items() if chosen(name)}


@pytest.fixture
def stored():
    return load_file(GLM / "model.safetensors")


@pytest.fixture
def pair(tmp_path, stored):
    """The experts' directory holds other dense weights too, the dense one other experts: neither is looked at."""
    other = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    experts = directory(tmp_path / "experts", other | only(stored, is_expert))
    dense = directory(tmp_path / "dense", only(stored, lambda name: not is_expert(name)) | only(other, is_expert))
    return experts, dense


def asked(path: Path, dense: Path | None = None, draft: str = "off"):
    found = settings(path, numerics="fp32", dense=str(dense or ""))
    return replace(found, engine=replace(found.engine, draft=draft))


def loaded(path: Path, dense: Path | None = None, draft: str = "off"):
    config = asked(path, dense, draft)
    checkpoint = open_checkpoint(config.model)
    return family_of(checkpoint.config).load(checkpoint, config, Alone(), full_bank(checkpoint), CPU)


def answers(path: Path, dense: Path | None = None, draft: str = "off", tokens=TOKENS[:60]):
    model = loaded(path, dense, draft)
    lane = model.open_lane(0)
    found = [model.prefill(lane, tokens, "all")]
    if draft != "off":
        found.append(model.propose([lane], tokens[-1:], lambda place, logits: logits.argmax(1)).logits[0])
    return torch.cat(found)


@pytest.mark.parametrize("draft", ["off", "3"])
def test_each_weight_comes_from_its_directory(pair, draft):
    assert torch.equal(answers(*pair, draft), answers(GLM, None, draft))
    assert not torch.equal(answers(pair[0]), answers(GLM))


def test_each_directory_stores_them_in_its_own_way(tmp_path):
    """Experts in MXFP4, attention in FP8 elsewhere."""
    experts, _ = write(tmp_path / "a", {".experts.": mxfp4})
    dense, _ = write(tmp_path / "b", {"self_attn": fp8("weight_scale")})
    both, _ = write(tmp_path / "c", {".experts.": mxfp4, "self_attn": fp8("weight_scale")})
    assert torch.equal(answers(experts, dense), answers(both))


def test_another_family_can_too(tmp_path):
    checkpoint = Checkpoint.open(GOLDEN)
    tensors = {name: checkpoint.read(name).clone() for name in checkpoint.tensors}
    zero = {name: torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype) for name, tensor in tensors.items()}
    experts = directory(tmp_path / "experts", zero | only(tensors, is_expert), GOLDEN)
    dense = directory(tmp_path / "dense", only(tensors, lambda name: not is_expert(name)), GOLDEN)
    tokens = torch.arange(3, 40)
    assert torch.equal(answers(experts, dense, tokens=tokens), answers(GOLDEN, tokens=tokens))


@pytest.mark.parametrize("beside", ["dense", "experts"])
def test_the_drafters_experts_may_be_in_either(tmp_path, stored, beside):
    def drafts(name: str) -> bool:
        return is_expert(name) and name.startswith("model.layers.6.")

    parts = {"experts": only(stored, is_expert), "dense": only(stored, lambda name: not is_expert(name))}
    for side in parts:
        if side != beside:
            parts[side] = only(parts[side], lambda name: not drafts(name))
    parts[beside] |= only(stored, drafts)
    experts, dense = (directory(tmp_path / side, tensors) for side, tensors in parts.items())
    assert torch.equal(answers(experts, dense, "3"), answers(GLM, None, "3"))


def test_without_the_drafter_in_the_dense_directory_there_are_no_drafts(tmp_path, stored):
    experts = directory(tmp_path / "experts", only(stored, is_expert))
    trunk = only(stored, lambda name: not is_expert(name) and not name.startswith("model.layers.6."))
    dense = directory(tmp_path / "dense", trunk)
    assert torch.equal(answers(experts, dense), answers(GLM))
    with pytest.raises(TensorError, match=r"tensor model\.layers\.6\..* is missing") as failed:
        loaded(experts, dense, "3")
    assert str(dense) in str(failed.value)


@pytest.mark.parametrize(
    ("side", "lost", "said"),
    [
        (1, "model.layers.2.input_layernorm.weight", "1 missing: model.layers.2.input_layernorm.weight"),
        (1, "model.layers.2.self_attn.o_proj.weight", "tensor model.layers.2.self_attn.o_proj.weight is missing"),
        (0, "model.layers.3.mlp.experts.2.up_proj.weight", "model.layers.3.mlp.experts.2.up_proj.weight is missing"),
    ],
)
def test_what_is_missing_is_named_with_its_directory(pair, side, lost, said):
    """Though the other directory has one of that name."""
    file = pair[side] / "model.safetensors"
    tensors = load_file(file)
    del tensors[lost]
    save_file(tensors, file)
    with pytest.raises((TensorError, KeyError)) as failed:
        loaded(*pair)
    assert said in str(failed.value)
    assert str(pair[side]) in str(failed.value)


def test_extra_tensors_are_named_with_their_directory(pair, stored):
    save_file(only(stored, lambda name: not is_expert(name)) | {"more": torch.zeros(2)}, pair[1] / "model.safetensors")
    with pytest.raises(TensorError, match="1 not known to this model: more") as failed:
        loaded(*pair)
    assert str(pair[1]) in str(failed.value)


def test_dense_weights_of_another_model_are_refused(tmp_path, pair, stored):
    other = directory(tmp_path / "other", stored, rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
    with pytest.raises(DataError, match=r"another model than .*rope_parameters"):
        open_checkpoint(asked(pair[0], other).model)
    with pytest.raises(DataError, match="is no checkpoint of a glm_moe_dsa model"):
        open_checkpoint(asked(pair[0], GOLDEN).model)


def test_a_configuration_that_says_the_same_otherwise_is_the_same(tmp_path, pair, stored):
    """Types of layers by rule or by list, a drafter that was left out, what the tool that stored it adds."""
    types = ["full", "full", "shared", "shared", "full", "shared"]
    told = {"num_nextn_predict_layers": 0, "indexer_types": types, "quantization_config": {"quant_method": "exl3"}}
    other = directory(tmp_path / "other", stored, **told)
    assert open_checkpoint(asked(pair[0], other).model).dense.path == other


def test_both_name_what_is_served_and_packs_are_of_one(pair, stored):
    experts, dense = pair
    opened = open_checkpoint(asked(experts, dense).model)
    alone = Checkpoint.open(experts)
    assert experts_of(opened).identity() == alone.identity() != opened.identity()
    before = opened.served_identity()
    changed = only(stored, lambda name: not is_expert(name))
    changed["model.norm.weight"] = changed["model.norm.weight"] * 2
    save_file(changed, dense / "model.safetensors")
    after = open_checkpoint(asked(experts, dense).model)
    assert after.served_identity() != before
    assert experts_of(after).identity() == alone.identity()


def test_no_directory_there(tmp_path):
    with pytest.raises((DataError, ConfigError), match="there is no such directory"):
        open_checkpoint(asked(GLM, tmp_path / "nowhere").model)
