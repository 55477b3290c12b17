"""Counts the machine instructions a weight of the expert kernels' inner loops. Needs no GPU: Triton compiles for any.

    python bench/instructions.py

A loop's instructions are one warp's; each stands for 32 lanes. So many operations a weight, times the weights of a
step, over the lane operations a device has a second: a floor beside that of the bytes.
"""

import re
import subprocess
import tempfile
from collections import Counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import experts_chunk_triton, experts_triton
from kernels.experts_triton import Tiles

POINTERS = {
    "scales": "*u8", "table": "*i32", "weights": "*fp32", "factors": "*fp32", "tiles": "*i32", "slots": "*i32",
    "order": "*i32", "out": "*fp32", "limit": "fp32",
}  # fmt: skip
# Not known to be a multiple of 16. The real gate and up's row_scales, 160, are one: no count differs by it.
ODD = {"limit", "top_k", "blocks", "count", "row_scales"}


def compiled(
    kernel: Any,
    rows: int,
    dtype: str,
    capability: int,
    num_warps: int,
    types: dict[str, str] | None = None,
    maxnreg: int | None = None,
    **constants: Any,
) -> bytes:
    """The machine code of `_gate_up` or `_down` of either file: `rows` of each part a tile, activations of `dtype`;
    `types` of arguments that are others than a decode step's."""
    block = constants["BLOCK"]
    kinds = {
        **POINTERS,
        "x": f"*{dtype}",
        "hidden": "*bf16" if dtype == "bf16" else "*fp16",
        "w2": f"tensordesc<u8[1,{rows},{block // 2}]>",
    }
    kinds |= {"w13": f"tensordesc<u8[1,2,{rows},{block // 2}]>", **(types or {})}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    whole = {
        (at,): [["tt.divisibility", 16]]
        for at, (name, kind) in enumerate(signature.items())
        if kind != "constexpr" and not kind.startswith("tensordesc") and name not in ODD
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=whole)
    options = {"num_warps": num_warps, **({"maxnreg": maxnreg} if maxnreg else {})}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return made.asm["cubin"]


def listing(cubin: bytes) -> list[str]:
    """Labels and instructions, in order."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    lines = [re.sub(r"^\s*/\*[0-9a-f]+\*/\s*", "", line) for line in text.splitlines()]
    return [line for line in lines if re.match(r"\.L\S+:|(@!?U?P\S+ +)?[A-Z][A-Za-z0-9_.]+[ ;]", line)]


def loop(lines: list[str]) -> Counter[str]:
    """Instructions of the innermost loop that multiplies matrices."""
    place = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith(".L")}
    found = []
    for at, line in enumerate(lines):
        target = re.search(r"BRA.*`\((\.L\S+)\)", line)
        if target and place.get(target[1], at) < at:
            body = [one for one in lines[place[target[1]] : at + 1] if not one.startswith(".L")]
            counts = Counter(re.sub(r"^@!?U?P\S+ +", "", one).split()[0].split(".")[0] for one in body)
            if any("MMA" in name for name in counts):
                found.append(counts)
    return min(found, key=lambda counts: counts.total())


def a_weight(rows: int, block: int, num_warps: int, counts: Counter[str]) -> float:
    """Lane operations a weight, where a warp's share of a loop's pass is of `rows` x `block` weights."""
    return counts.total() * 32 * num_warps / (rows * block)


def gate_up(capability: int, rows: int, tiles: Tiles) -> bytes:
    """The machine code of a decode step's gate and up, for so many rows."""
    columns = 8 if rows <= 8 else 16
    fixed = {"PICKS": 64, "M": columns, "WHOLE": True, "ASM": True, "CHAINED": capability >= 90}
    halves = not tiles.eight and experts_triton._halves(columns, tiles.warps)
    return compiled(
        experts_triton._gate_up, tiles.half, "fp8e4nv" if tiles.eight else "fp16", capability, tiles.warps,
        HALF=tiles.half, BLOCK=tiles.block, STAGES=tiles.stages or 4, EIGHT=tiles.eight, HALVES=halves,
        maxnreg=tiles.registers, **fixed,
    )  # fmt: skip


def down(capability: int, rows: int, tiles: Tiles) -> bytes:
    columns = 8 if rows <= 8 else 16
    fixed = {"PICKS": 64, "M": columns, "WHOLE": True, "ASM": True, "CHAINED": capability >= 90}
    return compiled(
        experts_triton._down, tiles.down_rows, "fp16", capability, tiles.down_warps, ROWS=tiles.down_rows,
        BLOCK=tiles.down_block, STAGES=tiles.down_stages, HALVES=experts_triton._halves(columns, tiles.down_warps),
        **fixed,
    )  # fmt: skip


def decode(capability: int, rows: int = 8, tiles: Tiles | None = None) -> dict[str, float]:
    """Of the two kernels of a decode step, at the shapes of DeepSeek-V4.1-Flash."""
    tiles = tiles or Tiles()
    first, second = (loop(listing(made(capability, rows, tiles))) for made in (gate_up, down))
    return {
        "gate_up": a_weight(2 * tiles.half, tiles.block, tiles.warps, first),
        "down": a_weight(tiles.down_rows, tiles.down_block, tiles.down_warps, second),
    }


def chunk_code(capability: int, tokens: int = 8192) -> tuple[bytes, bytes]:
    """Of the two kernels of a prompt chunk of so many rows."""
    tiling = experts_chunk_triton.tiling_of(tokens, capability == 90)
    fixed: dict[str, Any] = {"TOKENS": tiling.tokens, "WHOLE": True, "ASM": True}
    rows, halves = tiling.gate_up["ROWS"], tiling.gate_up["BLOCK"] // 4
    types = {"w13": f"tensordesc<i16[1,2,{rows},{halves}]>"}
    first = compiled(
        experts_chunk_triton._gate_up, rows, "bf16", capability, types=types, **tiling.gate_up, **fixed
    )  # fmt: skip
    rows, block, copied = tiling.down["ROWS"], tiling.down["BLOCK"], capability >= 90
    types = {"w2": f"tensordesc<i16[1,{rows},{block // 4}]>"}
    if copied:
        types["hidden"] = f"tensordesc<bf16[{tiling.tokens},{block}]>"
    second = compiled(
        experts_chunk_triton._down, rows, "bf16", capability, types=types, COPIED=copied, **tiling.down, **fixed
    )  # fmt: skip
    return first, second


def chunk(capability: int) -> dict[str, float]:
    """Of the two kernels of a prompt chunk, a weight and tile of tokens."""
    tiling = experts_chunk_triton.tiling_of(8192, capability == 90)
    (first, second), gate_up, down = chunk_code(capability), tiling.gate_up, tiling.down
    return {
        "gate_up": a_weight(2 * gate_up["ROWS"], gate_up["BLOCK"], gate_up["num_warps"], loop(listing(first))),
        "down": a_weight(down["ROWS"], down["BLOCK"], down["num_warps"], loop(listing(second))),
    }


def mean(of: dict[str, float]) -> float:
    """Two thirds of an expert are w1 and w3."""
    return (2 * of["gate_up"] + of["down"]) / 3


def main() -> None:
    print("| device | decode: gate and up, down, both | chunk: gate and up, down, both |\n|---|---|---|")
    for capability in (90, 120):
        cells = [[*of.values(), mean(of)] for of in (decode(capability), chunk(capability))]
        print(f"| sm_{capability} | " + " | ".join(", ".join(f"{one:.2f}" for one in cell) for cell in cells) + " |")
    print("\n| sm_90, rows | decode, tiles | gate and up, down |\n|---|---|---|")
    for rows, tiles in ((16, Tiles(warps=2)), (16, Tiles()), (8, Tiles(eight=True)), (8, Tiles(eight=True, half=64))):
        what = f"{8 if tiles.eight else 16} bits, {2 * tiles.half} rows, {tiles.warps} warps"
        print(f"| {rows} | {what} | " + ", ".join(f"{one:.2f}" for one in decode(90, rows, tiles).values()) + " |")


if __name__ == "__main__":
    main()
