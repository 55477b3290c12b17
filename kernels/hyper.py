"""Manifold-constrained hyper-connections (mHC): S parallel residual streams around each sub-layer, all in fp32.

mix      from the streams as they enter a sub-layer: how to read them (pre), write to them (post) and mix them (comb)
collapse the streams -> the sub-layer's input, with the `pre` of the sub-layer before (single-pass shift)
expand   the sub-layer's output -> the streams, with post and the *transposed* comb
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.rows import matmul

_NORM_EPS = 1e-20


@dataclass(frozen=True)
class Mix:
    """pre [T, S], post [T, S], comb [T, S, S]."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def sinkhorn(x: NDArray[np.float32], iterations: int, eps: float) -> NDArray[np.float32]:
    """x [T, S, S] positive, rows summing to one -> nearly doubly stochastic; ends on the columns.

    In numpy: 39 normalisations of 4 x 4 numbers are all overhead, and numpy has the least of it."""
    x = x.copy()
    for axis in (-2, *(-1, -2) * (iterations - 1)):
        x /= np.add.reduce(x, axis, keepdims=True) + np.float32(eps)
    return x


def mix(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float) -> Mix:
    """streams [T, S, D]; fn [S * (2 + S), S * D]; scale, base [S * (2 + S)], scale already repeated per kind."""
    width = streams.shape[1]
    gates = _gates(streams.flatten(1), fn, scale, base, width, eps)
    comb = gates[:, 2 * width :].reshape(-1, width, width)
    if comb.is_cuda:
        return Mix(gates[:, :width], gates[:, width : 2 * width], _sinkhorn_tensor(comb, iterations, eps))
    doubly = torch.from_numpy(sinkhorn(comb.numpy(), iterations, eps))
    return Mix(gates[:, :width], gates[:, width : 2 * width], doubly)


def _sinkhorn_tensor(x: Tensor, iterations: int, eps: float) -> Tensor:
    for axis in (-2, *(-1, -2) * (iterations - 1)):
        x = x / (x.sum(axis, keepdim=True) + eps)
    return x


def _gates(flat: Tensor, fn: Tensor, scale: Tensor, base: Tensor, width: int, eps: float) -> Tensor:
    """flat [T, S * D] -> [T, S * (2 + S)]: pre, post, row softmax of comb + eps."""
    raw = matmul(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + _NORM_EPS)
    raw = torch.addcmul(base, raw, scale)
    gate = torch.sigmoid(raw[:, : 2 * width])
    comb = torch.softmax(raw[:, 2 * width :].reshape(-1, width, width), -1)
    return torch.cat([gate[:, :width] + eps, 2 * gate[:, width:], comb.flatten(1) + eps], 1)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """streams [T, S, D], pre [T, S] -> sum over streams of pre * stream, [T, D]."""
    return torch.bmm(pre.unsqueeze(1), streams).squeeze(1)


def expand(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """streams [T, S, D], output [T, D] -> y[j] = post[j] * output + sum over i of comb[i, j] * streams[i]."""
    return torch.baddbmm(post.unsqueeze(2) * output.unsqueeze(1), comb.transpose(1, 2), streams)
