"""The bench of packs reads the pack that it writes."""

import pytest

from bench.pack_read import bare, ours, synthetic
from packers.packs import Pack
from tided.errors import UnavailableError


def test_both_read_it(tmp_path):
    path = synthetic(tmp_path, 0.02)
    header = Pack.open(path).header
    try:
        mine = ours(path, header, 1, 0.05, verify=True)
    except UnavailableError:
        pytest.skip("this file system has no direct reads")
    assert mine > 0
    assert bare(path, header, 1, 0.05) > 0
