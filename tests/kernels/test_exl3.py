"""EXL3 against what exllamav3's own quantizer and kernels gave: decoded weights to the bit, products within fp16."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from kernels.exl3 import Exl3Matrix, decoded, dense, hadamard, linear, signs, states, table

GOLDEN = Path(__file__).parents[1] / "golden" / "exl3"
CPU = torch.device("cpu")
PRODUCT, EXPERT = 1e-3, 2e-3


def cases(file: str) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(GOLDEN / f"{file}.safetensors").items():
        case, _, part = name.partition(".")
        found.setdefault(case, {})[part] = tensor
    return found


BASIC, REALISTIC, LEGACY, EXPERTS = (cases(name) for name in ("basic", "realistic", "legacy_signs", "expert_mixed"))
ALL = BASIC | REALISTIC


def matrix(case: dict[str, Tensor], prefix: str = "") -> Exl3Matrix:
    codebook = next((name for name in ("mcg", "mul1") if prefix + name in case), "3inst")
    parts = (case[prefix + name] for name in ("trellis", "suh", "svh"))
    return Exl3Matrix(*parts, codebook, case.get(prefix + "bias"))


def off(found: Tensor, wanted: Tensor) -> float:
    """Relative distance of L2 norms."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
def test_every_state_has_its_value(codebook):
    wanted = load_file(GOLDEN / "primitives.safetensors")[f"codebook_{codebook}"]
    assert torch.equal(table(codebook, CPU).to(torch.float16).view(torch.int16), wanted.view(torch.int16))
    assert torch.equal(table(codebook, CPU), wanted.to(torch.float32))


def test_the_transform():
    p = load_file(GOLDEN / "primitives.safetensors")
    torch.testing.assert_close(hadamard(p["had_x_f32"]), p["had_y_f32"], rtol=1e-6, atol=2e-6)
    before = hadamard(p["had_x_f16"] * p["had_scale"]).to(torch.float16)
    assert torch.equal(before, p["had_pre_y_f16"])
    torch.testing.assert_close(hadamard(hadamard(p["had_x_f32"])), p["had_x_f32"], rtol=1e-6, atol=4e-6)


def test_signs_of_old_checkpoints():
    p = load_file(GOLDEN / "primitives.safetensors")
    assert torch.equal(signs(p["signs_packed"]), p["signs_unpacked"])


def test_the_words_of_a_ring():
    """By hand: the first tile's first states."""
    tile = states(BASIC["n256x128_b3_mul1"]["trellis"])[0, 0]
    assert [f"{int(state):04X}" for state in tile[:3]] == ["CB7F", "5BFC", "DFE2"]


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if "states" in case])
def test_states(name):
    assert torch.equal(states(ALL[name]["trellis"]), ALL[name]["states"].to(torch.int64) & 0xFFFF)


@pytest.mark.parametrize("name", ALL)
def test_decoded_weights_are_exact(name):
    assert torch.equal(decoded(matrix(ALL[name])), ALL[name]["w_inner"])


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if "w_dense" in case])
def test_the_whole_matrix(name):
    """The reference rounds after each of its four steps."""
    assert off(dense(matrix(ALL[name])).t(), ALL[name]["w_dense"]) < 6e-4


@pytest.mark.parametrize("name", ALL)
def test_products(name):
    case, one = ALL[name], matrix(ALL[name])
    y = linear(case["x"].to(torch.float32), one)
    assert off(y, case["y_recon_f32"]) < PRODUCT
    if "y_kern_f32" in case:
        assert off(y, case["y_kern_f32"]) < PRODUCT
    exact = case["x"].double() @ dense(one).double().t()
    bias = 0 if one.bias is None else one.bias.double()
    assert off(y, exact + bias) < PRODUCT


@pytest.mark.parametrize("name", REALISTIC)
def test_cuts_are_exact(name):
    """Columns are final values, rows parts of a sum; the reference's cuts are without bias."""
    case, one = REALISTIC[name], matrix(REALISTIC[name])
    one = Exl3Matrix(one.trellis, one.suh, one.svh, one.codebook)
    x, (inputs, outputs) = case["x"].to(torch.float32), one.shape
    whole = linear(x, one)
    columns = [slice(0, 128), slice(128, outputs)]
    parts = [linear(x, one.columns(part)) for part in columns]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-6, atol=1e-6 * float(whole.abs().max()))
    for number, part in enumerate(parts):
        assert off(part, case[f"y_cols{number}_recon_f32"]) < PRODUCT
    border = 256 if inputs == 512 else 128
    rows = [slice(0, border), slice(border, inputs)]
    sums = [linear(x[:, part], one.rows(part)) for part in rows]
    assert off(sums[0] + sums[1], whole) < 2e-6
    for number, part in enumerate(sums):
        assert off(part, case[f"y_rows{number}_recon_f32"]) < PRODUCT


def test_a_bias_is_added_once():
    name = next(name for name, case in REALISTIC.items() if "bias" in case)
    one = matrix(REALISTIC[name])
    x = REALISTIC[name]["x"].to(torch.float32)
    border = one.shape[0] // 2
    halves = [slice(0, border), slice(border, one.shape[0])]
    assert off(sum(linear(x[:, part], one.rows(part)) for part in halves), linear(x, one)) < 2e-6


@pytest.mark.parametrize("name", LEGACY)
def test_old_checkpoints_with_signs_for_scales(name):
    case = LEGACY[name]
    suh, svh = signs(case["su"]), signs(case["sv"])
    assert torch.equal(suh, case["suh_expected"])
    assert torch.equal(svh, case["svh_expected"])
    one = Exl3Matrix(case["trellis"], suh, svh, "mcg" if "mcg" in case else "3inst")
    assert off(linear(case["x"].to(torch.float32), one), case["y_recon_f32"]) < PRODUCT


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_mixed_widths(name, ranks):
    case = EXPERTS[name]
    gate, up, down = (matrix(case, f"{part}_proj.") for part in ("gate", "up", "down"))
    x, inner = case["x"].to(torch.float32), gate.shape[1]
    total = torch.zeros_like(case["y_f32"])
    for rank in range(ranks):
        part = slice(rank * inner // ranks, (rank + 1) * inner // ranks)
        hidden = silu(linear(x, gate.columns(part))) * linear(x, up.columns(part))
        y = linear(hidden, down.rows(part))
        if ranks == 2:
            assert off(y, case[f"rank{rank}.y_f32"]) < EXPERT
        total += y
    assert off(total, case["y_f32"]) < EXPERT


def test_what_is_no_such_matrix_is_refused():
    case = BASIC["n256x128_b3_mul1"]
    with pytest.raises(ValueError, match=r"3inst trellis of 2\.5 bits"):
        Exl3Matrix(torch.zeros(16, 8, 40, dtype=torch.int16), case["suh"], case["svh"], "3inst")
    with pytest.raises(ValueError, match="multiples of 128"):
        Exl3Matrix(case["trellis"][:15], case["suh"][:240], case["svh"], "mul1")
    with pytest.raises(ValueError, match="cuts through a block"):
        matrix(case).rows(slice(0, 64))
