"""What computes: driver, CUDA, and the assembler that Triton calls."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tidectl.doctor.check import Finding, View, fail, ok, skip, warn
from tidectl.doctor.memory import ANSWER_S

DRIVER = re.compile(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)")
BLACKWELL = 100  # compute capability x 10 from which Triton calls an assembler of its own


def driver(view: View) -> Finding:
    found = DRIVER.search(view.machine.text("proc/driver/nvidia/version") or "")
    if found:
        return ok(f"NVIDIA {found[1]}")
    if not view.on_cuda:
        return skip("no NVIDIA driver, and none is needed")
    return fail("no NVIDIA driver is loaded", 'install it (`nvidia-smi` must answer), or set engine.device = "cpu"')


def cuda(view: View) -> Finding:
    answer = view.engine.answer("torch", ANSWER_S)
    if answer.fault:
        return fail(f"torch: {answer.fault}", "a start would end so too; `python -c 'import torch'` alone tells more")
    value: dict[str, Any] = dict(answer.value)
    devices, built = value["devices"], value["cuda"]
    seen = f"torch {value['version']}" + (f", CUDA {built}, NCCL {value['nccl'] or '?'}" if built else ", without CUDA")
    names = ", ".join(f"{d['name']} (sm_{d['capability'][0]}{d['capability'][1]})" for d in devices)
    seen += f": {names}" if devices else ""
    if not view.on_cuda:
        return ok(seen)
    if not built:
        return fail(seen, "install a torch with CUDA, as constraints.txt has it")
    if len(devices) < len(view.ranks_here):
        return fail(
            f"{seen}; {len(devices)} devices for {len(view.ranks_here)} ranks here",
            "does the driver suit this CUDA? lower parallel.ranks, or name more parallel.hosts",
        )
    return ok(seen)


def ptxas(view: View) -> Finding:
    """An assembler that does not know the device makes every first kernel fail, or fall back to a slow one."""
    if not view.on_cuda:
        return skip("ranks on a CPU compile nothing")
    devices = view.engine.answer("torch", ANSWER_S).value.get("devices")
    if not isinstance(devices, list) or not devices:
        return skip("no CUDA device")
    capability = devices[0]["capability"]
    target = f"sm_{capability[0]}{capability[1]}"
    program = _program(view, 10 * capability[0] + capability[1])
    ran = view.machine.run([program, "--help"], 5.0)
    if ran is None or ran.code != 0:
        return fail(f"{program} does not run", "install triton anew, or set TRITON_PTXAS_PATH to CUDA's own ptxas")
    if target not in re.findall(r"sm_\d+", ran.out):
        return fail(f"{program} does not know {target}", "set TRITON_PTXAS_PATH to the ptxas of a newer CUDA toolkit")
    named = view.machine.environ.get("TRITON_PTXAS_PATH") or view.machine.environ.get("TRITON_PTXAS_BLACKWELL_PATH")
    seen = f"{program} knows {target}"
    return warn(seen, "it is named by the environment: is it so for the unit too?") if named else ok(seen)


def _program(view: View, capability: int) -> str:
    """As Triton finds it."""
    name = "ptxas-blackwell" if capability >= BLACKWELL else "ptxas"
    named = view.machine.environ.get(f"TRITON_{name.replace('-', '_').upper()}_PATH")
    spec = find_spec("triton")
    inside = Path(spec.origin or "").parent / "backends" / "nvidia" / "bin" if spec else Path()
    return named or str(inside / (name if (inside / name).exists() else "ptxas"))
