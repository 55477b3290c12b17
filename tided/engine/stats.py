"""What an answer cost: `x_engine_stats`, and one line of log without text. Every request keeps counters of its own from
the moment it is submitted, so a cancelled one never reports its predecessor's."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from tided.engine.motion import Plan
from tided.engine.types import Request


@dataclass
class Picks:
    """Router picks of one phase, before residency, and their routing weight, in the order of `DemandTap.totals`: all;
    missed (not resident); of those read before use; of those substituted, the ones too light to be read at all."""

    picks: float = 0
    missed: float = 0
    weight: float = 0
    missed_weight: float = 0
    read: float = 0
    light: float = 0
    read_weight: float = 0
    light_weight: float = 0

    def rate(self) -> float | None:
        return ratio(self.missed, self.picks)

    @property
    def substituted_weight_share(self) -> float | None:
        return ratio(self.missed_weight - self.read_weight, self.weight)

    def __add__(self, other: "Picks") -> "Picks":
        return Picks(*(getattr(self, name) + getattr(other, name) for name in Picks.__dataclass_fields__))

    def report(self, hot: bool) -> dict[str, Any]:
        """`hot`: there is a ring, so what is substituted and not light is offered to it."""
        rest = self.missed - self.read - self.light
        return {
            "routed_picks": int(self.picks),
            "missed_picks": int(self.missed),
            "missed_weight": rounded(self.missed_weight),
            "missed_weight_share": rounded(ratio(self.missed_weight, self.weight), 6),
            "substituted_weight_share": rounded(self.substituted_weight_share, 6),
            "classes": {
                "light": int(self.light + (0 if hot else rest)),
                "queued": int(rest if hot else 0),
                "read": int(self.read),
            },
        }


class Drafts(NamedTuple):
    """Drafts that were verified, and of those the accepted ones."""

    drafted: int = 0
    accepted: int = 0


class Residency(msgspec.Struct, frozen=True):
    """The resident set an answer ended with. `generation` counts the steps that changed it; `mask_hash` names the
    routable set, the hot ring included. `bytes_share`: of all experts' bytes, where these differ in size."""

    generation: int
    residents: int
    total: int
    mask_hash: str
    by_layer: tuple[int, ...] = ()
    bytes_share: float | None = None


@dataclass(frozen=True)
class Reads:
    """Reads of rank 0 since its start, whoever they were for. `waited_*`: those that a layer waited for, and what an
    earlier one had left."""

    nbytes: int = 0
    seconds: float = 0.0
    queue_ms: float = 0.0
    hot_bytes: int = 0
    failed: int = 0
    hot_issued: int = 0
    hot_late: int = 0
    hot_used: int = 0
    hot_used_weight: float = 0.0
    hot_evicted_unused: int = 0
    promoted: int = 0
    waited_reads: int = 0
    waited_kept: int = 0
    wait_s: float = 0.0

    def __sub__(self, other: "Reads") -> "Reads":
        return Reads(*(getattr(self, name) - getattr(other, name) for name in Reads.__dataclass_fields__))

    def report(self, tokens: int) -> dict[str, Any]:
        return {
            "nvme_gb": rounded(self.nbytes / 1e9, 6),
            "nvme_read_s": rounded(self.seconds),
            "nvme_gb_per_token": rounded(ratio(self.nbytes / 1e9, tokens), 6),
            "nvme_queue_ms": rounded(self.queue_ms, 2),
            "load_wait_s": rounded(self.wait_s),
            "promoted": self.promoted,
            "hot": {
                "reads": self.hot_issued,
                "bytes": self.hot_bytes,
                "late": self.hot_late,
                "used": self.hot_used,
                "used_weight": rounded(self.hot_used_weight),
                "evicted_unused": self.hot_evicted_unused,
            },
            "read_before_use": {"reads": self.waited_reads, "kept": self.waited_kept},
        }


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


@dataclass
class RequestStats:
    """Times are seconds of one monotonic clock. `prefill_s` is spent in steps of this prompt alone; `decode_s` is what
    its reader waited from the first token to the last, other requests' steps included."""

    request: Request
    submitted_s: float
    has_ring: bool = False
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_s: float = 0.0
    lane: int | None = None
    lanes_busy: int = 0
    cached_tokens: int = 0
    prefix_source: str = "none"  # "ram", "disk": where rank 0 found the prompt's beginning
    parked: int = 0
    prefill_s: float = 0.0
    prefilled_tokens: int = 0
    completion_tokens: int = 0
    decoded_tokens: int = 0
    depths: Counter[int] = field(default_factory=Counter)  # of its decode steps, by drafts verified
    loop_break: bool = False  # it was ended because it went round in circles
    stepped_tokens: int = 0  # that came of them, those behind the answer's end included
    passes: dict[int, tuple[Plan, int, int]] = field(
        default_factory=dict
    )  # plan, its swaps so far, tokens at the first
    before: Reads = field(default_factory=Reads)
    prefill: Picks = field(default_factory=Picks)
    decode: Picks = field(default_factory=Picks)

    def admitted(self, lane: int, now_s: float, lanes_busy: int, reads: Reads) -> None:
        self.lane, self.admitted_s, self.lanes_busy, self.before = lane, now_s, lanes_busy, reads

    def swapped(self, plans: Sequence[Plan]) -> None:
        """A swap of each of these plans became routable while the request ran."""
        for plan in plans:
            _, swaps, tokens = self.passes.get(id(plan), (plan, 0, self.completion_tokens))
            self.passes[id(plan)] = (plan, swaps + 1, tokens)

    @property
    def swaps(self) -> int:
        return sum(swaps for _, swaps, _ in self.passes.values())

    def chunk(self, tokens: int, seconds: float) -> None:
        self.prefilled_tokens += tokens
        self.prefill_s += seconds

    def token(self, now_s: float) -> None:
        """One sampled token; the first comes with the last chunk of the prompt, the others with decode steps."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        else:
            self.decoded_tokens += 1
        self.completion_tokens += 1
        self.last_s = now_s

    def stepped(self, depth: int, tokens: int) -> None:
        """A decode step that verified `depth` drafts brought so many tokens."""
        self.depths[depth] += 1
        self.stepped_tokens += tokens

    @property
    def drafts(self) -> Drafts:
        drafted = sum(depth * steps for depth, steps in self.depths.items())
        return Drafts(drafted, self.stepped_tokens - self.depths.total())

    @property
    def decode_s(self) -> float:
        return 0.0 if self.first_token_s is None else self.last_s - self.first_token_s

    def report(self, residency: Residency, now_s: float, reads: Reads) -> dict[str, Any]:
        """The stable keys of `x_engine_stats`; None where nothing is known (no first token, no pick). The hit rate is
        that of the answer, and of the prompt where no step followed it. What was read while the request ran is all of
        it: lanes share ring and plans."""
        queued_until = now_s if self.admitted_s is None else self.admitted_s
        ttft = None if self.first_token_s is None else self.first_token_s - self.submitted_s
        both, since = self.prefill + self.decode, reads - self.before if self.admitted_s is not None else Reads()
        hit = self.decode if self.decode.picks else both
        return {
            "prompt_tokens": len(self.request.prompt_ids),
            "cached_tokens": self.cached_tokens,
            "prefix_cached_tokens": self.cached_tokens,
            "prefix": {"source": self.prefix_source, "restored_tokens": self.cached_tokens},
            "completion_tokens": self.completion_tokens,
            "queue_s": rounded(queued_until - self.submitted_s),
            "prefill_s": rounded(self.prefill_s),
            "prefill_tok_s": rounded(ratio(self.prefilled_tokens, self.prefill_s), 2),
            "ttft_s": rounded(ttft),
            "decode_s": rounded(self.decode_s),
            "decode_tok_s": rounded(ratio(self.decoded_tokens, self.decode_s), 2),
            "steps": self.depths.total(),
            "accept_len_mean": rounded(ratio(self.stepped_tokens, self.depths.total())),
            "spec_depth": {str(depth): steps for depth, steps in sorted(self.depths.items())},
            "spec": self._spec(),
            "loop_break": self.loop_break,
            "lane": self.lane,
            "lanes_busy": self.lanes_busy,
            "parked": self.parked,
            "seed": self.request.sampling.seed,
            "fidelity": self.request.fidelity,
            "expert_hit_rate": rounded(1 - (hit.rate() or 0.0)) if hit.picks else None,
            "expert_misses": int(self.decode.missed),
            "prefill_expert_misses": int(self.prefill.missed),
            "substituted_weight_share": rounded(both.substituted_weight_share, 6),
            "swaps": self.swaps,
            "experts": self._experts(both, residency) | {"hot_reads": since.hot_issued, "hot_bytes": since.hot_bytes},
            "prefill": self.prefill.report(self.has_ring),
            "decode": self.decode.report(self.has_ring),
            "prune_miss_request": {
                "miss_rate": rounded(both.rate()),
                "missed_slots": int(both.missed),
                "slots": int(both.picks),
                "score_miss_rate": rounded(ratio(both.missed_weight, both.weight)),
                "missed_score": rounded(both.missed_weight),
                "total_score": rounded(both.weight),
            },
            "decode_adaptation": {
                "passes": [
                    {"output_tokens": tokens, "swaps": swaps, "planned": plan.swaps, "reason": plan.reason}
                    for plan, swaps, tokens in self.passes.values()
                ]
            },
            **since.report(self.completion_tokens),
            "residency": {
                "generation": residency.generation,
                "residents": residency.residents,
                "mask_hash": residency.mask_hash,
                "per_layer_min": min(residency.by_layer, default=0),
                "per_layer_max": max(residency.by_layer, default=0),
            },
        }

    def _spec(self) -> dict[str, Any]:
        """`steps`: those that verified drafts; the means are those of all decode steps."""
        steps, (drafted, accepted) = self.depths.total(), self.drafts
        return {
            "steps": steps - self.depths[0],
            "drafted": drafted,
            "accepted": accepted,
            "accept_len_mean": rounded(ratio(self.stepped_tokens, steps)),
            "depth_mean": rounded(ratio(drafted, steps)),
        }

    def _experts(self, both: Picks, residency: Residency) -> dict[str, Any]:
        return {
            "resident": residency.residents,
            "total": residency.total,
            "resident_pct": rounded(100 * residency.residents / residency.total, 2),
            "routed_picks": int(both.picks),
            "miss_picks": int(both.missed),
            "miss_rate": rounded(both.rate()),
            "prefill_miss_rate": rounded(self.prefill.rate()),
            "decode_miss_rate": rounded(self.decode.rate()),
            "miss_weight": rounded(both.missed_weight),
            "adapt_swaps": self.swaps,
            "generation": residency.generation,
        }


def log_line(request_id: str, reason: str, stats: dict[str, Any]) -> str:
    """One line for the log: numbers and the request's id, never its text."""
    experts = stats["experts"]
    return (
        f"request {request_id} {reason}: prompt {stats['prompt_tokens']} tokens ({stats['cached_tokens']} cached) "
        f"{stats['prefill_tok_s']} tok/s, "
        f"answer {stats['completion_tokens']} tokens {stats['decode_tok_s']} tok/s, queue {stats['queue_s']} s, "
        f"missed {experts['prefill_miss_rate']} of prompt and {experts['decode_miss_rate']} of decode picks, "
        f"substituted weight {stats['substituted_weight_share']}, swaps {stats['swaps']}, "
        f"generation {experts['generation']}"
    )
