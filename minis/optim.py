"""Muon for matrices, AdamW for the rest. Rates are device scalars, so a captured step can follow a schedule."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_ADAM_FAST = ("embed.weight", "embed_tokens.weight")  # embedding, Engram tables, Markov embedding
_FROZEN = ("vision.", "aligner.", "image_")


def frozen(name: str) -> bool:
    return name.startswith(_FROZEN) or name.endswith((".gate.bias", ".gate.bias_vl", ".e_score_correction_bias"))


def use_muon(name: str, w: Tensor) -> bool:
    """All matrices of the blocks and the drafter; not lookups, heads, gates and hyper-connections."""
    if w.ndim < 2 or w.shape[-2] == 1 or ".hc_" in name or "q_weight" in name or "k_weight" in name:
        return False
    slow = (*_ADAM_FAST, "head.weight", "gate.weight", "wgate.weight", "weights_proj.weight")
    return not name.endswith(slow) and not frozen(name)


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """g [n, a, b] -> approximately the nearest semi-orthogonal matrices (Newton-Schulz in bf16)."""
    x = g.bfloat16()
    flip = x.shape[-2] > x.shape[-1]
    if flip:
        x = x.mT
    x = x / (x.float().square().sum((-2, -1), keepdim=True).sqrt() + 1e-7).bfloat16()
    for _ in range(steps):
        s = x @ x.mT
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.mT if flip else x


class Muon:
    """Parameters of one shape are stacked, so that a step is a handful of batched products."""

    def __init__(self, params: Iterable[Tensor], lr: Tensor, decay: float = 0.1, momentum: float = 0.95) -> None:
        self.lr, self.decay, self.momentum = lr, decay, momentum
        groups: dict[tuple[int, int], list[Tensor]] = {}
        for p in params:
            groups.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
        self.groups = list(groups.values())
        self.state = [
            torch.zeros(sum(p.numel() // (a * b) for p in g), a, b, device=g[0].device) for (a, b), g in groups.items()
        ]

    @torch.no_grad()
    def step(self) -> None:
        for group, buf in zip(self.groups, self.state, strict=True):
            a, b = buf.shape[1:]
            grads = torch.cat([p.grad.reshape(-1, a, b) for p in group if p.grad is not None])
            buf.mul_(self.momentum).add_(grads)
            update = orthogonalise(grads + self.momentum * buf).float() * (0.2 * max(a, b) ** 0.5)
            at = 0
            for p in group:
                n = p.numel() // (a * b)
                p.mul_(1 - self.lr * self.decay).sub_(update[at : at + n].view_as(p) * self.lr)
                at += n


class AdamW:
    def __init__(self, params: list[Tensor], lr: Tensor, decay: float = 0.0) -> None:
        self.params, self.lr, self.decay = params, lr, decay
        self.m = [torch.zeros_like(p) for p in params]
        self.v = [torch.zeros_like(p) for p in params]
        self.count = torch.zeros((), device=params[0].device)

    @torch.no_grad()
    def step(self, clip: Tensor) -> None:
        """`clip`: factor on all gradients, a device scalar."""
        b1, b2 = 0.9, 0.95
        self.count += 1
        grads = torch._foreach_mul([p.grad for p in self.params], clip)
        torch._foreach_lerp_(self.m, grads, 1 - b1)
        torch._foreach_mul_(self.v, b2)
        torch._foreach_addcmul_(self.v, grads, grads, 1 - b2)
        scale = self.lr / (1 - b1**self.count)
        denom = torch._foreach_div(self.v, 1 - b2**self.count)
        torch._foreach_sqrt_(denom)
        torch._foreach_add_(denom, 1e-8)
        update = torch._foreach_div(self.m, denom)
        torch._foreach_mul_(update, scale)
        if self.decay:
            torch._foreach_mul_(self.params, 1 - self.lr * self.decay)
        torch._foreach_sub_(self.params, update)


class Optimiser:
    """Both optimisers over a parameter dictionary. `rate` holds the schedule's factor, 0..1, on the device."""

    def __init__(
        self, p: dict[str, Tensor], peak_muon: float = 4e-3, peak_fast: float = 4e-3, peak: float = 2e-3
    ) -> None:
        device = next(iter(p.values())).device
        self.peaks = (peak_muon, peak_fast, peak, peak)
        self.rates = [torch.zeros((), device=device) for _ in self.peaks]
        live = {n: w for n, w in p.items() if not frozen(n)}
        muon = [w for n, w in live.items() if use_muon(n, w)]
        rest = {n: w for n, w in live.items() if not use_muon(n, w)}
        fast = [w for n, w in rest.items() if n.endswith(_ADAM_FAST)]
        heads = [w for n, w in rest.items() if n.endswith(("head.weight", "gate.weight"))]
        slow = [w for n, w in rest.items() if not n.endswith((*_ADAM_FAST, "head.weight", "gate.weight"))]
        self.muon = Muon(muon, self.rates[0])
        self.adams = [AdamW(fast, self.rates[1]), AdamW(heads, self.rates[2], 0.02), AdamW(slow, self.rates[3])]
        self.trained = muon + fast + heads + slow

    def set_rate(self, factor: float) -> None:
        for rate, peak in zip(self.rates, self.peaks, strict=True):
            rate.fill_(peak * factor)

    def step(self) -> Tensor:
        """Returns the gradient norm of the AdamW part, which is clipped to 1."""
        grads = [p.grad for a in self.adams for p in a.params]
        norm = torch.stack(torch._foreach_norm(grads)).square().sum().sqrt()
        clip = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        self.muon.step()
        for a in self.adams:
            a.step(clip)
        return norm
