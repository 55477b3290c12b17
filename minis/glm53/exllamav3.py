"""The quantizer of exllamav3, unmodified, from its wheel. Only the native code that is used is built: the kernels of a
few widths and one codebook; everything else of the package stays unread."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

PACKAGES = ("exllamav3", "exllamav3.modules", "exllamav3.modules.quant")
WIDTHS, CODEBOOK = (2, 3, 4), 1  # the second codebook, mcg
_SOURCES = ("quant/quantize.cu", "quant/pack.cu", "quant/exl3_devctx.cu", "hadamard.cpp")
_FUNCTION = re.compile(r"fp_quantize_tiles_kernel (\w+)\((bool \w+)?[^)]*\);")
_BINDINGS = """
#include <torch/extension.h>
#include <pybind11/stl.h>
#include "quant/quantize.cuh"
#include "quant/pack.cuh"
#include "hadamard.h"
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("quantize_tiles", &quantize_tiles);
  m.def("quantize_tiles_scratch", &quantize_tiles_scratch);
  m.def("pack_trellis", &pack_trellis);
  m.def("unpack_trellis", &unpack_trellis);
  m.def("pack_signs", &pack_signs);
  m.def("had_paley", &had_paley);
  m.def("had_paley2", &had_paley2);
}
"""


def unpacked(wheel: Path, folder: Path) -> Path:
    """Extracts the package's code below `folder` -> its root."""
    with ZipFile(wheel) as z:
        z.extractall(folder, [n for n in z.namelist() if "standard_cal_data" not in n])
    return folder / "exllamav3"


def build(root: Path) -> Any:
    """Compiles the native part for the GPU that is there; a second call finds it built."""
    from torch.utils.cpp_extension import load

    native, target = root / "exllamav3_ext", root.parent / "build"
    target.mkdir(exist_ok=True)
    sources = [*(native / name for name in _SOURCES), *_written(native, root.parent)]
    return load(
        name="exllamav3_ext",
        sources=list(map(str, sources)),
        extra_include_paths=[str(native), str(native / "quant" / "comp_units")],
        extra_cflags=["-O3"],
        extra_cuda_cflags=["-O3", "--use_fast_math"],
        build_directory=str(target),
    )


def _written(native: Path, folder: Path) -> list[Path]:
    """Bindings, a file for each width that is wanted, and one that answers for all other kernels that there is none.
    Files that are there already are left alone, so that nothing is built twice."""
    header = (native / "quant" / "comp_units" / "quantize_tiles_instances.cuh").read_text("utf-8")
    declared = {m[1]: bool(m[2]) for m in _FUNCTION.finditer(header)}
    texts = {"bindings.cpp": _BINDINGS}
    for width in WIDTHS:
        name, of = f"quantize_tiles_kernel_k{width}_cb{CODEBOOK}", f"<{width}, {CODEBOOK}>"
        del declared[name]
        body = f"return optimized ? quantize_tiles_optimized_kernel{of} : quantize_tiles_kernel{of};"
        texts[f"width_{width}.cu"] = (
            '#include "quantize_tiles_instances.cuh"\n#include "quant/quantize_tiles_optimized.cuh"\n'
            f"fp_quantize_tiles_kernel {name}(bool optimized) {{ {body} }}\n"
        )
    texts["others.cu"] = '#include "quantize_tiles_instances.cuh"\n' + "".join(
        f"fp_quantize_tiles_kernel {name}({'bool' if told else ''}) {{ return nullptr; }}\n"
        for name, told in declared.items()
    )
    for name, text in texts.items():
        if not (folder / name).exists():
            (folder / name).write_text(text, "utf-8")
    return [folder / name for name in texts]


def quantizer(root: Path, native: Any) -> ModuleType:
    """The module that quantizes, its package entered without the rest being imported."""
    for name in PACKAGES:
        module = ModuleType(name)
        module.__path__ = [str(root.parent / name.replace(".", "/"))]
        sys.modules[name] = module
    if importlib.util.find_spec("pydantic") is None:  # wanted by a helper for the name of an error alone
        stand_in = ModuleType("pydantic")
        stand_in.PydanticUserError = type("PydanticUserError", (Exception,), {})  # type: ignore[attr-defined]
        sys.modules["pydantic"] = stand_in
    ext = ModuleType("exllamav3.ext")
    ext.exllamav3_ext = native  # type: ignore[attr-defined]
    sys.modules["exllamav3.ext"] = ext
    return importlib.import_module("exllamav3.modules.quant.exl3_lib.quantize")


def main() -> None:
    """Builds beforehand: python -m minis.glm53.exllamav3 WHEEL FOLDER"""
    build(unpacked(Path(sys.argv[1]), Path(sys.argv[2])))


if __name__ == "__main__":
    main()
