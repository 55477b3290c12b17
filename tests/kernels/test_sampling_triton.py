"""Memory that launches of a draw share: graphs hold its address, so it stays."""

import torch

from kernels import sampling_triton

CPU = torch.device("cpu")


def test_what_a_graph_holds_stays_whatever_other_counts_of_rows_come():
    held = [part.data_ptr() for part in sampling_triton._zeros(CPU, 3)]
    for rows in range(1, 400):
        ended, parts = sampling_triton._zeros(CPU, rows)
        assert (len(ended), len(parts)) == (rows, rows)
    assert [part.data_ptr() for part in sampling_triton._zeros(CPU, 3)] == held


def test_a_count_of_rows_takes_no_memory_of_its_own():
    assert len({sampling_triton._zeros(CPU, rows)[1].data_ptr() for rows in range(1, 257)}) == 9
