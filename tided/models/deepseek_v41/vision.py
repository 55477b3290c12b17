"""The vision tower: the pixels of an image to the rows that stand in place of its tokens' embeddings.

    patches [N, 3 * p * p]   one row a patch, in reading order
    blocks                   attention among all patches of the image, positions by row and column
    aligner                  squares of merge x merge patches -> a row of the text model's width each
    span                     start, rows of the grid with a line end behind each, end: learned vectors around them

One rank holds the tower (`vision.rank`) and computes; every rank gets the rows (`Vision.see`). Matrices stay in memory
as stored, bf16; products are fp32 and are rounded where the model was made to round.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.norm import rms_norm
from kernels.numerics import Numerics
from kernels.rope import frequencies
from tided.errors import PairError
from tided.images.geometry import Geometry, Size
from tided.models.deepseek_v41.config import Config
from tided.models.deepseek_v41.weights import Weights
from tided.models.parallel import Group

EPS = 1e-6  # of the tower's norms; the text model's are another


@dataclass(frozen=True)
class Linear:
    weight: Tensor  # [out, in] bf16
    bias: Tensor | None  # [out] fp32

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] fp32 -> [N, out] fp32, not yet rounded."""
        return F.linear(x, self.weight.to(torch.float32), self.bias)


@dataclass(frozen=True)
class TowerBlock:
    norm1: Tensor
    norm2: Tensor
    wqkv: Linear
    wo: Linear
    w1: Linear  # gate over up
    w2: Linear
    heads: int
    numerics: Numerics

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """x [N, W] -> [N, W]"""
        n = self.numerics
        x = n.store(x + n.store(self.wo(self._attend(n.store(rms_norm(x, self.norm1, EPS)), turn))))
        gate, up = n.store(self.w1(n.store(rms_norm(x, self.norm2, EPS)))).chunk(2, -1)
        return n.store(x + n.store(self.w2(n.store(n.store(F.silu(gate)) * up))))

    def _attend(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Every patch sees every patch: [N, W] -> [N, W]."""
        n = self.numerics
        query, key, value = (
            part.view(len(x), self.heads, -1).transpose(0, 1) for part in n.store(self.wqkv(x)).chunk(3, -1)
        )
        query, key = n.store(_rotated(query, turn)), n.store(_rotated(key, turn))
        # With a batch of one the fused kernels are taken, which never hold all [H, N, N] scores.
        seen = F.scaled_dot_product_attention(query[None], key[None], value[None])[0]
        return n.store(seen.transpose(0, 1).reshape(len(x), -1))


@dataclass(frozen=True)
class Tower:
    geometry: Geometry
    patch_embed: Linear
    blocks: tuple[TowerBlock, ...]
    norm: Tensor
    freqs: Tensor  # [head_dim / 4] radians a row or column
    aligner1: Linear
    aligner2: Linear
    marks: tuple[Tensor, Tensor, Tensor]  # [D] each: start, line end, end
    numerics: Numerics

    @torch.inference_mode()
    def span(self, pixels: Tensor) -> Tensor:
        """pixels [height, width, 3] uint8, whole patches -> [tokens, D] fp32, in the order of the prompt's tokens."""
        side = self.geometry.patch
        rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
        seen = self.aligned(self.forward(self.patches(pixels), rows, columns), rows, columns)
        start, line_end, end = (mark.unsqueeze(0) for mark in self.marks)
        lines = torch.split(seen, self.geometry.grid(Size(*pixels.shape[:2]))[1])
        return torch.cat([start, *(part for line in lines for part in (line, line_end)), end])

    def patches(self, pixels: Tensor) -> Tensor:
        """[height, width, 3] uint8 -> [N, 3 * p * p] fp32 in -1..1"""
        side = self.geometry.patch
        scaled = self.numerics.store((pixels.to(torch.float32) / 255 - 0.5) / 0.5).permute(2, 0, 1)
        cut = scaled.reshape(3, pixels.shape[0] // side, side, pixels.shape[1] // side, side)
        return cut.permute(1, 3, 0, 2, 4).reshape(-1, 3 * side * side)

    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """patches [rows * columns, 3 * p * p] -> [rows * columns, W]"""
        x, turn = self.numerics.store(self.patch_embed(patches)), self._turn(rows, columns)
        for block in self.blocks:
            x = block.forward(x, turn)
        return self.numerics.store(rms_norm(x, self.norm, EPS))

    def aligned(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """x [rows * columns, W] -> [tokens of the grid, D]. Squares at the right and lower edge are filled with
        zeros; within a square the channel counts first, then row and column."""
        n, merge = self.numerics, self.geometry.merge
        grid = F.pad(x.view(rows, columns, -1).permute(2, 0, 1), (0, -columns % merge, 0, -rows % merge))
        squares = F.unfold(grid.unsqueeze(0), merge, stride=merge)[0].t()
        return n.store(self.aligner2(n.store(F.gelu(n.store(self.aligner1(squares))))))

    def _turn(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """cos, sin [rows * columns, head_dim / 2]: the first half turns by row, the second by column."""
        steps = torch.arange(max(rows, columns), device=self.freqs.device, dtype=torch.float32)
        angles = torch.outer(steps, self.freqs)
        by_row = angles[:rows].unsqueeze(1).expand(-1, columns, -1)
        by_column = angles[:columns].unsqueeze(0).expand(rows, -1, -1)
        both = torch.cat([by_row, by_column], -1).flatten(0, 1)
        return both.cos(), both.sin()


def _rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x [H, N, d]: dimension i is paired with i + d / 2."""
    cos, sin = turn
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@dataclass(frozen=True)
class Vision:
    """What each rank has of it. `tower` is None on all ranks but `rank`."""

    geometry: Geometry
    rank: int
    hidden: int
    tower: Tower | None
    group: Group
    device: torch.device

    def see(self, size: Size, pixels: bytes | None) -> Tensor:
        """The rows of an image, [tokens, D] fp32, the same on every rank. `pixels`: on rank 0, [height, width, 3];
        elsewhere None. Every rank calls it at the same time for the same size (C1)."""
        if (pixels is None) != (self.group.rank > 0):
            raise PairError("the pixels of an image are rank 0's, and are not where they should be")
        raw = self._brought(size, pixels)
        if self.tower is None:
            rows = torch.zeros(self.geometry.tokens(size), self.hidden, device=self.device)
        else:
            rows = self.tower.span(raw.view(*size, 3))
        return self.group.sum(rows)  # nothing is added but zeros

    def _brought(self, size: Size, pixels: bytes | None) -> Tensor:
        """[height * width * 3] uint8, right on the rank that holds the tower."""
        count = size.height * size.width * 3
        if pixels is None:
            mine = torch.zeros(count, dtype=torch.uint8, device=self.device)
        else:
            mine = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).to(self.device)
        return mine if self.rank == 0 else self.group.concat(mine)[:count]


def tower_bytes(config: Config) -> int:
    """Memory of the tower on its rank: what is stored, to within the norms."""
    v, d = config.vision_config, config.text_config.hidden_size
    width, inner, folded = v.hidden_size, v.intermediate_size, v.hidden_size * v.downsample_ratio**2
    block = (4 * width + 3 * inner) * width + 6 * width
    aligner = (folded + d + 2) * d
    return 2 * (v.num_hidden_layers * block + 3 * v.patch_size**2 * width + 2 * width + aligner + 3 * d)


def load_vision(weights: Weights, config: Config, rank: int, numerics: Numerics) -> Vision:
    """`weights` at the root; `rank` holds the tower."""
    tower = _load_tower(weights, config, numerics) if weights.group.rank == rank else None
    geometry, hidden = config.vision_config.geometry, config.text_config.hidden_size
    return Vision(geometry, rank, hidden, tower, weights.group, weights.device)


def _load_tower(weights: Weights, config: Config, numerics: Numerics) -> Tower:
    v, at, aligner = config.vision_config, weights.under("vision"), weights.under("aligner")
    return Tower(
        v.geometry,
        _linear(at, "patch_embed.proj"),
        tuple(
            _load_block(at.under(f"blocks.{i}"), v.num_attention_heads, numerics) for i in range(v.num_hidden_layers)
        ),
        norm=at.plain("norm.weight"),
        freqs=frequencies(v.hidden_size // v.num_attention_heads // 2, v.rope_theta, None).to(weights.device),
        aligner1=_linear(aligner, "w1"),
        aligner2=_linear(aligner, "w2"),
        marks=(weights.plain("image_start"), weights.plain("image_newline"), weights.plain("image_end")),
        numerics=numerics,
    )


def _load_block(at: Weights, heads: int, numerics: Numerics) -> TowerBlock:
    return TowerBlock(
        norm1=at.plain("norm1.weight"),
        norm2=at.plain("norm2.weight"),
        wqkv=_linear(at, "attn.wqkv"),
        wo=_linear(at, "attn.wo"),
        w1=_linear(at, "mlp.w1", bias=False),
        w2=_linear(at, "mlp.w2", bias=False),
        heads=heads,
        numerics=numerics,
    )


def _linear(at: Weights, name: str, bias: bool = True) -> Linear:
    return Linear(at.stored(f"{name}.weight"), at.plain(f"{name}.bias") if bias else None)
