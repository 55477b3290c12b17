"""What this machine's GPUs make of DeepSeek-V4.1-Flash and GLM-5.3, at the shapes of one rank of two, with random
weights.

    python bench/gpu.py [--part kernels step prefill ranks residency] [--rounds 10] [--repeats 3]
    python bench/gpu.py --part exl3 glm --rows 1 4 8 --wheel exllamav3-1.6.5-py3-none-any.whl
    python bench/gpu.py --part experts --forms --peers triton_kernels.zip humming_kernels-0.1.20-...whl

    kernels    experts and dense products alone, against a kernel that only reads, in the same run
    step       a decode step of one rank: by part, its graph nodes, the host's time, and the least its bytes would take
    prefill    a prompt of 8,192 tokens
    ranks      the step of two ranks on two GPUs, its collectives inside the graphs (needs two GPUs)
    residency  the engine's steps beside reads of experts, and without: 64 records under way, and 64 small ones a step
    exl3       GLM-5.3's experts: our kernel beside exllamav3's own, built from its wheel (`exllamav3_kernel.py`)
    experts    DeepSeek-V4.1-Flash's experts: our kernel beside other people's for MXFP4 (`mxfp4_peers.py`)
    glm        a decode step of GLM-5.3, one rank: by part, the host's time, and the least its bytes would take
    draft      a proposal of each model's drafter: the engine's wait for it, the host's time, with graphs and without

Figures are medians, in brackets the spread of the repeats.
"""

import argparse
import sys
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import gpu_draft, gpu_exl3, gpu_experts, gpu_glm, gpu_kernels, gpu_ranks, gpu_step
from bench.gpu_timing import ceiling

PARTS = ("kernels", "step", "prefill", "residency", "ranks")
OTHERS = ("exl3", "glm", "experts", "draft")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS + OTHERS, default=list(PARTS))
    for name, default in (("--rounds", 10), ("--repeats", 3), ("--layers", 40), ("--resident", 10_000)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--tiles", action="store_true", help="other tiles and parts of the dense products too")
    parser.add_argument("--glm-layers", type=int, default=78)
    parser.add_argument("--glm-resident", type=int, default=12_968)
    parser.add_argument("--wheel", type=Path, help="exllamav3's, for exl3")
    parser.add_argument("--build", type=Path, default=Path("scratch/exllamav3"), help="where its kernel is built")
    parser.add_argument(
        "--peers", type=Path, nargs="+", default=[], help="folders, wheels or zips, for experts; none: ours alone"
    )
    parser.add_argument("--forms", action="store_true", help="of experts, other tiles of a decode step's kernel too")
    parser.add_argument("--work", nargs="+", choices=gpu_experts.WORK, default=gpu_experts.WORK, help="of experts")
    parser.add_argument("--no-times", action="store_true", help="of experts, what they compute alone")
    options = parser.parse_args()
    if "exl3" in options.part and options.wheel is None:
        parser.error("exl3 needs --wheel")
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    best = ceiling(options.rounds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"reading alone: {best:,.0f} GB/s\n", flush=True)
    if "kernels" in options.part:
        gpu_kernels.show(best, options.rounds, options.repeats, options.tiles)
    torch.cuda.empty_cache()
    of_model = [part for part in ("step", "prefill", "residency") if part in options.part]
    if of_model:
        gpu_step.show(best, of_model, options)
    torch.cuda.empty_cache()
    if "ranks" in options.part:
        gpu_ranks.show(best, options)
    if "exl3" in options.part:
        gpu_exl3.show(options.wheel, options.build, options.rounds, options.repeats)
    if "experts" in options.part:
        gpu_experts.show(
            options.peers,
            Path("scratch/peers"),
            gpu_experts.FORMS if options.forms else {},
            options.work,
            best,
            options.rounds,
            options.repeats,
            not options.no_times,
        )
    if "glm" in options.part:
        gpu_glm.show(best, options)
    if "draft" in options.part:
        gpu_draft.show(options)


if __name__ == "__main__":
    main()
