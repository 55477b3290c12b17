"""GLM-5.3 on a CUDA device: against the reference without rounding, and against itself on a CPU with it."""

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from tests.models.glm53_checkpoint import fp8, mxfp4, trellis, write
from tests.models.rig import CPU, GLM, load_model, settings
from tests.models.test_glm53_golden import LOGITS, serve
from tided.models.glm53.ablation import Projection
from tided.models.glm53.block import Block
from tided.models.glm53.captured import DecodeSteps
from tided.settings import Engine

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
GOLDEN = load_file(GLM / "golden_main.safetensors")


def on_cuda(path=GLM, numerics: str = "native", **cache):
    base = settings(path, numerics=numerics)
    asked = replace(base, engine=Engine(device="cuda", draft="3"), cache=replace(base.cache, **cache))
    return load_model(path, config=asked, device=CUDA)


@pytest.mark.parametrize("chunk", [200, 64])
def test_without_rounding_it_is_the_reference(chunk):
    logits = serve(on_cuda(numerics="fp32"), GOLDEN["tokens"].long().to(CUDA), chunk).cpu()
    torch.testing.assert_close(logits[136:], GOLDEN["logits_tail"], rtol=0, atol=LOGITS)


RELEASES = {
    "bf16": {},
    "FP8": {".experts.": mxfp4, "": fp8("weight_scale_inv")},
    "MXFP4": {"mlp": mxfp4, "self_attn": fp8("weight_scale")},
    "trellises": {".experts.": mxfp4, "o_proj": trellis, "layers.0.mlp.down_proj": trellis},
}


@pytest.mark.parametrize("cache", [{}, {"dtype": "fp8"}], ids=["bf16 rows", "fp8 rows"])
@pytest.mark.parametrize("name", RELEASES)
def test_the_first_layers_are_those_of_a_cpu(tmp_path, monkeypatch, name, cache):
    """A prompt, then rows one at a time and five at once, as spans (`test_glm53_steps` has fixed shapes); behind
    the first layers a random model chooses otherwise. Rows of the second layer that do so are few."""
    path = write(tmp_path, RELEASES[name])[0] if RELEASES[name] else GLM
    base = settings(path)
    asked = replace(base, cache=replace(base.cache, **cache))
    seen: dict[str, list[torch.Tensor]] = {}
    real = Block.forward

    def watch(self, step, x):
        result = real(self, step, x)
        seen.setdefault(f"{x.device.type}{self.layer}", []).append(result.cpu())
        return result

    monkeypatch.setattr(Block, "forward", watch)
    monkeypatch.setattr(DecodeSteps, "serve", lambda *_: False)
    serve(load_model(path, config=asked, device=CPU), GOLDEN["tokens"].long())
    serve(on_cuda(path, **cache), GOLDEN["tokens"].long().to(CUDA))
    for layer, most in ((0, 0.02), (1, 0.04)):
        wanted, got = (torch.cat(seen[f"{device}{layer}"]) for device in ("cpu", "cuda"))
        error = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
        print(f"{name}, layer {layer}: {error.median():.4f}, all rows {(got - wanted).norm() / wanted.norm():.4f}")
        assert error.median() < most


def test_a_projected_row_does_not_depend_on_its_company():
    draw = torch.Generator().manual_seed(3)
    d, y = torch.randn(6144, generator=draw), torch.randn(16, 6144, generator=draw).to(CUDA)
    edit = Projection((d / d.norm()).to(CUDA), 1.5)
    for rows in range(1, 17):
        assert torch.equal(edit(y[:rows].clone())[:1], edit(y[:1].clone()))


def test_drafts_and_rows_taken_back(tmp_path):
    """Alone and beside another lane: the same bits."""
    model, tokens = on_cuda(dtype="fp8"), GOLDEN["tokens"].long().to(CUDA)

    def greedy(place, logits):
        return logits.argmax(1)

    lanes = [model.open_lane(index) for index in range(3)]
    for lane in lanes:
        model.prefill(lane, tokens[:100], "none")
    model.decode([lanes[0]], tokens[100:104], [4])
    model.keep(lanes[0], 2)
    model.decode([lanes[1]], tokens[100:101])
    together = model.decode([lanes[1], lanes[2]], torch.cat([tokens[101:102], tokens[100:101]]))
    alone = model.propose([lanes[0]], tokens[102:103], greedy)
    other = model.propose([lanes[1]], tokens[102:103], greedy)
    assert torch.equal(alone.ids, other.ids)
    assert bool(torch.isfinite(together).all())
