"""GLM-5.3 as `tided.models.families` knows it."""

from collections.abc import Callable
from typing import Any

import torch
from msgspec import structs

from kernels.numerics import Numerics
from packers.joined import Part
from packers.overlay import Overlay
from packers.shards import Checkpoint
from tided.errors import ConfigError
from tided.experts.bank import ExpertBank
from tided.experts.checkpoint import Record
from tided.models.glm53 import load
from tided.models.glm53.ablation import ablated
from tided.models.glm53.config import read_config
from tided.models.glm53.model import Glm53
from tided.models.glm53.names import part_of
from tided.models.glm53.scratch import passing_bytes
from tided.models.paged import Shape
from tided.models.parallel import Group
from tided.settings import Settings

NOT_THE_MODEL = ("num_nextn_predict_layers", "eos_token_id", "pad_token_id")


class Glm53Family:
    name = load.FAMILY
    has_engram = False

    def shape(self, config: dict[str, Any]) -> Shape:
        return load.shape_of(read_config(config))

    def known(self, config: dict[str, Any]) -> dict[str, Any]:
        """Whether the layer behind the trunk is there, the files tell."""
        c = read_config(config)
        found = {key: value for key, value in structs.asdict(c).items() if key not in NOT_THE_MODEL}
        return found | {"indexer_types": [c.selects(layer) for layer in range(c.num_hidden_layers)]}

    def parts(self, config: dict[str, Any]) -> Callable[[str], Part]:
        return part_of(read_config(config))

    def check(self, config: dict[str, Any], settings: Settings) -> None:
        load.check_cache(settings)

    def inventory(self, checkpoint: Checkpoint, settings: Settings) -> None:
        load.inventory(checkpoint, settings)

    def numerics(self, settings: Settings) -> Numerics:
        return load.numerics_of(settings)

    def expert_record(self, checkpoint: Checkpoint, ranks: int) -> Record:
        c = read_config(checkpoint.config)
        return load.expert_record(checkpoint, c, ranks, c.first_k_dense_replace)

    def expert_names(self, checkpoint: Checkpoint) -> Callable[[int, int], tuple[str, ...]]:
        c = read_config(checkpoint.config)
        return load.expert_names(checkpoint, c, c.first_k_dense_replace)

    def context_bytes(self, config: dict[str, Any], settings: Settings) -> int:
        return load.context_bytes(read_config(config), settings)

    def lane_bytes(self, config: dict[str, Any], settings: Settings) -> int:
        return 0  # every row is in the pool

    def passing_bytes(self, config: dict[str, Any], settings: Settings) -> int:
        return passing_bytes(read_config(config), settings)

    def dense_bytes(self, checkpoint: Checkpoint, settings: Settings) -> int:
        return load.dense_bytes(checkpoint, settings)

    def drafter_bytes(self, checkpoint: Checkpoint, settings: Settings) -> int:
        return 0 if settings.engine.draft == "off" else load.drafter_bytes(checkpoint, settings)

    def vision_bytes(self, config: dict[str, Any]) -> int:
        return 0

    def overlaid(self, checkpoint: Checkpoint, overlay: Overlay) -> Checkpoint:
        raise ConfigError(
            "this model takes no overlay of weights",
            where="model.overlay",
            hint="a file of directions goes to `ablation`",
        )

    def ablated(self, checkpoint: Checkpoint, overlay: Overlay) -> Checkpoint:
        return ablated(checkpoint, overlay)

    def load(
        self, checkpoint: Checkpoint, settings: Settings, group: Group, bank: ExpertBank, device: torch.device
    ) -> Glm53:
        if settings.vision.rank >= 0:
            raise ConfigError("this model takes no images", hint="set rank = -1 in [vision]")
        return load.load(checkpoint, settings, group, bank, device)
