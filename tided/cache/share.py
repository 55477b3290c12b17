"""Which tokens of a context a rank keeps where ranks share it: rank r of R keeps the positions p with p mod R = r. So
every rank has as many rows of every page, and page tables are the same on all."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Share:
    """Of one rank alone: everything."""

    rank: int = 0
    ranks: int = 1

    def count(self, tokens: int) -> int:
        """How many of a context's first tokens are the rank's."""
        return max(0, -(-(tokens - self.rank) // self.ranks))

    def most(self, tokens: int) -> int:
        """The same of the rank that has the most."""
        return -(-tokens // self.ranks)

    def owns(self, positions: Tensor) -> Tensor:
        """Bool, the shape of `positions`."""
        return positions % self.ranks == self.rank

    def numbers(self, positions: Tensor) -> Tensor:
        """Positions of the rank's tokens -> which of its rows they are."""
        return positions // self.ranks

    def positions(self, numbers: Tensor) -> Tensor:
        return numbers * self.ranks + self.rank


ALONE = Share()
