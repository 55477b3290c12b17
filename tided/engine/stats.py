"""What an answer cost: `x_engine_stats`, and one line of log without text. Every request keeps counters of its own from
the moment it is submitted, so a cancelled one never reports its predecessor's."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from tided.engine.types import Request


@dataclass
class Picks:
    """Router picks of one phase, before residency: how many, how many not resident, and their routing weight."""

    picks: float = 0
    missed: float = 0
    weight: float = 0
    missed_weight: float = 0

    def rate(self) -> float | None:
        return ratio(self.missed, self.picks)


class Residency(msgspec.Struct, frozen=True):
    """The routable set an answer ended with. `generation` counts the published plans."""

    generation: int
    residents: int
    total: int
    mask_hash: str


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
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_s: float = 0.0
    lane: int | None = None
    lanes_busy: int = 0
    prefill_s: float = 0.0
    prefilled_tokens: int = 0
    completion_tokens: int = 0
    decode_steps: int = 0
    swaps: int = 0
    prefill: Picks = field(default_factory=Picks)
    decode: Picks = field(default_factory=Picks)

    def admitted(self, lane: int, now_s: float, lanes_busy: int) -> None:
        self.lane, self.admitted_s, self.lanes_busy = lane, now_s, lanes_busy

    def chunk(self, tokens: int, seconds: float) -> None:
        self.prefilled_tokens += tokens
        self.prefill_s += seconds

    def token(self, now_s: float) -> None:
        """One sampled token; the first comes with the last chunk of the prompt, the others with a decode step each."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        else:
            self.decode_steps += 1
        self.completion_tokens += 1
        self.last_s = now_s

    @property
    def decode_s(self) -> float:
        return 0.0 if self.first_token_s is None else self.last_s - self.first_token_s

    def report(self, residency: Residency, now_s: float) -> dict[str, Any]:
        """The stable keys of `x_engine_stats`; None where nothing is known (no first token, no pick). The hit rate is
        that of the answer, and of the prompt where no step followed it."""
        queued_until = now_s if self.admitted_s is None else self.admitted_s
        ttft = None if self.first_token_s is None else self.first_token_s - self.submitted_s
        both = Picks(*(getattr(self.prefill, n) + getattr(self.decode, n) for n in Picks.__dataclass_fields__))
        hit = self.decode if self.decode.picks else both
        return {
            "prompt_tokens": len(self.request.prompt_ids),
            "cached_tokens": 0,
            "completion_tokens": self.completion_tokens,
            "queue_s": rounded(queued_until - self.submitted_s),
            "prefill_s": rounded(self.prefill_s),
            "prefill_tok_s": rounded(ratio(self.prefilled_tokens, self.prefill_s), 2),
            "ttft_s": rounded(ttft),
            "decode_s": rounded(self.decode_s),
            "decode_tok_s": rounded(ratio(self.decode_steps, self.decode_s), 2),
            "steps": self.decode_steps,
            "lane": self.lane,
            "lanes_busy": self.lanes_busy,
            "seed": self.request.sampling.seed,
            "expert_hit_rate": rounded(1 - (hit.rate() or 0.0)) if hit.picks else None,
            "expert_misses": int(self.decode.missed),
            "prefill_expert_misses": int(self.prefill.missed),
            "substituted_weight_share": rounded(ratio(both.missed_weight, both.weight), 6),
            "swaps": self.swaps,
            "experts": self._experts(both, residency),
            "residency": {
                "generation": residency.generation,
                "residents": residency.residents,
                "mask_hash": residency.mask_hash,
            },
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
        f"request {request_id} {reason}: prompt {stats['prompt_tokens']} tokens {stats['prefill_tok_s']} tok/s, "
        f"answer {stats['completion_tokens']} tokens {stats['decode_tok_s']} tok/s, queue {stats['queue_s']} s, "
        f"missed {experts['prefill_miss_rate']} of prompt and {experts['decode_miss_rate']} of decode picks, "
        f"substituted weight {stats['substituted_weight_share']}, swaps {stats['swaps']}, "
        f"generation {experts['generation']}"
    )
