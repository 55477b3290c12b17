"""A model out of two checkpoints: its routed experts from one directory, all other weights from another, each stored in
its own way.

The first one's config.json and tokenizer count. What a directory has of the other's part is not looked at.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from packers.headers import TensorInfo
from packers.overlay import Overlay
from packers.shards import REQUIRE_HINT, Checkpoint, TensorSpec, require

Part = Literal["experts", "draft experts", "draft", "dense"]
"""Routed experts of the trunk and of the drafter, the drafter's other weights, all else."""


class Joined(Checkpoint):
    """`experts` and `dense` as they are; read as one checkpoint."""

    def __init__(self, experts: Checkpoint, dense: Checkpoint, part_of: Callable[[str], Part]) -> None:
        """`part_of`: by a tensor's name. The drafter's experts come from where the routed ones do, or with its other
        weights; without those they are nobody's."""
        super().__init__(experts.path, experts.config, (*experts.shards, *dense.shards))
        self.experts, self.dense, self._part_of = experts, dense, part_of
        parts = {part_of(name) for name in dense.tensors}
        beside = any(part_of(name) == "draft experts" for name in experts.tensors)
        self._of_experts: set[Part] = {"experts", "draft experts"} if beside else {"experts"}
        nobodys: set[Part] = set() if "draft" in parts else {"draft experts"}
        sides = ((experts, True), (dense, False))
        self.tensors = {
            name: info
            for side, expert in sides
            for name, info in side.tensors.items()
            if part_of(name) not in nobodys and (part_of(name) in self._of_experts) is expert
        }

    def under(self, overlay: Overlay) -> "Joined":
        found = copy.copy(self)
        found.overlay, found._maps = overlay, {}
        found.tensors = {**self.tensors, **overlay.replaces}
        return found

    def home(self, name: str) -> Path:
        return (self.experts if self._part_of(name) in self._of_experts else self.dense).path

    def require(self, expected: Mapping[str, TensorSpec]) -> None:
        """Raises TensorError, naming the directory, unless both hold exactly these of their tensors."""
        for side, other in ((self.experts, "its routed experts"), (self.dense, "all else (`dense` in [model])")):

            def here(name: str, path: Path = side.path) -> bool:
                return self.home(name) == path

            found: dict[str, TensorInfo] = {name: info for name, info in self.tensors.items() if here(name)}
            wanted = {name: spec for name, spec in expected.items() if here(name)}
            require(found, wanted, side.path, f"from here come {other}: {REQUIRE_HINT}")

    def identity(self) -> str:
        """Of both."""
        return identity_of(self.experts.identity(), self.dense.identity())


def identity_of(experts: str, dense: str) -> str:
    return hashlib.sha256(f"{experts}\ndense {dense}".encode()).hexdigest()


def experts_of(checkpoint: Checkpoint) -> Checkpoint:
    """The one that packs are made of."""
    return checkpoint.experts if isinstance(checkpoint, Joined) else checkpoint
