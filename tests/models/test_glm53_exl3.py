"""GLM-5.3 with everything in EXL3, as its converter writes it, against the same weights decoded."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import exl3, packed
from kernels.numerics import FP32
from packers.shards import Checkpoint
from tided.engine.offline import logits
from tided.errors import DataError, TensorError
from tided.models.glm53.config import read_config
from tided.models.glm53.names import Cut, linears
from tided.models.glm53.weights import Weights, held_bytes
from tided.models.parallel import Alone

EXL3 = Path(__file__).parents[1] / "golden" / "exl3-checkpoint"
TOKENS = [(37 * i * i + 11 * i) % 512 for i in range(40)]


@pytest.fixture(scope="module")
def decoded(tmp_path_factory) -> Path:
    """The checkpoint with its routed experts in bf16."""
    path, found, plain = tmp_path_factory.mktemp("decoded"), load_file(EXL3 / "model.safetensors"), {}
    for name, tensor in found.items():
        matrix, _, leaf = name.rpartition(".")
        if ".mlp.experts." not in name:
            plain[name] = tensor
        elif leaf == "trellis":
            suh, svh = found[f"{matrix}.suh"], found[f"{matrix}.svh"]
            plain[f"{matrix}.weight"] = exl3.dense(exl3.Exl3Matrix(tensor, suh, svh, "mul1")).to(torch.bfloat16)
    save_file(plain, path / "model.safetensors")
    shutil.copyfile(EXL3 / "config.json", path / "config.json")
    return path


def off(found, wanted) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_a_prompt_and_steps_behind_it_are_those_of_the_decoded_weights(decoded):
    """bf16 holds a weight to 2^-9."""
    wanted = logits(decoded, TOKENS, decode=4, chunk=16, numerics="fp32")
    whole = logits(EXL3, TOKENS, decode=4, chunk=16, numerics="fp32")
    assert off(whole, wanted) < 4e-3
    native = logits(EXL3, TOKENS, decode=4, chunk=16)
    assert off(native, whole) < 2e-2
    assert not torch.equal(native, whole)


def test_chunks_and_steps_are_one_computation():
    whole = logits(EXL3, TOKENS, numerics="fp32")
    torch.testing.assert_close(logits(EXL3, TOKENS, decode=8, chunk=8, numerics="fp32"), whole, rtol=0, atol=2e-4)


def test_fewer_residents_change_the_answer():
    """Substitution, within a budget of bytes."""
    assert off(logits(EXL3, TOKENS, resident=8, numerics="fp32"), logits(EXL3, TOKENS, numerics="fp32")) > 1e-2


def test_trellises_stay_trellises_where_they_are_padded():
    """As on a GPU: 192 outputs of kv_a are stored as 256. Every layer takes the bytes that were told before."""
    checkpoint = Checkpoint.open(EXL3)
    shapes = linears(read_config(checkpoint.config))
    stored, wide = (Weights(checkpoint, Alone(), torch.device("cpu"), shapes, widened) for widened in (False, True))
    for name, shape in shapes.items():
        if f"{name}.trellis" in checkpoint.tensors or f"{name}.weight" in checkpoint.tensors:
            held = stored.linear(name)
            assert isinstance(held, packed.Exl3) == (f"{name}.trellis" in checkpoint.tensors)
            assert packed.nbytes(held) == held_bytes(checkpoint, name, shape, Cut(), widened=False)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa"
    kv_a, meant = stored.linear(name), packed.dense(wide.linear(name))
    x = torch.randn(3, meant.shape[1], generator=torch.Generator().manual_seed(1))
    assert kv_a.shape == meant.shape == (192, 256)
    assert torch.equal(packed.dense(kv_a), meant)
    assert off(packed.product(x, kv_a, FP32), x @ meant.t()) < 1e-5


def test_a_matrix_of_heads_is_decoded_once():
    """For steps on a GPU: whatever it is stored in, bf16."""
    checkpoint = Checkpoint.open(EXL3)
    shapes = linears(read_config(checkpoint.config))
    stored = Weights(checkpoint, Alone(), torch.device("cpu"), shapes, widened=False)
    name, half = "model.layers.0.self_attn.q_b_proj", slice(128, 256)
    whole = packed.dense(stored.linear(name))
    assert torch.equal(stored.whole(name, torch.bfloat16), whole.bfloat16())
    part = stored.whole(name, torch.bfloat16, rows=half)
    assert torch.equal(part, whole[half].bfloat16())
    told = held_bytes(checkpoint, name, shapes[name], Cut(rows=2), widened=False, whole=torch.bfloat16)
    assert part.nbytes == told


def test_one_expert_in_another_format_is_refused(decoded, tmp_path):
    tensors, other = load_file(EXL3 / "model.safetensors"), load_file(decoded / "model.safetensors")
    name = "model.layers.2.mlp.experts.5.up_proj"
    mixed = {key: value for key, value in tensors.items() if not key.startswith(f"{name}.")}
    save_file(mixed | {f"{name}.weight": other[f"{name}.weight"]}, tmp_path / "model.safetensors")
    shutil.copyfile(EXL3 / "config.json", tmp_path / "config.json")
    with pytest.raises(TensorError, match="up_proj"):
        logits(tmp_path, TOKENS)


def test_a_rank_sliced_export_is_not_served(tmp_path):
    tensors = load_file(EXL3 / "model.safetensors")
    extra = {"model.layers.1.mlp.experts.0.gate_proj.rank1.trellis": torch.zeros(16, 8, 32, dtype=torch.int16)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((EXL3 / "config.json").read_text())))
    with pytest.raises(DataError, match="rank-sliced"):
        logits(tmp_path, TOKENS)
