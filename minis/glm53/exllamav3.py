"""The quantizer of exllamav3, unmodified, from its wheel. Only the native code that quantizes is built: one
architecture, some fifteen files of a hundred; everything else of the package stays unread."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

PACKAGES = ("exllamav3", "exllamav3.modules", "exllamav3.modules.quant")
_SOURCES = ("quant/quantize.cu", "quant/pack.cu", "quant/frac.cu", "quant/exl3_devctx.cu", "hadamard.cpp")
_BINDINGS = """
#include <torch/extension.h>
#include <pybind11/stl.h>
#include "quant/quantize.cuh"
#include "quant/pack.cuh"
#include "quant/frac.cuh"
#include "hadamard.h"
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("quantize_tiles", &quantize_tiles);
  m.def("quantize_tiles_scratch", &quantize_tiles_scratch);
  m.def("quantize_tiles_frac", &quantize_tiles_frac);
  m.def("test_distribution", &test_distribution);
  m.def("pack_trellis", &pack_trellis);
  m.def("unpack_trellis", &unpack_trellis);
  m.def("pack_trellis_frac", &pack_trellis_frac);
  m.def("unpack_trellis_frac", &unpack_trellis_frac);
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

    native = root / "exllamav3_ext"
    bindings = root.parent / "bindings.cpp"
    if not bindings.exists():
        bindings.write_text(_BINDINGS, "utf-8")
    units = sorted((native / "quant" / "comp_units").glob("quantize_tiles_*.cu"))
    sources = [bindings, *(native / name for name in _SOURCES), *units]
    target = root.parent / "build"
    target.mkdir(exist_ok=True)
    return load(
        name="exllamav3_ext",
        sources=list(map(str, sources)),
        extra_include_paths=[str(native)],
        extra_cflags=["-O3"],
        extra_cuda_cflags=["-O3", "--use_fast_math"],
        build_directory=str(target),
    )


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
