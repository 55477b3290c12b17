"""The paged pool of cached rows and index keys that all lanes share: in a dtype that computes, or as bytes of a format
that the model knows.

A page holds PAGE_TOKENS tokens of context in every KV source layer: PAGE_TOKENS / ratio rows of each. One page table
a lane therefore serves all layers. Pages are taken as a context grows and come back when the lane is closed; nothing
here depends on a rank, so the page tables of all ranks stay equal, also where ranks share a context: of R ranks each
keeps every R-th row of a page (`tided.cache.share`), and a page has PAGE_TOKENS / R rows on each."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tided.cache.context import Context
from tided.errors import PairError, UnavailableError

PAGE_TOKENS = 128


@dataclass(frozen=True)
class Source:
    """A layer that writes one row per `ratio` tokens; `keyed`: and an index key beside each."""

    layer: int
    ratio: int
    keyed: bool = True


@dataclass(frozen=True)
class Layout:
    """Row sizes in elements: of rows of `dtype`, of keys of `key_dtype`, or of the same where it is None."""

    sources: tuple[Source, ...]
    head_dim: int
    index_dim: int
    dtype: torch.dtype
    key_dtype: torch.dtype | None = None

    @property
    def page_bytes(self) -> int:
        row = self.head_dim * self.dtype.itemsize
        key = self.index_dim * (self.key_dtype or self.dtype).itemsize
        return sum(PAGE_TOKENS // source.ratio * (row + key * source.keyed) for source in self.sources)


class Pool:
    """`rows[layer]` [pages * rows of a page, head_dim] and `keys[layer]` [.., index_dim] hold all lanes' pages."""

    def __init__(self, layout: Layout, pool_tokens: int, device: torch.device) -> None:
        """Raises UnavailableError when the device has not the memory."""
        self.pages = -(-pool_tokens // PAGE_TOKENS)

        def zeros(columns: int, dtype: torch.dtype, sources: Iterable[Source]) -> dict[int, Tensor]:
            counts = {source.layer: self.pages * (PAGE_TOKENS // source.ratio) for source in sources}
            return {n: torch.zeros(rows, columns, dtype=dtype, device=device) for n, rows in counts.items()}

        keyed = [source for source in layout.sources if source.keyed]
        try:
            self.rows = zeros(layout.head_dim, layout.dtype, layout.sources)
            self.keys = zeros(layout.index_dim, layout.key_dtype or layout.dtype, keyed)
        except (RuntimeError, MemoryError) as e:  # torch has no type of its own for this on a CPU
            raise UnavailableError(
                f"no memory for a context pool of {pool_tokens} tokens: {self.pages * layout.page_bytes / 1e9:,.1f} GB",
                hint="lower pool_tokens in [cache]",
            ) from e
        self.page_bytes = layout.page_bytes
        self._free = list(range(self.pages - 1, -1, -1))

    @property
    def free_tokens(self) -> int:
        return len(self._free) * PAGE_TOKENS

    def pages_missing(self, context: Context, tokens: int) -> int:
        """Pages that the context must take to hold `tokens` more."""
        return max(0, -(-(context.position + tokens) // PAGE_TOKENS) - len(context.pages))

    def can_grow(self, contexts: Sequence[Context], tokens: int | Sequence[int]) -> bool:
        """Whether each of the contexts can hold `tokens` more (one number for all, or one each), all at once."""
        return sum(map(self.pages_missing, contexts, _each(contexts, tokens))) <= len(self._free)

    def grow(self, contexts: Sequence[Context], tokens: int | Sequence[int]) -> None:
        """Gives each context the pages for `tokens` more. Raises UnavailableError, changing nothing, when they lack."""
        if not self.can_grow(contexts, tokens):
            wanted = sum(_each(contexts, tokens))
            raise UnavailableError(
                f"the cache has {self.free_tokens} tokens free, {wanted} more for {len(contexts)} lanes do not fit",
                hint="raise pool_tokens in [cache], or wait until a request ends",
            )
        for context, more in zip(contexts, _each(contexts, tokens), strict=True):
            context.take([self._free.pop() for _ in range(self.pages_missing(context, more))])

    def trim(self, context: Context) -> None:
        """Takes back the pages behind a context's last token: of rows that were rejected."""
        self._free.extend(reversed(context.give(-(-context.position // PAGE_TOKENS))))

    def release(self, context: Context) -> None:
        """The pages of a closed context may be taken again."""
        self._free.extend(reversed(context.pages))
        context.drop_pages()

    def copied(self, context: Context, first: int, last: int) -> dict[str, Tensor]:
        """Pages [first, last) of a context on the CPU: per source its rows and its keys, [pages, values of a page]."""
        places = context.page_table[first:last]
        return {name: paged[places].to("cpu") for name, paged in self._paged().items()}

    def put(self, context: Context, first: int, parts: Mapping[str, Tensor]) -> None:
        """What `copied` gave, as the pages from `first` on of a context that holds so many."""
        for name, paged in self._paged().items():
            source = parts[name]
            paged[context.page_table[first : first + len(source)]] = source.to(paged.device)

    def check(self, contexts: Iterable[Context]) -> None:
        """Raises PairError unless every page is free or held by one context, once. `contexts` are all there are."""
        held = Counter(page for context in contexts for page in context.pages) + Counter(self._free)
        if held != Counter(range(self.pages)):
            wrong = sorted(page for page in range(self.pages) if held[page] != 1)
            raise PairError(f"pages {wrong[:8]} of the context pool are lost, or held twice")

    def _paged(self) -> dict[str, Tensor]:
        """Views [pages, values of a page] of all rows and keys."""
        both = (("rows", self.rows), ("keys", self.keys))
        return {f"{kind}.{n}": held.view(self.pages, -1) for kind, of in both for n, held in of.items()}


def _each(contexts: Sequence[Context], tokens: int | Sequence[int]) -> Sequence[int]:
    return [tokens] * len(contexts) if isinstance(tokens, int) else tokens


def physical_rows(context: Context, ratio: int, rows: Tensor) -> Tensor:
    """Numbers of a context's compressed rows, in order of position -> where they lie in the pool; same shape, int64."""
    size = PAGE_TOKENS // ratio
    return context.page_table[rows // size] * size + rows % size


def rows_between(context: Context, ratio: int, first: int, last: int, held: Tensor) -> Tensor:
    """The rows [first, last) of a context, out of `held` (`Pool.rows` or `.keys` of a layer): [last - first, n].
    `first` is the first of a page."""
    size = PAGE_TOKENS // ratio
    if first % size:
        raise ValueError(f"row {first} is not the first of a page of {size}")
    pages = context.page_table[first // size : -(-last // size)]
    return held.view(-1, size, held.shape[1])[pages].view(-1, held.shape[1])[: last - first]
