"""Products by packed weights in Triton against their reference: run by `test_packed_triton.py` in the interpreter, and
on a GPU. Errors are relative, in the Euclidean norm.

python tests/kernels/packed_cases.py cpu|cuda"""

import sys

import torch

from kernels import exl3, packed, packed_triton
from kernels.numerics import WEIGHTS_ONLY
from kernels.packed import Exl3, Fp8, Linear, Mxfp4, Plain, Stacked

DEVICE = torch.device(sys.argv[1])
LARGE = DEVICE.type == "cuda"
N, K = (6144, 2048) if LARGE else (256, 384)
draw = torch.Generator().manual_seed(7)


def fp8(rows: int = N, skipped: tuple[int, int] = (0, 0)) -> Fp8:
    codes = torch.randn(rows, K, generator=draw).to(torch.float8_e4m3fn).view(torch.uint8)
    blocks = [-(-(length + skip) // 128) for length, skip in zip((rows, K), skipped, strict=True)]
    return Fp8(codes, 0.01 + torch.rand(*blocks, generator=draw), skipped)


def mxfp4() -> Mxfp4:
    codes = torch.randint(0, 256, (N, K // 2), generator=draw).to(torch.uint8)
    return Mxfp4(codes, torch.randint(118, 132, (N, K // 32), generator=draw).to(torch.uint8))


def trellis(half_bits: int, codebook: exl3.Codebook, outputs: int = N) -> Exl3:
    words = torch.randint(-(1 << 15), 1 << 15, (K // 16, N // 16, 8 * half_bits), generator=draw).to(torch.int16)
    suh, svh = ((torch.randn(size, generator=draw) / 8).half() for size in (K, N))
    return Exl3(exl3.Exl3Matrix(words, suh, svh, codebook), outputs)


def bf16(rows: int = N) -> Plain:
    return Plain(torch.randn(rows, K, generator=draw).bfloat16())


def fp16(rows: int = N) -> Plain:
    """Of every size, down to the least."""
    weight = torch.randn(rows, K, generator=draw) * torch.exp2(-24.0 * torch.rand(rows, 1, generator=draw))
    return Plain(weight.half())


CASES: dict[str, Linear] = {
    "bf16": bf16(),
    "bf16, few outputs": bf16(40),
    "fp16": fp16(),
    "fp16, few outputs": fp16(40),
    "fp8": fp8(),
    "fp8 cut inside a block": fp8(200, (40, 96)),
    "mxfp4": mxfp4(),
    "exl3, 3 bits, mcg": trellis(6, "mcg"),
    "exl3, 5 bits, mcg": trellis(10, "mcg"),
    "exl3, 6 bits, 3inst": trellis(12, "3inst"),
    "exl3, 2.5 bits, mul1": trellis(5, "mul1"),
    "exl3, padded": trellis(6, "mcg", N - 64),
    "stacked": Stacked((fp8(128), bf16(64))),
}


def there(weight: Linear) -> Linear:
    match weight:
        case Plain(held):
            return Plain(held.to(DEVICE))
        case Fp8(codes, scale, skipped):
            return Fp8(codes.to(DEVICE), scale.to(DEVICE), skipped)
        case Mxfp4(codes, scale):
            return Mxfp4(codes.to(DEVICE), scale.to(DEVICE))
        case Exl3(m, outputs):
            held = exl3.Exl3Matrix(m.trellis.to(DEVICE), m.suh.to(DEVICE), m.svh.to(DEVICE), m.codebook)
            return Exl3(held, outputs)
        case Stacked(parts):
            return Stacked(tuple(map(there, parts)))


ALL_ROWS = "exl3, 3 bits, mcg"  # of trellises; the interpreter takes the others by few rows


def main() -> None:
    for name, weight in CASES.items():
        held = there(weight)
        slow = not LARGE and isinstance(weight, Exl3) and name != ALL_ROWS
        for rows in (3, 70) if slow else (1, 3, 16, 70):
            x = torch.randn(rows, K, generator=draw).bfloat16().float()
            wanted = packed.product(x, weight, WEIGHTS_ONLY)
            got = packed_triton.product(x.to(DEVICE), held).cpu()
            error = float((got - wanted).norm() / wanted.norm())
            print(f"  {name}, {rows} rows: {error:.1e}")
            assert error < (1e-3 if isinstance(weight, Exl3) else 2e-5), f"{name}, {rows} rows: {error:.2e}"
            if rows == 16 and (LARGE or not isinstance(weight, Exl3)):  # the interpreter's depend on a row's place
                few = packed_triton.product(x[5:8].to(DEVICE), held).cpu()
                assert torch.equal(few, got[5:8]), f"{name}: a row depends on its company"
                if LARGE:
                    assert torch.equal(packed.product(x.to(DEVICE), held, WEIGHTS_ONLY).cpu(), got)


if __name__ == "__main__":
    main()
    print("ok")
