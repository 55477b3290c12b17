"""Whether the checkpoint of a profile can be served with it, as far as its config.json tells: within milliseconds and
without torch, before a rank is started. A config.json that is none of a known family is left to the ranks, who name
what is wrong with it."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from packers.ablation import layers_of
from packers.exl3_sizes import Experts
from packers.overlay import read_overlay
from tided.errors import ConfigError, TideError
from tided.models.deepseek_v41.limits import Refusal, refusals
from tided.profile import Problem, render
from tided.profile.reading import read
from tided.settings import Settings

MAX_CONFIG_BYTES = 1 << 20
SCALE_GROUP = 32  # weights that share a scale: a rank's share is whole groups


class Dimensions(NamedTuple):
    """`layers` with routed experts; `shared`: what ranks share, by name, and the unit that is never cut; `refused`:
    what the family itself says to a profile; `mixed`: experts that may differ in size."""

    layers: int
    experts: int
    top_k: int
    positions: int
    vocabulary: int
    has_drafter: bool
    shared: dict[str, tuple[int, int]]
    refused: Callable[[Settings], Iterable[Refusal]]
    mixed: Experts | None = None


class _DeepseekText(msgspec.Struct, frozen=True):
    """Every layer routes."""

    num_hidden_layers: int
    n_routed_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    num_attention_heads: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    hidden_size: int
    vocab_size: int
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0


class _Deepseek(msgspec.Struct, frozen=True, tag_field="model_type", tag="deepseek_v41"):
    text_config: _DeepseekText

    def dimensions(self) -> Dimensions:
        t = self.text_config
        shared = {
            "num_attention_heads": (t.num_attention_heads, 1),
            "o_groups": (t.o_groups, 1),
            "o_groups x o_lora_rank": (t.o_groups * t.o_lora_rank, SCALE_GROUP),
            "moe_intermediate_size": (t.moe_intermediate_size, SCALE_GROUP),
            "hidden_size": (t.hidden_size, 1),
            "vocab_size": (t.vocab_size, 1),
        }
        return Dimensions(
            t.num_hidden_layers,
            t.n_routed_experts,
            t.num_experts_per_tok,
            t.max_position_embeddings,
            t.vocab_size,
            t.num_nextn_predict_layers > 0,
            shared,
            lambda settings: refusals(settings, t.dspark_block_size if t.num_nextn_predict_layers else 0),
        )


class _Glm(msgspec.Struct, frozen=True, tag_field="model_type", tag="glm_moe_dsa"):
    """The first layers are dense. How the experts are stored, and so what of them is never cut, is not told here."""

    num_hidden_layers: int
    first_k_dense_replace: int
    n_routed_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    num_attention_heads: int
    intermediate_size: int
    moe_intermediate_size: int
    hidden_size: int
    vocab_size: int
    num_nextn_predict_layers: int = 0

    def dimensions(self) -> Dimensions:
        names = ("num_attention_heads", "intermediate_size", "moe_intermediate_size", "hidden_size", "vocab_size")
        return Dimensions(
            self.num_hidden_layers - self.first_k_dense_replace,
            self.n_routed_experts,
            self.num_experts_per_tok,
            self.max_position_embeddings,
            self.vocab_size,
            self.num_nextn_predict_layers > 0,
            {name: (getattr(self, name), 1) for name in names},
            self._refusals,
            Experts(
                range(self.first_k_dense_replace, self.num_hidden_layers),
                self.n_routed_experts,
                self.hidden_size,
                self.moe_intermediate_size,
            ),
        )

    def _refusals(self, settings: Settings) -> Iterator[Refusal]:
        if settings.model.overlay:
            what = "'model.overlay': this model takes no file of edited weights"
            yield Refusal("model.overlay", what, "a file of directions goes to model.ablation")
        try:
            if settings.model.ablation:
                layers_of(read_overlay(settings.model.ablation), self.num_hidden_layers, self.hidden_size)
        except TideError as error:
            yield Refusal("model.ablation", f"'model.ablation': {error.what}", "`tidectl fit` makes such files")


class _Fault(NamedTuple):
    key: str
    message: str
    rule: str


def refuse_misfit(settings: Settings, path: Path) -> None:
    """Raises ConfigError naming the lines."""
    problems = misfits(settings, path)
    if problems:
        raise ConfigError(render(problems))


def misfits(settings: Settings, path: Path) -> list[Problem]:
    """What of the profile at `path` the checkpoint cannot do; nothing where no checkpoint of a known family is."""
    model = dimensions(Path(settings.model.path))
    if model is None:
        return []
    reading, found = read(path), []
    for fault in _faults(settings, model):
        section, name = fault.key.split(".")
        span = reading.positions.values.get((section, name)) or reading.span(fault.key)
        found.append(reading.source.problem(span, fault.message, rule=fault.rule))
    return found


def dimensions(checkpoint: Path) -> Dimensions | None:
    """None where no checkpoint of a known family is."""
    try:
        with (checkpoint / "config.json").open("rb") as file:
            return msgspec.json.decode(file.read(MAX_CONFIG_BYTES), type=_Deepseek | _Glm).dimensions()
    except (OSError, msgspec.MsgspecError):
        return None


def _faults(settings: Settings, model: Dimensions) -> Iterator[_Fault]:
    layers, experts, top_k = model.layers, model.experts, model.top_k
    resident, floor = settings.experts.resident, settings.tide.floor_per_layer
    router = f"the checkpoint has {layers} layers of {experts} experts and picks {top_k} a token"
    if not layers * top_k <= resident <= layers * experts:
        message = f"'experts.resident' must be {layers * top_k} to {layers * experts} with this checkpoint"
        yield _Fault("experts.resident", f"{message}, not {resident}", router)
    elif floor and not top_k <= floor <= min(experts, resident // layers):
        most = min(experts, resident // layers)
        message = f"'tide.floor_per_layer' must be 0, or {top_k} to {most} with {resident} residents"
        yield _Fault("tide.floor_per_layer", f"{message}, not {floor}", router)
    context, longest = settings.cache.context_tokens, model.positions
    if context > longest:
        message = f"'cache.context_tokens' is {context}, but the checkpoint reaches {longest} positions"
        yield _Fault("cache.context_tokens", message, "max_position_embeddings of its config.json")
    if settings.engine.draft != "off" and not model.has_drafter:
        message = f"'engine.draft' is {settings.engine.draft!r}, but the checkpoint has no drafter"
        yield _Fault("engine.draft", message, 'num_nextn_predict_layers of its config.json; "off" needs none')
    for key, what, hint in model.refused(settings):
        yield _Fault(key, what, hint)
    if uneven := _uneven(settings.parallel.ranks, model):
        message = f"{settings.parallel.ranks} ranks cannot share this checkpoint: {', '.join(uneven)}"
        yield _Fault("parallel.ranks", message, "a number of ranks that divides each of them")


def _uneven(ranks: int, model: Dimensions) -> list[str]:
    """The dimensions that cannot be cut into equal shares of whole units."""
    return [
        f"{name} {size}" + (f" in shares of {unit}" if unit > 1 else "")
        for name, (size, unit) in model.shared.items()
        if size % (unit * ranks)
    ]
