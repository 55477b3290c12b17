"""A kernel is compiled once for each kind of its arguments. Triton takes an integer that is 1, or divisible by 16, for
a kind of its own, unless it is told not to: then a prompt of another length would wait for a compiler."""

import importlib
import re
from pathlib import Path

import pytest
from triton.runtime.jit import JITFunction

KERNELS = Path(__file__).parents[2] / "kernels"
FILES = sorted(path.stem for path in KERNELS.glob("*_triton.py"))
# Counts and places of a request's rows: whatever has these names differs from call to call. Sizes of a model do not,
# and its loads are made wide by what they are divisible by.
VARYING = {"rows", "count", "items", "start", "floor", "lane_stride"}


def launched(file: str) -> list[JITFunction]:
    module, source = importlib.import_module(f"kernels.{file}"), (KERNELS / f"{file}.py").read_text("utf-8")
    functions = [one for one in vars(module).values() if isinstance(one, JITFunction)]
    return [one for one in functions if re.search(rf"\b{one.fn.__name__}\[", source) or one.fn.__name__ == "product"]


@pytest.mark.parametrize("file", FILES)
def test_no_kernel_is_compiled_anew_for_another_count_of_rows(file):
    for kernel in launched(file):
        kept = {one.name for one in kernel.params if one.do_not_specialize}
        varies = {one.name for one in kernel.params if one.name in VARYING and not one.is_constexpr}
        assert varies <= kept, f"{file}.{kernel.fn.__name__}: do_not_specialize {sorted(varies - kept)}"


def test_every_file_launches_a_kernel():
    """The list above is made of what the sources look like."""
    parts = {"chain_triton", "exl3_walk_triton", "experts_product_triton", "rounding_triton"}
    assert {file for file in FILES if not launched(file)} == parts
