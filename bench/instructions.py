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

POINTERS = {
    "scales": "*u8", "table": "*i32", "weights": "*fp32", "factors": "*fp32", "tiles": "*i32", "slots": "*i32",
    "order": "*i32", "out": "*fp32", "limit": "fp32",
}  # fmt: skip
ODD = {"limit", "top_k", "blocks", "count", "row_scales"}  # not known to be a multiple of 16


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
    kinds = {**POINTERS, "x": f"*{dtype}", "hidden": f"*{dtype}", "w2": f"tensordesc<u8[1,{rows},{block // 2}]>"}
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


def decode(capability: int) -> dict[str, float]:
    """Of the two kernels of a decode step, at the shapes of DeepSeek-V4.1-Flash."""
    fixed = {"PICKS": 64, "M": 8, "WHOLE": True, "ASM": True, "CHAINED": capability >= 90}
    gate_up, down, rows = experts_triton.GATE_UP, experts_triton.DOWN, experts_triton.DOWN_ROWS
    warps = experts_triton._warps(fixed["M"])
    first = compiled(experts_triton._gate_up, 32, "fp16", capability, STAGES=3, num_warps=warps, **gate_up, **fixed)
    second = compiled(experts_triton._down, rows, "fp16", capability, ROWS=rows, **down, **fixed)
    return {
        "gate_up": a_weight(64, gate_up["BLOCK"], warps, loop(listing(first))),
        "down": a_weight(rows, down["BLOCK"], down["num_warps"], loop(listing(second))),
    }


def chunk_code(capability: int) -> tuple[bytes, bytes]:
    """Of the two kernels of a prompt chunk."""
    tiling = experts_chunk_triton.tiling_of(8192, capability == 90)
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


if __name__ == "__main__":
    main()
