"""The routable set as the model reads it, and the demand it records. Tensors are mutated in place, never replaced:
captured graphs hold their addresses (contract C2)."""

import torch
from torch import Tensor


class RoutingTables:
    """`slot_of` [layers, experts] int32, -1 for an absent expert; `routable` [layers, experts] bool."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self.slot_of: Tensor = torch.full((layers, experts), -1, dtype=torch.int32, device=device)
        self.routable: Tensor = torch.zeros((layers, experts), dtype=torch.bool, device=device)

    def publish(self, layer: int, expert: int, slot: int) -> None:
        self.slot_of[layer, expert] = slot
        self.routable[layer, expert] = True

    def withdraw(self, layer: int, expert: int) -> None:
        self.routable[layer, expert] = False
        self.slot_of[layer, expert] = -1


class DemandTap:
    """What the router wanted, before residency was applied, by lane. Filled inside the step.

    counts, mass [lanes, layers, experts]: true top-k picks and their scores (unbiased, before normalisation).
    totals [lanes, 4] float64: picks, missed picks, routing weight of all picks, routing weight of missed picks.
    """

    def __init__(self, lanes: int, layers: int, experts: int, device: torch.device) -> None:
        self.counts: Tensor = torch.zeros((lanes, layers, experts), dtype=torch.float32, device=device)
        self.mass: Tensor = torch.zeros((lanes, layers, experts), dtype=torch.float32, device=device)
        self.totals: Tensor = torch.zeros((lanes, 4), dtype=torch.float64, device=device)
        self.enabled = True

    def record(
        self, layer: int, lane_of_row: Tensor, wanted: Tensor, scores: Tensor, weights: Tensor, missed: Tensor
    ) -> None:
        """One layer of one step. lane_of_row [T] int64; wanted [T, k] int64 true top-k; scores [T, k] fp32 unbiased;
        weights [T, k] normalised to sum 1 a row; missed [T, k] bool."""
        if not self.enabled:
            return
        lanes = lane_of_row[:, None].expand_as(wanted)
        self.counts[:, layer].index_put_((lanes, wanted), torch.ones_like(scores), accumulate=True)
        self.mass[:, layer].index_put_((lanes, wanted), scores, accumulate=True)
        row = torch.stack([torch.ones_like(weights), missed.to(weights.dtype), weights, weights * missed], dim=-1).sum(
            dim=1
        )
        self.totals.index_add_(0, lane_of_row, row.to(self.totals.dtype))

    def take(self, lane: int) -> tuple[Tensor, Tensor, Tensor]:
        """The lane's counts, mass [layers, experts] and totals [4] so far; its buffers start again at zero."""
        taken = (self.counts[lane].clone(), self.mass[lane].clone(), self.totals[lane].clone())
        self.counts[lane].zero_()
        self.mass[lane].zero_()
        self.totals[lane].zero_()
        return taken
