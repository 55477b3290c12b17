"""Hyper-connections, norms and Engram against the plain formula."""

import math

import numpy as np
import pytest
import torch

from kernels import engram, hyper
from kernels.norm import rms_norm
from kernels.rows import by_row, matmul


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_sinkhorn_ends_on_the_columns():
    x = torch.softmax(randn(5, 4, 4) * 2, -1).numpy() + np.float32(1e-6)
    before = x.copy()
    got = hyper.sinkhorn(x, 20, 1e-6)
    assert np.array_equal(x, before)
    assert np.abs(got.sum(-2) - 1).max() < 5e-6
    assert np.abs(got.sum(-1) - 1).max() < 1e-2
    once = hyper.sinkhorn(x, 1, 1e-6)
    np.testing.assert_allclose(once, x / (x.sum(-2, keepdims=True) + 1e-6), rtol=1e-6)
    assert got.dtype == np.float32


def test_mix():
    streams, fn, base = randn(2, 4, 8), randn(24, 32, seed=1), randn(24, seed=2)
    scale = torch.tensor([0.5] * 4 + [0.7] * 4 + [0.9] * 16)
    got = hyper.mix(streams, fn, scale, base, 20, 1e-6)
    for t in range(2):
        u = streams[t].flatten()
        m = (fn @ u) / math.sqrt(u.square().mean())
        torch.testing.assert_close(got.pre[t], torch.sigmoid(m[:4] * 0.5 + base[:4]) + 1e-6)
        torch.testing.assert_close(got.post[t], 2 * torch.sigmoid(m[4:8] * 0.7 + base[4:8]))
        comb = torch.softmax((m[8:] * 0.9 + base[8:]).view(4, 4), -1) + 1e-6
        comb = comb / (comb.sum(0, keepdim=True) + 1e-6)
        for _ in range(19):
            comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
            comb = comb / (comb.sum(0, keepdim=True) + 1e-6)
        torch.testing.assert_close(got.comb[t], comb)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_streams_are_read_and_written(rows):
    """comb[i, j] carries stream i into stream j."""
    h, y = randn(rows, 4, 8), randn(rows, 8, seed=1)
    pre, post, comb = randn(rows, 4, seed=2), randn(rows, 4, seed=3), randn(rows, 4, 4, seed=4)
    torch.testing.assert_close(hyper.collapse(h, pre), (pre.unsqueeze(-1) * h).sum(1))
    got = hyper.expand(h, y, post, comb)
    for j in range(4):
        expected = post[:, j : j + 1] * y + sum(comb[:, i, j : j + 1] * h[:, i] for i in range(4))
        torch.testing.assert_close(got[:, j], expected)


def test_rms_norm_of_tiny_rows():
    """The epsilon is 1e-20: a row of 1e-7 is normed, not drowned."""
    x, weight = randn(3, 8) * 1e-7, randn(8, seed=1)
    expected = weight * x / x.double().square().mean(-1, keepdim=True).sqrt().float()
    torch.testing.assert_close(rms_norm(x, weight, 1e-20), expected)


def test_rows_one_by_one_are_the_rows():
    x, w = randn(20, 32), randn(7, 32, seed=1)
    for count in (1, 5, 16, 17):
        torch.testing.assert_close(matmul(x[:count], w), x[:count] @ w.t())
        seen = []
        by_row(lambda part, seen=seen: seen.append(len(part)) or part, x[:count])
        assert seen == ([1] * count if count <= 16 else [count])


def test_engram_gate():
    h, k, v = randn(2, 4, 8), randn(2, 4, 8, seed=1), randn(2, 8, seed=2)
    weight = randn(4, 8, seed=3)
    got = engram.mix(h, k, v, weight)
    for t in range(2):
        for s in range(4):
            a = h[t, s] / h[t, s].square().mean().sqrt()
            b = k[t, s] / k[t, s].square().mean().sqrt()
            d = float((a * b * weight[s]).sum()) / math.sqrt(8)
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(d), 1e-6)), d)))
            torch.testing.assert_close(got[t, s], h[t, s] + gate * v[t])


def test_engram_hash_in_plain_integers():
    history = np.array([[5, 3, 2, 2], [9, 5, 3, 2]])
    m, primes = [3, 7, 11, 13], np.array([[97, 101], [103, 107], [109, 113]])
    offsets = np.array([[0, 97], [198, 301], [408, 517]])
    got = engram.hash_rows(history, np.array(m), primes, offsets)
    for t, c in enumerate(history.tolist()):
        r = c[0] * m[0]
        for n in range(3):
            r ^= c[n + 1] * m[n + 1]
            assert got[t, 2 * n : 2 * n + 2].tolist() == [r % int(primes[n, i]) + int(offsets[n, i]) for i in range(2)]
