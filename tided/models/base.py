"""What the engine asks of a model family. One module a family implements it; the engine knows nothing else of it."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

# (place in the block, logits [R, V]) -> the tokens [R] int64 that are proposed there
Choose = Callable[[int, Tensor], Tensor]


Layers = Generator[None, None, Tensor]
"""A pass that stops before each layer but the first."""


def through(layers: Layers) -> Tensor:
    """What it gives, without a stop."""
    while True:
        try:
            next(layers)
        except StopIteration as end:
            rows: Tensor = end.value
            return rows


@dataclass(frozen=True)
class Draft:
    """For R lanes and K places: ids [R, K] int64; logits [R, K, V] fp32, what each was chosen from; confidence [R, K]
    fp32, raw, as a logit: the larger, the likelier that the token is accepted, given that all before it are. The logits
    may lie where the next proposal writes over them: who draws by them does so meanwhile."""

    ids: Tensor
    logits: Tensor
    confidence: Tensor


@dataclass(frozen=True)
class Pictured:
    """Of a chunk: at `places` [n] int64 stand tokens of images, and in place of their embeddings `rows` [n, D] fp32,
    the same on every rank."""

    places: Tensor
    rows: Tensor


class ModelShape(Protocol):
    """The sizes that other rooms need."""

    @property
    def family(self) -> str: ...  # "deepseek_v41"
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def moe_layers(self) -> int: ...  # with routed experts in the arena, drafter excluded; pairs count 0..moe_layers-1
    @property
    def experts_per_layer(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...  # most positions the checkpoint allows
    @property
    def eos_id(self) -> int: ...


class LaneState(Protocol):
    """Everything one request's context is: cached rows, windows, remainders, n-gram tails. Owned by one lane."""

    @property
    def index(self) -> int: ...  # lane number, row of the demand buffers
    @property
    def position(self) -> int: ...  # tokens computed so far


class Model(Protocol):
    @property
    def shape(self) -> ModelShape: ...

    def open_lane(self, index: int) -> LaneState:
        """A fresh, empty context. Raises UnavailableError when the pool has no page left."""
        ...

    def close_lane(self, lane: LaneState) -> None:
        """Returns the lane's pages to the pool. The state must not be used again."""
        ...

    def prefill(
        self,
        lane: LaneState,
        token_ids: Tensor,
        logits: Literal["none", "last", "all"],
        pictured: Pictured | None = None,
    ) -> Tensor | None:
        """Appends `token_ids` [T] int64 to the lane. Returns fp32 logits [1, vocab] ("last"), [T, vocab] ("all")."""
        ...

    def prefill_by_layer(self, lane: LaneState, token_ids: Tensor, pictured: Pictured | None = None) -> Layers:
        """The same a layer at a time; gives the rows that `logits` takes, [T, hidden]. Between two layers other lanes
        may be computed. The lane stands where it stood until the end, and may be nothing but closed before."""
        ...

    def logits(self, rows: Tensor) -> Tensor:
        """rows [T, hidden] of a chunk -> fp32 logits [T, vocab]. A collective of all ranks, of as many rows on each."""
        ...

    def image_tokens(self, height: int, width: int) -> int:
        """Tokens that stand for an image of so many pixels; 0: the model takes none of that size."""
        ...

    def see(self, height: int, width: int, pixels: bytes | None) -> Tensor:
        """What stands in place of an image's embeddings, [tokens, D] fp32, the same on every rank. `pixels`: on rank 0,
        [height, width, 3]; None on the others. A collective of all ranks."""
        ...

    def is_captured(self, rows: int) -> bool:
        """Whether a decode step of so many rows is launched at once, as a graph."""
        ...

    def decode(self, lanes: Sequence[LaneState], token_ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Appends tokens to lanes: one each, or `counts` [lanes] of them. `token_ids` [R] int64, in the order of the
        lanes -> fp32 logits [R, vocab]. Rows are computed bit-identically whatever other rows are beside them, and
        as if each token had been a step of its own. A lane that took several must be told by `keep` how many of them
        stay before it is used again."""
        ...

    def keep(self, lane: LaneState, rows: int) -> None:
        """Of the tokens that the last `decode` appended to the lane only the first `rows` (at least one) ever came."""
        ...

    @property
    def draft_tokens(self) -> int:
        """Most tokens that `propose` gives; 0: the model was loaded without a drafter."""
        ...

    @property
    def drafts_one_by_one(self) -> bool:
        """Whether each token of a proposal costs as much as the one before it; else all are made at once."""
        ...

    def propose(self, lanes: Sequence[LaneState], anchors: Tensor, choose: Choose, places: int = 0) -> Draft:
        """What may follow anchors [R] int64, the tokens that come after the contexts of R lanes. Changes nothing.
        `places`: no more tokens are wanted, though there may be; 0: all."""
        ...

    def lane_parts(self, lane: LaneState) -> dict[str, Tensor]:
        """All of a context but its pages and position, by name, copied to the CPU."""
        ...

    def page_parts(self, lane: LaneState, first: int, last: int) -> dict[str, Tensor]:
        """Pages [first, last) of a context, of `page_tokens` tokens each, copied to the CPU."""
        ...

    def restore_lane(
        self, index: int, tokens: int, parts: Mapping[str, Tensor], pages: Sequence[tuple[int, Mapping[str, Tensor]]]
    ) -> LaneState:
        """A context of `tokens` tokens out of what `lane_parts` gave, and its pages as (first, what `page_parts` gave).
        Raises UnavailableError when the pool is short."""
        ...

    @property
    def page_tokens(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...  # of the pool, on one rank

    def check(self, lanes: Sequence[LaneState]) -> None:
        """Raises PairError unless these lanes, which are all there are, and the free pages make up the pool."""
        ...
