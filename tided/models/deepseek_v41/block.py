"""A layer: attention and experts, each read from and written to the residual streams through hyper-connections."""

from dataclasses import dataclass

from torch import Tensor

from kernels import hyper
from kernels.norm import rms_norm
from kernels.numerics import Numerics
from tided.models.deepseek_v41.attention import Attention
from tided.models.deepseek_v41.config import TextConfig
from tided.models.deepseek_v41.moe import Moe
from tided.models.deepseek_v41.step import Pass
from tided.models.deepseek_v41.weights import Weights
from tided.models.parallel import Group


@dataclass(frozen=True)
class HyperConnection:
    """The learned mix of a sub-layer."""

    fn: Tensor  # [S * (2 + S), S * D]
    scale: Tensor  # [S * (2 + S)]
    base: Tensor
    streams: int
    iterations: int
    eps: float

    def mix(self, streams: Tensor) -> hyper.Mix:
        return hyper.mix(streams, self.fn, self.scale, self.base, self.iterations, self.eps)


@dataclass(frozen=True)
class Block:
    layer: int
    hc_attn: HyperConnection
    hc_ffn: HyperConnection
    attn_norm: Tensor
    ffn_norm: Tensor
    eps: float
    attention: Attention
    moe: Moe
    group: Group
    numerics: Numerics

    def forward(self, step: Pass, streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        """streams [T, S, D], pre [T, S] from the sub-layer before -> streams, and pre for the sub-layer behind.

        Each sub-layer is read with the `pre` computed one sub-layer earlier; its own mix depends on the streams as
        they enter it, not on its output."""
        n = self.numerics
        mix = self.hc_attn.mix(streams)
        output = n.store(self.group.sum(self.attention.forward(step, self.attention_input(streams, pre))))
        streams, pre = n.store(hyper.expand(streams, output, mix.post, mix.comb)), mix.pre
        mix = self.hc_ffn.mix(streams)
        output = n.store(self.group.sum(self.moe.forward(step, self._read(streams, pre, self.ffn_norm))))
        return n.store(hyper.expand(streams, output, mix.post, mix.comb)), mix.pre

    def attention_input(self, streams: Tensor, pre: Tensor) -> Tensor:
        """-> [T, D]"""
        return self._read(streams, pre, self.attn_norm)

    def _read(self, streams: Tensor, pre: Tensor, norm: Tensor) -> Tensor:
        n = self.numerics
        return n.store(rms_norm(n.store(hyper.collapse(streams, pre)), norm, self.eps))


def load_hyper_connection(weights: Weights, t: TextConfig, part: str) -> HyperConnection:
    """`weights` at `layers.L`; `part` is "attn" or "ffn". The three scales are spread over pre, post and comb."""
    width = t.hc_mult
    kinds = weights.plain(f"hc_{part}_scale")
    scale = kinds.repeat_interleave(kinds.new_tensor([width, width, width * width]).long())
    return HyperConnection(
        weights.plain(f"hc_{part}_fn"), scale, weights.plain(f"hc_{part}_base"), width, t.hc_sinkhorn_iters, t.hc_eps
    )
