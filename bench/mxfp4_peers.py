"""Other people's grouped MXFP4 kernels, unmodified, each as a layer of experts that takes our codes and scales: what
`gpu_experts.py` compares ours with. None is needed to install or to test; each comes from its own wheel or folder.

    triton_kernels   OpenAI's, as vLLM's wheel carries it (vllm/third_party/triton_kernels): `matmul_ogs`
    humming          of the vLLM project, which runs it for MXFP4 on Hopper: the wheel humming-kernels

A peer is given rows and routing beforehand (`ready`) and then multiplies (`__call__`), which alone is timed."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from zipfile import ZipFile

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.record import ExpertRecord

AT_ONCE = 32  # experts whose layout is changed together


@dataclass(frozen=True)
class Layer:
    """Of E experts, as the records hold them: w13 [E, 2n, D/2] and w2 [E, D, n/2] codes, gate above up; s13 [E, 2n,
    D/32] and s2 [E, D, n/32] scales; all uint8."""

    w13: Tensor
    w2: Tensor
    s13: Tensor
    s2: Tensor
    top_k: int
    limit: float

    @property
    def experts(self) -> int:
        return len(self.w13)


class Peer(Protocol):
    what: str  # its launches, and what it rounds

    def ready(self, x: Tensor, picks: Tensor, weights: Tensor) -> Any:
        """x [T, D] bf16, picks [T, k] int32 experts, weights [T, k] fp32 -> what a call is given: rows in its number
        format, picks sorted by expert."""

    def __call__(self, ready: Any) -> Tensor:
        """-> the weighted sum over the picks, [T, D]."""


def layer_of(slots: Tensor, record: ExpertRecord, top_k: int, limit: float) -> Layer:
    """slots [E, slot_bytes] uint8 -> copies of their parts."""
    d, n = record.hidden, record.share
    w1, _, w2, s1, _, s2 = record.parts

    def cut(offset: int, rows: int, row_bytes: int) -> Tensor:
        return slots[:, offset : offset + rows * row_bytes].reshape(len(slots), rows, row_bytes)

    return Layer(
        cut(w1.offset, 2 * n, d // 2), cut(w2.offset, d, n // 2), cut(s1.offset, 2 * n, d // 32),
        cut(s2.offset, d, n // 32), top_k, limit,
    )  # fmt: skip


def in_parts(change: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """tensor [E, rows, columns], each expert changed by itself -> [E, ...] contiguous but for its last two dimensions,
    which stay in the order that `change` left them in."""
    found = [change(part) for part in tensor.split(AT_ONCE)]
    if found[0].stride(-1) == 1:
        return torch.cat(found)
    return torch.cat([part.mT for part in found]).mT


def by_expert(picks: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """picks [T, k] -> places of the flat picks in the order of their experts, int32; picks of each expert, int32."""
    flat = picks.flatten().long()
    return torch.argsort(flat, stable=True).to(torch.int32), torch.bincount(flat, minlength=experts).to(torch.int32)


@triton.jit(repr=lambda _: "_clamped_swiglu")
def _clamped_swiglu(input, limit):  # noqa: ANN001, ANN202
    gate, up = tl.split(tl.reshape(input, (input.shape[0], input.shape[1] // 2, 2)))
    gate, up = tl.minimum(gate, limit), tl.clamp(up, -limit, limit)
    return gate / (1.0 + tl.exp(-gate)) * up


class TritonKernels:
    """In its layout for the device that is there: with weights as stored it takes many times as long. Gate and up lie
    row by row, since its activation takes neighbours."""

    what = "`matmul_ogs` twice, the gated activation inside the first, and its sum of picks; rows and hidden rows bf16"

    def __init__(self, layer: Layer, num_warps: int) -> None:
        ogs = importlib.import_module("triton_kernels.matmul_ogs")
        self._ogs, self._layer = ogs, layer
        specs = ogs.FnSpecs("clamped_swiglu", _clamped_swiglu, ("limit",), reduction_n=2)
        self._activation = ogs.FusedActivation(specs, (layer.limit,))
        flags = importlib.import_module("triton_kernels.matmul_ogs_details.opt_flags")
        flags.update_opt_flags_constraints({"split_k": 1})
        experts, rows, _ = layer.w13.shape
        paired = [t.view(experts, 2, rows // 2, -1).transpose(1, 2).reshape(t.shape) for t in (layer.w13, layer.s13)]
        self._w13, self._p13 = self._laid_out(*paired, num_warps)
        self._w2, self._p2 = self._laid_out(layer.w2, layer.s2, num_warps)

    def _laid_out(self, codes: Tensor, scales: Tensor, num_warps: int) -> tuple[Any, Any]:
        tensor = importlib.import_module("triton_kernels.tensor")
        layouts = importlib.import_module("triton_kernels.tensor_details.layout")
        numerics = importlib.import_module("triton_kernels.numerics")
        value, value_options = layouts.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        scale, scale_options = layouts.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=num_warps)
        made = []
        for data, dtype, kind, options in (
            (codes.mT, tensor.FP4, value, value_options),
            (scales.mT, None, scale, scale_options),
        ):
            whole = tensor.wrap_torch_tensor(data, dtype=dtype)
            layout = kind(data.shape, **options)
            made.append(
                tensor.Tensor(
                    tensor.Storage(in_parts(layout.swizzle_data, data), layout), dtype=whole.dtype, shape=whole.shape
                )
            )
        precision = self._ogs.PrecisionConfig(
            weight_scale=made[1], flex_ctx=self._ogs.FlexCtx(rhs_data=numerics.InFlexData()), out_dtype=torch.bfloat16
        )
        return made[0], precision

    def ready(self, x: Tensor, picks: Tensor, weights: Tensor) -> Any:
        ogs, experts = self._ogs, self._layer.experts
        order, counts = by_expert(picks, experts)
        place = torch.empty_like(order)
        place[order.long()] = torch.arange(len(order), dtype=torch.int32, device=order.device)
        ragged = importlib.import_module("triton_kernels.tensor").make_ragged_tensor_metadata(counts, len(order))
        scale = weights.flatten()[order.long()].to(torch.bfloat16)
        data = ogs.RoutingData(scale, ragged.slice_sizes, experts, self._layer.top_k, ragged)
        return x, data, ogs.GatherIndx(order, place), ogs.ScatterIndx(place, order)

    def __call__(self, ready: Any) -> Tensor:
        x, data, gather, scatter = ready
        hidden = self._ogs.matmul_ogs(
            x, self._w13, None, data, gather_indx=gather, precision_config=self._p13, fused_activation=self._activation
        )
        out: Tensor = self._ogs.matmul_ogs(
            hidden, self._w2, None, data, scatter_indx=scatter, precision_config=self._p2, gammas=data.gate_scal
        )
        return out


@triton.jit
def _weighted_sum(parts, weights, out, outer, TOP_K: tl.constexpr, SIZE: tl.constexpr):  # noqa: ANN001, ANN202
    row, column = tl.program_id(0), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for k in tl.static_range(TOP_K):
        part = tl.load(parts + (row * TOP_K + k) * outer + column, mask=column < outer, other=0.0).to(tl.float32)
        total += tl.load(weights + row * TOP_K + k) * part
    tl.store(out + row * outer + column, total.to(tl.bfloat16), mask=column < outer)


class Humming:
    """As vLLM runs it where experts are not spread over ranks: `indexed` products, tiles as its own tables choose."""

    def __init__(self, layer: Layer, bits: int) -> None:
        schema, dtypes = importlib.import_module("humming.schema"), importlib.import_module("humming.dtypes")
        self._layer, self._forward = layer, importlib.import_module("humming.forward")
        self.what = (
            "`humming_gemm` twice, `process_input` between, and a sum of picks of this file; rows and hidden rows "
        )
        if bits == 16:
            self.what += "bf16"
            rows = schema.HummingInputSchema(a_dtype=dtypes.bfloat16, input_quant_mode="none")
        else:
            self.what += "e4m3, a scale for 128"
            rows = schema.HummingInputSchema(
                a_dtype=dtypes.float8e4m3, input_scale_group_size=128, input_scale_dtype=dtypes.float32,
                input_quant_mode="dynamic_group",
            )  # fmt: skip
        self._locks = torch.zeros(
            8 * torch.cuda.get_device_properties().multi_processor_count, dtype=torch.int32, device=layer.w13.device
        )
        n = layer.w13.shape[1] // 2
        self._products = [self._laid_out(layer.w13, layer.s13, [n, n], rows)]
        self._products.append(self._laid_out(layer.w2, layer.s2, [layer.w2.shape[1]], rows))
        limit = f"{layer.limit}f"
        self._activation = {
            "activation_type": "binary_split",
            "activation_impl": f"[](float a, float b) {{ const float gate = fminf(a, {limit}); "
            f"return gate / (1.f + expf(-gate)) * fmaxf(fminf(b, {limit}), -{limit}); }}(a, b)",
        }

    def _laid_out(
        self, codes: Tensor, scales: Tensor, rows: list[int], inputs: Any
    ) -> tuple[Any, dict[str, Tensor], Any]:
        schemas, experts, width = importlib.import_module("humming.schema"), len(codes), 2 * codes.shape[2]
        schema, tensors = schemas.Mxfp4WeightSchema().convert_humming(
            tensors={"weight": codes, "weight_scale": scales}, shape_n_stacks=rows, shape_k_stacks=[width],
            param_dtype=torch.bfloat16, num_experts=experts,
        )  # fmt: skip
        config, tensors = importlib.import_module("humming.transform").prepare_and_transform_humming_tensors(
            tensors=tensors, shape_n=sum(rows), shape_k=width, pad_n_to_multiple=256, pad_k_to_multiple=128,
            input_schema=inputs, weight_schema=schema, num_experts=experts, torch_dtype=torch.bfloat16,
            device=codes.device,
        )  # fmt: skip
        tuned = importlib.import_module("humming.tune").get_heuristics_config(layer_config=config, gemm_type="indexed")
        return config, tensors, tuned

    def _tile(self, product: int, rows: int) -> list[Any]:
        return next(each for each in self._products[product][2] if each[0] < rows <= each[1])

    def ready(self, x: Tensor, picks: Tensor, weights: Tensor) -> Any:
        """Blocks of one expert's picks, as many as a tile has rows; padding is the number of all picks."""
        order, counts = by_expert(picks, self._layer.experts)
        sorted_ = []
        for product in range(2):
            rows = self._tile(product, picks.numel())[2]["block_shape"][0]
            padded = (counts + rows - 1) // rows * rows
            begins = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
            at = torch.arange(len(order), device=order.device) + begins.repeat_interleave(counts)
            ids = torch.full((int(padded.sum()),), len(order), dtype=torch.int32, device=order.device)
            ids[at] = order
            experts = torch.arange(len(counts), device=order.device).repeat_interleave(padded // rows).to(torch.int32)
            total = torch.tensor([len(ids)], dtype=torch.int32, device=order.device)
            sorted_.append({"sorted_ids": ids, "expert_ids": experts, "num_tokens_padded": total})
        d, n = self._layer.w2.shape[1], self._layer.w13.shape[1] // 2
        space = [x.new_empty(picks.numel(), width) for width in (2 * n, d)]
        return self._rounded(0, x), sorted_, weights.contiguous(), space, x.new_empty(len(x), d)

    def _rounded(self, product: int, rows: Tensor, **activation: str) -> tuple[Tensor, Tensor | None]:
        config = self._products[product][0]
        made, groups, tokens = self._forward.may_process_input(config, inputs=rows, **activation)
        return made, groups if groups is not None else tokens

    def _multiplied(self, product: int, rows: tuple[Tensor, Tensor | None], ids: Any, out: Tensor, top_k: int) -> None:
        config, tensors, _ = self._products[product]
        self._forward.humming_forward(
            config, inputs=rows[0], weight=tensors["weight"], weight_scale=tensors.get("weight_scale"),
            zero_point=tensors.get("zero_point"), weight_scale_2=tensors.get("weight_scale_2"), input_scale=rows[1],
            outputs=out, locks=self._locks, top_k=top_k, valid_shape_m=len(out),
            compute_config=json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"}),
            tuning_config=json.dumps([[0, 1 << 30, self._tile(product, len(out))[2]]]), **ids,
        )  # fmt: skip

    def __call__(self, ready: Any) -> Tensor:
        rows, sorted_, weights, (gate_up, down), out = ready
        self._multiplied(0, rows, sorted_[0], gate_up, self._layer.top_k)
        self._multiplied(1, self._rounded(1, gate_up, **self._activation), sorted_[1], down, 1)
        width = out.shape[1]
        _weighted_sum[(len(out), triton.cdiv(width, 1024))](down, weights, out, width, weights.shape[1], 1024)
        return out


# Variants of each, by the name of its package.
VARIANTS: dict[str, dict[str, Callable[[Layer], Peer]]] = {
    "triton_kernels": {
        "triton_kernels, swizzled, 8 warps": lambda layer: TritonKernels(layer, 8),
        "triton_kernels, swizzled, 4 warps": lambda layer: TritonKernels(layer, 4),
    },
    "humming": {
        "humming, bf16 rows": lambda layer: Humming(layer, 16),
        "humming, 8-bit rows": lambda layer: Humming(layer, 8),
    },
}


def unpack(wheel: Path, folder: Path) -> None:
    """Programs in it may be run, as an installed wheel's may."""
    with ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = Path(archive.extract(member, folder))
            if member.external_attr >> 16 & 0o111 and path.is_file():
                path.chmod(0o755)


def found(places: list[Path], folder: Path) -> Iterator[tuple[str, Callable[[Layer], Peer]]]:
    """Puts each folder, or what is in each wheel or zip, on the path -> the variants of the packages there."""
    for place in places:
        root = place
        if place.is_file():
            root = folder / place.stem
            unpack(place, root)
        sys.path.insert(0, str(root.resolve()))
        packages = [name for name in VARIANTS if (root / name).is_dir()]
        if not packages:
            print(f"{place}: none of {', '.join(VARIANTS)} in it")
        for name in packages:
            yield from VARIANTS[name].items()
