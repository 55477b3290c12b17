"""Sinkhorn normalisation of the 4 x 4 stream mixes: one kernel each way on a GPU, plain torch elsewhere.

Forty normalisations of a tiny matrix as separate operations would dominate the step. The backward pass needs only
the result and the stored divisors: for y = x / s the input is y * s, and dx = (dy - sum(dy * y)) / s.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only installations
    triton = None

BLOCK = 64


def _forward_plain(logits: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor]:
    """logits [N, 4, 4] -> result [N, 4, 4], divisors [2 * iters - 1, N, 4] (columns, rows, columns, ...)."""
    x = logits.softmax(-1) + eps
    divisors = []
    for step in range(2 * iters - 1):
        s = x.sum(1 if step % 2 == 0 else 2, keepdim=True) + eps
        x = x / s
        divisors.append(s.squeeze(1 if step % 2 == 0 else 2))
    return x, torch.stack(divisors)


def _backward_plain(grad: Tensor, y: Tensor, divisors: Tensor, eps: float) -> Tensor:
    """grad, y [N, 4, 4]; divisors [S, N, 4] -> gradient of the logits [N, 4, 4]."""
    for step in range(divisors.shape[0] - 1, -1, -1):
        axis = 1 if step % 2 == 0 else 2
        s = divisors[step].unsqueeze(axis)
        grad = (grad - (grad * y).sum(axis, keepdim=True)) / s
        y = y * s
    p = y - eps
    return p * (grad - (grad * p).sum(2, keepdim=True))


if triton is not None:

    @triton.jit
    def _forward_kernel(l_ptr, y_ptr, s_ptr, n, PAIRS: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, 4)
        at = row[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        ok = (row < n)[:, None, None]
        at_col = row[:, None, None] * 4 + i[None, None, :]
        at_row = row[:, None, None] * 4 + i[None, :, None]
        x = tl.load(l_ptr + at, mask=ok, other=0.0)
        x = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
        x = x / tl.sum(x, axis=2, keep_dims=True) + EPS
        s = tl.sum(x, axis=1, keep_dims=True) + EPS
        tl.store(s_ptr + at_col, s, mask=ok)
        x = x / s
        for k in range(PAIRS):
            s = tl.sum(x, axis=2, keep_dims=True) + EPS
            tl.store(s_ptr + (2 * k + 1) * n * 4 + at_row, s, mask=ok)
            x = x / s
            s = tl.sum(x, axis=1, keep_dims=True) + EPS
            tl.store(s_ptr + (2 * k + 2) * n * 4 + at_col, s, mask=ok)
            x = x / s
        tl.store(y_ptr + at, x, mask=ok)

    @triton.jit
    def _backward_kernel(g_ptr, y_ptr, s_ptr, d_ptr, n, PAIRS: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, 4)
        at = row[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        ok = (row < n)[:, None, None]
        at_col = row[:, None, None] * 4 + i[None, None, :]
        at_row = row[:, None, None] * 4 + i[None, :, None]
        g = tl.load(g_ptr + at, mask=ok, other=0.0)
        y = tl.load(y_ptr + at, mask=ok, other=0.0)
        for back in range(PAIRS):
            k = PAIRS - 1 - back
            s = tl.load(s_ptr + (2 * k + 2) * n * 4 + at_col, mask=ok, other=1.0)
            g = (g - tl.sum(g * y, axis=1, keep_dims=True)) / s
            y = y * s
            s = tl.load(s_ptr + (2 * k + 1) * n * 4 + at_row, mask=ok, other=1.0)
            g = (g - tl.sum(g * y, axis=2, keep_dims=True)) / s
            y = y * s
        s = tl.load(s_ptr + at_col, mask=ok, other=1.0)
        g = (g - tl.sum(g * y, axis=1, keep_dims=True)) / s
        p = y * s - EPS
        tl.store(d_ptr + at, p * (g - tl.sum(g * p, axis=2, keep_dims=True)), mask=ok)


@torch.library.custom_op("tide_minis::sinkhorn", mutates_args=())
def _sinkhorn(logits: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor]:
    if not logits.is_cuda:
        return _forward_plain(logits, iters, eps)
    logits = logits.contiguous()
    n = logits.shape[0]
    y = torch.empty_like(logits)
    s = torch.empty(2 * iters - 1, n, 4, device=logits.device)
    _forward_kernel[(triton.cdiv(n, BLOCK),)](logits, y, s, n, iters - 1, eps, BLOCK)
    return y, s


@_sinkhorn.register_fake
def _(logits: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape), logits.new_empty(2 * iters - 1, logits.shape[0], 4)


@torch.library.custom_op("tide_minis::sinkhorn_grad", mutates_args=())
def _sinkhorn_grad(grad: Tensor, y: Tensor, divisors: Tensor, eps: float) -> Tensor:
    if not grad.is_cuda:
        return _backward_plain(grad, y, divisors, eps)
    grad, y, divisors = grad.contiguous(), y.contiguous(), divisors.contiguous()
    n = grad.shape[0]
    out = torch.empty_like(grad)
    pairs = (divisors.shape[0] - 1) // 2
    _backward_kernel[(triton.cdiv(n, BLOCK),)](grad, y, divisors, out, n, pairs, eps, BLOCK)
    return out


@_sinkhorn_grad.register_fake
def _(grad: Tensor, y: Tensor, divisors: Tensor, eps: float) -> Tensor:
    return grad.new_empty(grad.shape)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.eps = inputs[2]  # type: ignore[attr-defined]


def _grad(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _unused: Tensor) -> tuple[Tensor, None, None]:
    y, divisors = ctx.saved_tensors  # type: ignore[attr-defined]
    return _sinkhorn_grad(grad, y, divisors, ctx.eps), None, None  # type: ignore[attr-defined]


_sinkhorn.register_autograd(_grad, setup_context=_save)


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """logits [N, 4, 4] fp32 -> comb [N, 4, 4]; ends on columns, so that sums over the first index are about 1."""
    return _sinkhorn(logits, iters, eps)[0]
