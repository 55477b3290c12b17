"""The model families that this build computes, found by a checkpoint's model_type."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from kernels.numerics import Numerics
from packers.joined import Joined, Part
from packers.overlay import Overlay
from packers.shards import Checkpoint
from tided.errors import ConfigError, DataError
from tided.experts.bank import ExpertBank
from tided.experts.checkpoint import Record
from tided.models.base import Model, ModelShape
from tided.models.deepseek_v41.family import DeepseekV41Family
from tided.models.glm53.family import Glm53Family
from tided.models.parallel import Group
from tided.settings import Model as ModelSettings
from tided.settings import Settings


class Family(Protocol):
    """What is known of a model before and while it is loaded. All raise DataError for an impossible configuration."""

    name: str

    def shape(self, config: dict[str, Any]) -> ModelShape: ...

    def known(self, config: dict[str, Any]) -> dict[str, Any]:
        """What of a configuration tells one model from another, however it is stored."""
        ...

    def parts(self, config: dict[str, Any]) -> Callable[[str], Part]:
        """Which part of the model a tensor is of, by its name."""
        ...

    def check(self, config: dict[str, Any], settings: Settings) -> None:
        """Raises ConfigError for settings that the family cannot serve, whatever the checkpoint holds."""
        ...

    def inventory(self, checkpoint: Checkpoint, settings: Settings) -> None:
        """Raises TensorError unless the checkpoint holds exactly the tensors that `load` takes."""
        ...

    def numerics(self, settings: Settings) -> Numerics:
        """Where a forward pass rounds."""
        ...

    def expert_record(self, checkpoint: Checkpoint, ranks: int) -> Record:
        """As the experts are stored. Raises ConfigError when `ranks` cannot share one."""
        ...

    def expert_names(self, checkpoint: Checkpoint) -> Callable[[int, int], tuple[str, ...]]:
        """(MoE layer, expert) -> the tensor names in the order of a record's parts; of EXL3 experts the names of gate,
        up and down."""
        ...

    def context_bytes(self, config: dict[str, Any], settings: Settings) -> int:
        """Memory of the pool of contexts on one rank."""
        ...

    def lane_bytes(self, config: dict[str, Any], settings: Settings) -> int:
        """Memory of one lane on one rank, beside its pages of the pool."""
        ...

    def passing_bytes(self, config: dict[str, Any], settings: Settings) -> int:
        """What a prefill chunk allocates on one rank and gives back: an estimate, of the widest moment of a layer."""
        ...

    @property
    def has_engram(self) -> bool:
        """Whether rows are looked up in tables on disk, and kept in memory."""
        ...

    def dense_bytes(self, checkpoint: Checkpoint, settings: Settings) -> int:
        """Memory of the weights on one rank, those of routed experts, drafter and vision tower excepted."""
        ...

    def drafter_bytes(self, checkpoint: Checkpoint, settings: Settings) -> int:
        """Memory of the drafter on one rank, its experts included; 0 where `engine.draft` asks for none. Raises
        ConfigError where it asks for one that the checkpoint does not have."""
        ...

    def vision_bytes(self, config: dict[str, Any]) -> int:
        """Memory of the vision tower on the rank that holds it; 0: the model has none."""
        ...

    def overlaid(self, checkpoint: Checkpoint, overlay: Overlay) -> Checkpoint:
        """The checkpoint under an overlay of weights. Raises TensorError for one that is not exactly what this model
        takes, ConfigError where it takes none."""
        ...

    def ablated(self, checkpoint: Checkpoint, overlay: Overlay) -> Checkpoint:
        """The same for a file of directions that are projected out at run time."""
        ...

    def load(
        self, checkpoint: Checkpoint, settings: Settings, group: Group, bank: ExpertBank, device: torch.device
    ) -> Model:
        """With its drafter where `engine.draft` asks for one, and its vision tower where `vision.rank` names a rank."""
        ...


DENSE_HINT = "`dense` in [model] names a checkpoint of the model whose experts are at `path`"
SHOWN_KEYS = 4
_FAMILIES: dict[str, Family] = {family.name: family for family in (DeepseekV41Family(), Glm53Family())}


def open_checkpoint(settings: ModelSettings) -> Checkpoint:
    """The checkpoint of a profile, with its dense weights, under its overlay or ablation. Raises DataError, and what
    `overlaid` raises."""
    if settings.overlay and settings.ablation:
        raise ConfigError("only one edit of a model can be served", where="model.overlay, model.ablation")
    checkpoint = Checkpoint.open(settings.path)
    if settings.dense:
        checkpoint = _joined(checkpoint, Checkpoint.open(settings.dense))
    family = family_of(checkpoint.config) if settings.overlay or settings.ablation else None
    if family and settings.overlay:
        return family.overlaid(checkpoint, Overlay.open(settings.overlay))
    if family and settings.ablation:
        return family.ablated(checkpoint, Overlay.open(settings.ablation))
    return checkpoint


def _joined(experts: Checkpoint, dense: Checkpoint) -> Joined:
    """Raises DataError where the two are not of one model."""
    family = family_of(experts.config)
    if dense.config.get("model_type") != family.name:
        raise DataError(f"is no checkpoint of a {family.name} model", where=str(dense.path), hint=DENSE_HINT)
    one, other = family.known(experts.config), family.known(dense.config)
    if differing := [key for key, value in one.items() if other.get(key) != value]:
        said = ", ".join(f"{key} is {other.get(key)}, not {one[key]}" for key in differing[:SHOWN_KEYS])
        raise DataError(f"another model than {experts.path}: {said}", where=str(dense.path), hint=DENSE_HINT)
    return Joined(experts, dense, family.parts(experts.config))


def family_of(config: dict[str, Any]) -> Family:
    """The family of a checkpoint's config.json. Raises DataError naming those that are known."""
    name = config.get("model_type")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise DataError(
            f"model_type {name!r} is not known", where="config.json", hint=f"this build serves {', '.join(_FAMILIES)}"
        )
    return family
