"""A prompt at the real shapes, one rank of two, on this GPU: tokens a second, by part, and as a share of the peak.

    python bench/gpu_prefill.py [--layers 40] [--resident 10000] [--tokens 8192] [--chunks 2048 8192] [--tiles]

Chunks run eagerly, as when serving. `host`: what the engine's thread takes to launch all of it. Parts are kernels by
name, under the profiler, of the last chunk. `peak`: of the operations of products, attention and index scores, what a
bf16 product of torch reaches in the same run. The two sums a layer over the ranks are left out: there is one device."""

import argparse
import re
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu_timing import eager, peak
from bench.synthetic import real_shapes
from kernels import attention_chunk_triton
from tided.cache.context import Context
from tided.models.deepseek_v41.model import DeepseekV41

PARTS = {
    "experts": "^_gate_up|^_down|^_ordered|^_sum",
    "experts: sort": "sort|Sort|radix|scan|Scan|cumm",
    "dense": "nvjet|gemm|cutlass|cublas|splitK",
    "dense: weights, ends": "^_dense|^_ended|^_linear",
    "attention": "^_attention|^_turn|^_latents|^_window",
    "mHC": "^_hyper",
    "router": "^_route|^_demand",
    "index": "^_index",
    "Engram": "^_engram",
}


def operations(model: DeepseekV41, start: int, rows: int) -> float:
    """Of rows from position `start` on, 2 a product of numbers: dense and routed products, attention, index scores."""
    total = 0.0
    for block in model.blocks:
        a, m = block.attention, block.moe
        matrices = [a.inputs, a.wq_b, a.wo_a, a.wo_b, m.gate, m.shared_w13, m.shared_w2]
        if a.compressor is not None:
            matrices.append(a.compressor.inputs)
        seen = float(a.window)
        if a.ratio:
            entries = (start + rows / 2) / a.ratio
            seen += min(entries, 512)
            if a.indexer is not None:
                matrices += [a.indexer.wq_b, a.indexer.weights_proj]
                total += 2.0 * rows * entries * a.indexer.heads * a.indexer.head_dim
        total += sum(2.0 * rows * one.shape[0] * one.shape[1] for one in matrices)
        total += 4.0 * rows * seen * len(a.sink) * a.head_dim
        record = m.bank.record
        total += 6.0 * rows * m.top_k * record.hidden * record.share
    return total + sum(2.0 * rows * one.wkv.shape[0] * one.wkv.shape[1] for one in model.engrams.layers.values())


def prefilled(model: DeepseekV41, lane: Context, tokens: int, chunk: int) -> tuple[float, float]:
    """Seconds, and seconds of the host."""
    ids = torch.arange(tokens) * 7919 % 129_000
    torch.cuda.synchronize()
    began, host = time.perf_counter(), 0.0
    for part in ids.split(chunk):
        at = time.perf_counter()
        model.prefill(lane, part, "none")
        host += time.perf_counter() - at
    torch.cuda.synchronize()
    return time.perf_counter() - began, host


def by_part(model: DeepseekV41, lane: Context, rows: int) -> tuple[Counter[str], Counter[str], int]:
    """Milliseconds of the next rows: by part, by kernel; and launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        prefilled(model, lane, rows, rows)
    parts, kernels, count = Counter[str](), Counter[str](), 0
    for event in seen.events():
        if event.device_type.name == "CUDA":
            name = next((part for part, names in PARTS.items() if re.search(names, event.name)), "other")
            parts[name] += event.time_range.elapsed_us() / 1e3
            kernels[event.name[:90]] += event.time_range.elapsed_us() / 1e3
            count += 1
    return parts, kernels, count


def table(model: DeepseekV41, tokens: int, chunk: int, top: float) -> None:
    layers = len(model.blocks)
    took, host, lane = 0.0, 0.0, model.open_lane(0)
    for _ in range(2):
        model.close_lane(lane)
        lane = model.open_lane(0)
        took, host = prefilled(model, lane, tokens, chunk)
    work = sum(operations(model, start, min(chunk, tokens - start)) for start in range(0, tokens, chunk))
    rate = work / took / 1e12
    print(f"\n{tokens} tokens in chunks of {chunk}, {layers} layers: {took:.3f} s, {tokens / took:,.0f} tok/s")
    print(f"  {work / 1e12:.0f} TFLOP, {rate:.0f} TFLOP/s, {rate / top:.0%} of {top:.0f}; host {host:.3f} s")
    memory = torch.cuda.max_memory_allocated() / 1e9
    model.close_lane(lane)
    lane = model.open_lane(0)
    prefilled(model, lane, max(0, tokens - chunk) or 1, chunk)
    rows = min(chunk, tokens)
    parts, kernels, launches = by_part(model, lane, rows)
    spent = sum(parts.values())
    print(f"  the last {rows}: {spent:.1f} ms of kernels, {launches} launches; at most {memory:.1f} GB")
    for part, ms in parts.most_common():
        print(f"    {part:22}{ms:9.2f} ms {ms / spent:6.1%}")
    for kernel, ms in kernels.most_common(14):
        print(f"      {ms:9.2f}  {kernel}")
    model.close_lane(lane)


def attention_tiles(rows: int, rounds: int) -> None:
    """Attention of a layer by the rows of a block, stages and warps."""
    heads, width, window, selected = 32, 512, 128, 512
    query = torch.randn(rows, heads, width, device="cuda")
    near = torch.randn(window - 1 + rows, width, device="cuda").bfloat16()
    pool = torch.randn(8192, width, device="cuda").bfloat16()
    places = torch.rand(rows, 8192, device="cuda").topk(selected).indices.sort().values.to(torch.int32)
    cos, sin = torch.rand(rows, 32, device="cuda"), torch.rand(rows, 32, device="cuda")
    sink = torch.randn(heads, device="cuda")
    print(f"\n| attention of {rows} rows, window and {selected}: block, stages, warps | ms |\n|---|---|")
    for block, stages, warps in [(32, 1, 4), (32, 2, 4), (32, 2, 8), (64, 1, 8), (64, 2, 8), (16, 3, 4), (32, 1, 8)]:
        try:
            took = eager(
                lambda b=block, s=stages, w=warps: attention_chunk_triton.attend(
                    query, cos, sin, near, 8192, 0, pool, places, 1, sink, width**-0.5, (b, s, w)
                ),
                rounds,
            )
            print(f"| {block}, {stages}, {warps} | {took / 1e3:.2f} |", flush=True)
        except Exception as error:  # more shared memory than there is
            print(f"| {block}, {stages}, {warps} | {type(error).__name__} |", flush=True)


def show(model: DeepseekV41, tokens: int, chunks: list[int], rounds: int) -> None:
    """The pool must hold twice the tokens."""
    top = peak(rounds)
    print(f"bf16 product of torch: {top:.0f} TFLOP/s")
    with torch.inference_mode():
        for chunk in chunks:
            table(model, tokens, chunk, top)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--layers", 40), ("--resident", 10_000), ("--tokens", 8192)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--chunks", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--tiles", action="store_true", help="attention by its tiles")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = real_shapes(options.layers, options.resident, 2 * options.tokens)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    show(model, options.tokens, options.chunks, options.rounds)
    if options.tiles:
        attention_tiles(2048, options.rounds)


if __name__ == "__main__":
    main()
