"""DSpark: the model's own drafter. From three layers' streams of the tokens computed so far, and one token more, it
proposes a block of tokens at once.

    watch      the rows of a pass: their taps become rows of the drafter's own windows
    propose    an anchor that is drawn and not computed yet -> the tokens that may follow it, with a confidence each

The rows of a block see the window and all of the block, in no order; only the Markov head makes each token depend on
the one before. Nothing of a proposal is kept. The windows are the last rings of a `Context`, so whatever keeps or moves
a context keeps them too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import head, hyper
from kernels.linear import Fp8Matrix, Matrix, fp8_linear
from kernels.norm import rms_norm
from kernels.numerics import Numerics
from kernels.record import ExpertRecord
from kernels.rows import ROWS, matmul, together
from packers.shards import Checkpoint
from tided.cache.context import Context
from tided.cache.pool import Pool
from tided.experts.bank import ExpertBank
from tided.experts.source import CheckpointSource
from tided.models.base import Choose, Draft
from tided.models.deepseek_v41.attention import Attention, load_attention
from tided.models.deepseek_v41.block import Block, load_hyper_connection
from tided.models.deepseek_v41.config import TextConfig
from tided.models.deepseek_v41.moe import load_moe
from tided.models.deepseek_v41.names import Inventory, expert_names
from tided.models.deepseek_v41.step import Pass, Rotations, Span
from tided.models.deepseek_v41.weights import Weights
from tided.models.own_experts import resident_bank
from tided.models.parallel import Group
from tided.models.proposals import Lawful, Proposals

if TYPE_CHECKING:
    from tided.models.deepseek_v41.model import DeepseekV41

# Bytes of an element in memory, as `Weights` keeps them: of what is not named 4.
HELD = {"F8_E8M0": 0}
PACKED = {"F8_E4M3": 1, "F8_E8M0": 1, "matrix": 2}
MATRICES = ("ffn.gate.weight", "markov_head.head.weight")
CUT = ("attn.wq_b.", "attn.wo_a.", "attn.wo_b.", "attn.attn_sink", "shared_experts.")  # over the ranks


class DraftAttention(Attention):
    """Rows of a block see the lane's window and each other, and leave nothing behind."""

    def _attend(self, span: Span, query: Tensor, row: Tensor) -> Tensor:
        """query [K, H, d], row [K, d] -> [K, H, d]"""
        past = span.lane.windows[self.layer, : min(span.start, self.window)].to(torch.float32)
        rows = torch.cat([past, row]).expand(span.count, -1, -1)
        return self._softmax(query, rows, None)


@dataclass(frozen=True)
class Drafter:
    """One rank's part. `embed` gives streams [T, S, D] of token ids [T], `head` is this rank's rows of the output head;
    both are the model's."""

    size: int  # K, tokens of a block
    noise_id: int  # stands for what a place behind the anchor knows of itself
    main_proj: Matrix  # [D, taps * D]
    main_norm: Tensor
    blocks: tuple[Block, ...]
    norm: Tensor
    eps: float
    markov_embed: Tensor  # [V, r]
    markov_head: Tensor  # [V, r]
    confidence: Tensor  # [1, D + r]
    embed: Callable[[Tensor], Tensor]
    head: Tensor  # [V / ranks, D]
    rotations: Rotations
    group: Group
    numerics: Numerics
    proposals: Proposals = field(default_factory=Proposals)  # of fixed shape, where kernels serve the device

    @torch.inference_mode()
    def watch(self, step: Pass, taps: Sequence[Tensor]) -> None:
        """taps, each [T, D]: the mean streams that entered the tapped layers, of the rows of a pass. Called before the
        lanes move on."""
        n = self.numerics
        main = n.store(fp8_linear(torch.cat(list(taps), 1), self.main_proj, n.activation))
        main = n.store(rms_norm(main, self.main_norm, self.eps))
        for block in self.blocks:
            rows = block.attention.window_row(main, step.plain)
            for span in step.spans:
                block.attention.keep(span.lane, span.start, rows[span.rows])

    @torch.inference_mode()
    def propose(self, lanes: list[Context], anchors: Tensor, choose: Choose) -> Draft:
        """anchors [R] int64: the token of each lane that comes after its context."""
        most = ROWS // self.size
        if self._serves() and (len(lanes) <= most or isinstance(choose, Lawful)):
            from tided.models.deepseek_v41.draft_step import DraftStep  # a compiler, which a CPU need not have

            return self.proposals.run(lanes, anchors, choose, self.size, most, lambda count: DraftStep(self, count))
        block = torch.full((len(lanes), self.size), self.noise_id, dtype=torch.int64, device=anchors.device)
        block[:, 0] = anchors
        step = self.rotations.begin(lanes, self.size)
        streams = self.embed(block.view(-1))
        with together():
            return self._chosen(self._hidden(step, streams).view(len(lanes), self.size, -1), anchors, choose)

    def _serves(self) -> bool:
        """Whether the kernels of decode steps take a block, these weights, and a window of this size."""
        one = self.blocks[0]
        known = one.hc_attn.streams & (one.hc_attn.streams - 1) == 0 and one.attention.window % 32 == 0
        return known and self.size <= ROWS and isinstance(self.main_proj, Fp8Matrix)

    def _hidden(self, step: Pass, streams: Tensor) -> Tensor:
        """streams [T, S, D] -> [T, D] before the norm."""
        pre = torch.zeros(streams.shape[:2], device=streams.device)
        pre[:, 0] = 1.0
        for one in self.blocks:
            streams, pre = one.forward(step, streams, pre)
        return self.numerics.store(hyper.collapse(streams, pre))

    def _chosen(self, hidden: Tensor, anchors: Tensor, choose: Choose) -> Draft:
        """hidden [R, K, D] before the norm: the places one after another, each with the token before it."""
        normed = self.numerics.store(rms_norm(hidden.flatten(0, 1), self.norm, self.eps))
        base = self.group.concat(head.logits(normed, self.head)).view(*hidden.shape[:2], -1)
        ids, logits, sure, before = [], [], [], anchors
        for place in range(self.size):
            known = self.markov_embed[before]
            logits.append(base[:, place] + head.logits(known, self.markov_head))
            sure.append(matmul(torch.cat([hidden[:, place], known], 1), self.confidence))
            before = choose(place, logits[-1])
            ids.append(before)
        return Draft(torch.stack(ids, 1), torch.stack(logits, 1), torch.cat(sure, 1))


def load_drafter(trunk: "DeepseekV41", weights: Weights, t: TextConfig, bank: ExpertBank) -> Drafter:
    """`weights` at the root; `bank` holds the experts of its blocks. All else is the trunk's own."""
    first, last = weights.under("mtp.0"), weights.under(f"mtp.{t.num_nextn_predict_layers - 1}")
    return Drafter(
        t.dspark_block_size,
        t.dspark_noise_token_id,
        main_proj=first.fp8("main_proj"),
        main_norm=first.plain("main_norm.weight"),
        blocks=tuple(
            _load_block(weights, t, block, trunk.pool, trunk.rotations, bank, trunk.numerics)
            for block in range(t.num_nextn_predict_layers)
        ),
        norm=last.plain("norm.weight"),
        eps=t.rms_norm_eps,
        markov_embed=last.plain("markov_head.embed.weight"),
        markov_head=last.matrix("markov_head.head.weight"),
        confidence=last.plain("confidence_head.proj.weight"),
        embed=trunk.embedded,
        head=trunk.head,
        rotations=trunk.rotations,
        group=trunk.group,
        numerics=trunk.numerics,
    )


def drafter_bytes(t: TextConfig, inventory: Inventory, ranks: int, packed: bool) -> int:
    """Of one rank's drafter and its experts: what loading it allocates of the tensors of `inventory`."""
    record = ExpertRecord(t.hidden_size, t.moe_intermediate_size, ranks)
    total = t.num_nextn_predict_layers * t.dspark_n_routed_experts * record.slot_bytes
    for name, spec in inventory.items():
        if name.startswith("mtp.") and ".experts." not in name:
            kind = "matrix" if name.endswith(MATRICES) else str(spec.dtype)
            each = (PACKED if packed else HELD).get(kind, 4)
            total += each * math.prod(spec.shape) // (ranks if any(part in name for part in CUT) else 1)
    return total


def drafter_bank(checkpoint: Checkpoint, t: TextConfig, group: Group, device: torch.device) -> ExpertBank:
    """The experts of its blocks, read into memory of their own, and never counted."""
    record = ExpertRecord(t.hidden_size, t.moe_intermediate_size, group.ranks)
    source = CheckpointSource(
        checkpoint, lambda block, expert: expert_names(f"mtp.{block}", expert), record, group.rank
    )
    return resident_bank(source, record, t.num_nextn_predict_layers, t.dspark_n_routed_experts, device)


def _load_block(
    weights: Weights, t: TextConfig, block: int, pool: Pool, rotations: Rotations, bank: ExpertBank, numerics: Numerics
) -> Block:
    at, layer = weights.under(f"mtp.{block}"), t.num_hidden_layers + block
    attention = load_attention(at.under("attn"), t, layer, pool, rotations, numerics)
    return Block(
        layer,
        hc_attn=load_hyper_connection(at, t, "attn"),
        hc_ffn=load_hyper_connection(at, t, "ffn"),
        attn_norm=at.plain("attn_norm.weight"),
        ffn_norm=at.plain("ffn_norm.weight"),
        eps=t.rms_norm_eps,
        attention=DraftAttention(**vars(attention)),
        moe=load_moe(at.under("ffn"), t, block, t.dspark_num_experts_per_tok, bank, numerics),
        group=weights.group,
        numerics=numerics,
    )
