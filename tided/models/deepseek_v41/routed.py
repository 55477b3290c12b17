"""The routed experts of rows by kernels, as `tided.models.mixture` has them by the references: the choice, demand,
reads before use, and the sum.

A row has the same bits whether it waits for experts, is beside rows that do, or nobody does: the choice is made anew by
the launch that made it first; picks are computed as their records arrive by the launches that compute all at once; and
one launch adds them in the order of k."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import router_triton as router
from kernels.device import INTERPRETED
from kernels.experts_triton import sum_of_picks
from tided.experts.fetch import Serving
from tided.models.deepseek_v41.moe import Moe
from tided.models.deepseek_v41.step import Pass


def routed_experts(
    moe: Moe, step: Pass, parts: Tensor, x: Tensor, pick_outputs: Callable[..., None], beside: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """parts [splits, T, E] fp32 of the gate's product; x [T, D] bf16, rounded as activation; `pick_outputs` of
    `experts_triton` or `experts_chunk_triton` -> [T, D] fp32, this rank's part; and what `beside` gives, which is
    launched before the host waits for reads."""
    bank = moe.bank
    routed, late = _routed(moe, step, parts)
    ids, counted = routed.ids, routed.slots
    outputs = torch.empty(*ids.shape, bank.plain_record.hidden, dtype=torch.float32, device=x.device)

    def compute(picks: Tensor) -> None:
        work = (x, bank.slots, bank.plain_record, picks, routed.weights, moe.limit)
        pick_outputs(outputs, *work, asm=not INTERPRETED)

    compute(routed.slots)
    meanwhile = beside()
    if late is not None:
        slot_of, counted = bank.tables.slot_of[moe.layer], ids.to(torch.int32)  # all come
        for arrived in late:
            here = torch.full_like(slot_of, -1)
            here[list(arrived)] = torch.tensor(list(arrived.values()), dtype=here.dtype, device=here.device)
            compute(here[ids])
            for expert in (expert for expert, slot in arrived.items() if slot < 0):
                outputs[ids == expert] = 0.0  # numbers, so that sums over the ranks go on; they are nobody's answer
    return sum_of_picks(outputs, counted), meanwhile


def _routed(moe: Moe, step: Pass, parts: Tensor) -> tuple[router.Routed, Serving | None]:
    """The choice, whose wish is recorded as demand, and what is read for it (None: nobody may wait here)."""
    bank, lanes = moe.bank, step.lane_of_row
    urgent = bank.urgent if bank.urgent is not None and bank.urgent.active else None
    routed = _chosen(moe, step, parts, bank.tables.routable[moe.layer])
    wish = (routed.wanted, routed.wanted_scores, routed.wanted_weights, routed.missed)
    allowed = urgent.allowed(moe.layer, lanes, routed) if urgent else None
    if urgent is None or allowed is None:
        bank.tap.record(moe.layer, lanes, *wish)
        return routed, None
    again = _chosen(moe, step, parts, allowed)
    bank.tap.record(moe.layer, lanes, *wish, routed.missed & ~again.missed)
    absent = torch.unique(again.ids[again.slots < 0]).tolist()
    return again, urgent.serve(moe.layer, absent, (lanes, again.ids))


def _chosen(moe: Moe, step: Pass, parts: Tensor, allowed: Tensor) -> router.Routed:
    """allowed [E] or [T, E] bool: which experts rows may use."""
    out = router.room(parts.shape[1], moe.top_k, device=parts.device)
    slot_of = moe.bank.tables.slot_of[moe.layer]
    router.route(parts, moe.bias_of(step), allowed, slot_of, moe.top_k, moe.route_scale, out)
    return out
