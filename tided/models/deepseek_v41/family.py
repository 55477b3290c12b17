"""DeepSeek-V4.1 as `tided.models.families` knows it."""

from collections.abc import Callable
from typing import Any

import torch
from msgspec import structs

from kernels.numerics import Numerics, numerics_of
from kernels.record import ExpertRecord
from packers.joined import Part
from packers.overlay import Overlay
from packers.shards import Checkpoint
from tided.errors import ConfigError
from tided.experts.bank import ExpertBank
from tided.models.deepseek_v41 import load
from tided.models.deepseek_v41.config import read_config
from tided.models.deepseek_v41.dense import dense_bytes
from tided.models.deepseek_v41.limits import refusals
from tided.models.deepseek_v41.model import DeepseekV41
from tided.models.deepseek_v41.names import expected_tensors, part_of, routed_expert_names
from tided.models.deepseek_v41.overlay import overlaid
from tided.models.deepseek_v41.scratch import lane_bytes, passing_bytes
from tided.models.deepseek_v41.vision import tower_bytes
from tided.models.paged import Shape
from tided.models.parallel import Group
from tided.settings import Settings


class DeepseekV41Family:
    name = load.FAMILY
    has_engram = True

    def shape(self, config: dict[str, Any]) -> Shape:
        return load.shape_of(read_config(config))

    def known(self, config: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = structs.asdict(read_config(config).text_config)
        return found

    def parts(self, config: dict[str, Any]) -> Callable[[str], Part]:
        return part_of

    def check(self, config: dict[str, Any], settings: Settings) -> None:
        counted = settings.engine.draft.isdigit()
        block = read_config(config).text_config.dspark_block_size if counted else 0
        for _, what, hint in refusals(settings, block):
            raise ConfigError(what, hint=hint)

    def inventory(self, checkpoint: Checkpoint, settings: Settings) -> None:
        checkpoint.require(expected_tensors(read_config(checkpoint.config)))

    def numerics(self, settings: Settings) -> Numerics:
        return numerics_of(settings.model.numerics)

    def expert_record(self, checkpoint: Checkpoint, ranks: int) -> ExpertRecord:
        t = read_config(checkpoint.config).text_config
        try:
            return ExpertRecord(t.hidden_size, t.moe_intermediate_size, ranks)
        except ValueError as e:
            raise ConfigError(str(e), hint="choose fewer ranks") from e

    def expert_names(self, checkpoint: Checkpoint) -> Callable[[int, int], tuple[str, ...]]:
        read_config(checkpoint.config)
        return routed_expert_names()

    def context_bytes(self, config: dict[str, Any], settings: Settings) -> int:
        return load.context_bytes(read_config(config), settings)

    def lane_bytes(self, config: dict[str, Any], settings: Settings) -> int:
        return lane_bytes(read_config(config).text_config, settings, self.numerics(settings))

    def passing_bytes(self, config: dict[str, Any], settings: Settings) -> int:
        return passing_bytes(read_config(config).text_config, settings)

    def dense_bytes(self, checkpoint: Checkpoint, settings: Settings) -> int:
        inventory = expected_tensors(read_config(checkpoint.config))
        return dense_bytes(inventory, settings.parallel.ranks, load.is_packed(settings))

    def vision_bytes(self, config: dict[str, Any]) -> int:
        return tower_bytes(read_config(config))

    def drafter_bytes(self, checkpoint: Checkpoint, settings: Settings) -> int:
        return 0 if settings.engine.draft == "off" else load.draft_bytes(read_config(checkpoint.config), settings)

    def overlaid(self, checkpoint: Checkpoint, overlay: Overlay) -> Checkpoint:
        return overlaid(checkpoint, overlay)

    def ablated(self, checkpoint: Checkpoint, overlay: Overlay) -> Checkpoint:
        hint = "a file of edited weights goes to `overlay`"
        raise ConfigError("this model takes no projection at run time", where="model.ablation", hint=hint)

    def load(
        self, checkpoint: Checkpoint, settings: Settings, group: Group, bank: ExpertBank, device: torch.device
    ) -> DeepseekV41:
        model = load.load(checkpoint, settings, group, bank, device)
        if settings.engine.draft != "off":
            model = load.with_drafter(model, checkpoint, device)
        if settings.vision.rank >= 0:
            model = load.with_vision(model, checkpoint, settings.vision.rank, device)
        return model
