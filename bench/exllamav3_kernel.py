"""exllamav3's own kernels of a mixture's decode step, unmodified, from its wheel: the two launches that its engine runs
for up to eight rows. Only the widths and the codebook that are compared are compiled.

    pip download --no-deps exllamav3==1.6.5
    python bench/exllamav3_kernel.py exllamav3-1.6.5-py3-none-any.whl scratch/exllamav3      builds them beforehand

They take one width for gate and up, and one for down, in all experts of a launch: `Experts` launches once a kind, each
for its own experts alone, and adds what they give."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from kernels.exl3_record import Exl3Record, Stored
from kernels.record import PAGE_BYTES
from minis.glm53.exllamav3 import unpacked

ROWS = 8  # of a launch, at most
WIDTHS, CODEBOOK = (2, 3, 4), 1  # the second codebook, mcg
SILU, NO_LIMIT = 0, 0.0
SOURCES = ("quant/exl3_moe_coop.cu", "quant/exl3_devctx.cu")
BINDINGS = """
#include <torch/extension.h>
#include "quant/exl3_moe_coop.cuh"
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("experts", &exl3_moe_coop);
  m.def("counters", &exl3_moe_coop_ctr_len);
}
"""
WIDTH = """
#include "quant/comp_units/exl3_moe_coop_instances.cuh"
#include "quant/exl3_moe_coop_kernel.cuh"
using namespace exl3_moe_coop_ns;
MoeCoopKernel exl3_moe_coop_kernel_a_k{k}(int cb, int inputs, bool wide) {{
  const int bytes = smem_a_bytes<{k}>(inputs);
  if (wide) return {{ (void*) exl3_moe_coop_a_kernel<{k}, {cb}, true>, bytes }};
  return {{ (void*) exl3_moe_coop_a_kernel<{k}, {cb}, false>, bytes }};
}}
MoeCoopKernel exl3_moe_coop_kernel_b_k{k}(int cb, bool wide) {{
  const int bytes = smem_b_bytes<{k}>();
  if (wide) return {{ (void*) exl3_moe_coop_b_kernel<{k}, {cb}, true>, bytes }};
  return {{ (void*) exl3_moe_coop_b_kernel<{k}, {cb}, false>, bytes }};
}}
"""


def written(native: Path, folder: Path) -> list[Path]:
    """The sources: its own, bindings, a file for each width, and one that answers for the widths that are not built.
    What is there already is left alone, so that nothing is compiled twice."""
    others = '#include "quant/comp_units/exl3_moe_coop_instances.cuh"\n'
    for width in range(1, 9):
        if width not in WIDTHS:
            others += f"MoeCoopKernel exl3_moe_coop_kernel_a_k{width}(int, int, bool) {{ return {{}}; }}\n"
            others += f"MoeCoopKernel exl3_moe_coop_kernel_b_k{width}(int, bool) {{ return {{}}; }}\n"
    for width in (1, 2, 3):  # and a half
        others += f"MoeCoopKernel exl3_moe_coop_kernel_a_h{width}(int, bool) {{ return {{}}; }}\n"
        others += f"MoeCoopKernel exl3_moe_coop_kernel_b_h{width}(bool) {{ return {{}}; }}\n"
    texts = {"bindings.cpp": BINDINGS, "others.cu": others}
    texts |= {f"width_{k}.cu": WIDTH.format(k=k, cb=CODEBOOK) for k in WIDTHS}
    for name, text in texts.items():
        if not (folder / name).exists():
            (folder / name).write_text(text, "utf-8")
    return [*(native / name for name in SOURCES), *(folder / name for name in texts)]


def build(wheel: Path, folder: Path) -> Any:
    """Compiles for the GPU that is there; a second call finds it built."""
    from torch.utils.cpp_extension import load

    folder.mkdir(parents=True, exist_ok=True)
    native, target = unpacked(wheel, folder) / "exllamav3_ext", folder / "build-experts"
    target.mkdir(exist_ok=True)
    return load(
        name="exllamav3_experts",
        sources=[str(path) for path in written(native, folder)],
        extra_include_paths=[str(native)],
        extra_cflags=["-O3"],
        extra_cuda_cflags=["-O3", "--use_fast_math"],
        build_directory=str(target),
    )


class Experts:
    """The experts of a layer as `exl3_slots.filled` laid them out, ordered by kind; the same bytes that ours reads."""

    def __init__(
        self,
        native: Any,
        record: Exl3Record,
        slots: Tensor,
        begins: Sequence[int],
        stored: Sequence[Stored],
        top_k: int,
    ) -> None:
        self._native, self._record, self._top_k = native, record, top_k
        d, n, device = record.hidden, record.share, slots.device
        self._kinds = []
        for kind, numbers in groupby(range(len(stored)), key=lambda number: stored[number]):
            own = list(numbers)
            if len({kind.half_bits[0], kind.half_bits[1]}) > 1:
                raise ValueError("its kernel takes one width for gate and up")
            tables = _tables(record, slots.data_ptr(), [begins[number] for number in own], kind)
            self._kinds.append((kind, own[0], own[-1] + 1, [torch.tensor(t, device=device) for t in tables]))
        slots_max = ROWS * top_k
        half = {"dtype": torch.float16, "device": device}
        # rotated rows for gate and up, gate, up, what is between, and what down gives
        self._scratch = [torch.empty(slots_max, width, **half) for width in (d, d, n, n, n)] + [
            torch.empty(slots_max, d, device=device)
        ]
        counters = native.counters(slots_max, ROWS, n, d)
        self._counters = torch.zeros(counters, dtype=torch.int32, device=device)
        self._out = torch.empty(len(self._kinds), ROWS, d, device=device)

    def __call__(self, x: Tensor, picks: Tensor, weights: Tensor) -> Tensor:
        """x [T, D] fp16; picks [T, k] int64 experts; weights [T, k] fp16 -> [T, D] fp32, until the next call."""
        for out, (kind, first, end, tables) in zip(self._out, self._kinds, strict=True):
            low, high = (first, end) if len(self._kinds) > 1 else (-1, -1)  # -1: all experts are its own
            gate, up, last = (bits / 2 for bits in kind.half_bits)
            self._native.experts(
                x, picks, weights, low, high, self._record.hidden, *tables, None, None, None, gate, up, last,
                True, False, SILU, NO_LIMIT, True, *self._scratch, self._counters, out, None, None,
            )  # fmt: skip
        rows = self._out[:, : len(x)]
        return rows[0] if len(self._kinds) == 1 else rows.sum(0)


def _tables(record: Exl3Record, base: int, pages: Sequence[int], kind: Stored) -> list[list[int]]:
    """Addresses of trellis, suh and svh of gate, of up, and of down, an expert each."""
    gate_suh, up_suh, gate_svh, up_svh, down_suh, down_svh, trellis = record.offsets
    gate, up, _ = (record.trellis_bytes(bits) for bits in kind.half_bits)
    offsets = (
        trellis, gate_suh, gate_svh, trellis + gate, up_suh, up_svh, trellis + gate + up, down_suh, down_svh,
    )  # fmt: skip
    return [[base + page * PAGE_BYTES + offset for page in pages] for offset in offsets]


def main() -> None:
    began_s = time.perf_counter()
    build(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"built in {time.perf_counter() - began_s:.0f} s")


if __name__ == "__main__":
    main()
