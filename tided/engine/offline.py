"""A model without a daemon: teacher-forced logits of a list of tokens, over local ranks or in this process.

Several ranks run as `python -m tided.engine.offline JOB RANK`; a job is a private directory with job.json (what to
compute), rank-N.log, and in the end logits.safetensors.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save
from torch import Tensor

from packers.shards import Checkpoint
from tided.engine.build import OpenedModel, Progress, build_rank, open_model
from tided.engine.dataplane import TorchGroup
from tided.engine.devices import allocating, refuse_shortage, use_device
from tided.engine.local_ranks import free_port, run_ranks
from tided.errors import ConfigError, TideError, UsageError
from tided.experts.arena import Pair
from tided.files import whole
from tided.models.base import Model
from tided.models.families import family_of
from tided.models.parallel import Alone, Group
from tided.profile.rules import faults_of
from tided.profile.schema import KEYS, value_of
from tided.settings import Cache, Engine, Experts, Parallel, Settings, Vision
from tided.settings import Model as ModelSettings
from tided.tide.demand import RouterShape
from tided.tide.kinds import Kinds, first_order
from tided.tide.planner import boot_set, boot_set_of_bytes, first_set
from tided.tide.seed import Seed, layered_set, load_seed

Numerics = Literal["native", "fp32"]
KEY = "logits"
RESULT = "logits.safetensors"
JOB = "job.json"
GIVEN = ("model.prefill_chunk_tokens", "parallel.ranks", "cache.context_tokens")
STEP_TIMEOUT_S = 3600.0  # a rank waits in its first collective for those that still load; the run has its own limit


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank computes: the last `decode` of `token_ids` one at a time, the others in chunks."""

    settings: Settings
    token_ids: list[int]
    decode: int


def logits(
    target: Settings | Path,
    token_ids: Sequence[int],
    *,
    chunk: int | None = None,
    ranks: int | None = None,
    resident: int | None = None,
    decode: int = 0,
    numerics: Numerics | None = None,
    timeout_s: float = 3600.0,
    progress: Progress = lambda stage, done, total: None,
) -> Tensor:
    """fp32 [tokens, vocab]: row i is computed from the tokens up to i. `target` is a profile's settings or the
    directory of a checkpoint; None leaves a value as the profile has it (a checkpoint: 512, 1 rank, every expert,
    native).

    Raises the ranks' own errors; PairError when a rank dies or `timeout_s` pass."""
    settings = target if isinstance(target, Settings) else settings_of(target)
    job = Job(_changed(settings, len(token_ids), chunk, ranks, resident, numerics), list(token_ids), decode)
    _check_limits(job.settings)
    opened = open_model(job.settings)
    _check(job, opened)
    if job.settings.parallel.ranks == 1:
        use_device(job.settings, 0)
        refuse_shortage(opened, 0)
        return compute(job, opened, Alone(), progress)
    return _over_ranks(job, timeout_s)


def write_logits(path: Path, values: Tensor) -> None:
    """A safetensors file with the key `logits`, whole or not at all."""
    with whole(path) as file:
        file.write(save({KEY: values}))


def settings_of(checkpoint: Path) -> Settings:
    """Settings for a checkpoint without a profile: one rank on CPU, every expert resident."""
    config = Checkpoint.open(checkpoint).config
    shape = family_of(config).shape(config)
    return Settings(
        model=ModelSettings(path=str(checkpoint), served_name=checkpoint.name or "model"),
        experts=Experts(resident=shape.moe_layers * shape.experts_per_layer),
        cache=Cache(context_tokens=shape.context_tokens, pool_tokens=shape.context_tokens),
    )


def compute(job: Job, opened: OpenedModel, group: Group, progress: Progress) -> Tensor:
    """This rank's part of the job; every rank gets the whole result [tokens, vocab]."""
    with allocating(opened, group.rank):
        rank = build_rank(opened, group, first_pairs(opened), progress)
    try:
        ids = torch.tensor(job.token_ids, dtype=torch.int64, device=job.settings.engine.device)
        return teacher_forced(rank.model, ids, job.decode, job.settings.model.prefill_chunk_tokens)
    finally:
        rank.reads.close()


@torch.inference_mode()
def teacher_forced(model: Model, ids: Tensor, decode: int, chunk: int) -> Tensor:
    """ids [tokens] int64 -> logits [tokens, vocab] after each: chunks first, then the last `decode` one by one."""
    lane = model.open_lane(0)
    prompt, tail = ids[: len(ids) - decode], ids[len(ids) - decode :]
    rows = [model.prefill(lane, part, "all") for part in torch.split(prompt, chunk) if len(part)]
    rows += [model.decode([lane], token[None]) for token in tail]
    model.close_lane(lane)
    return torch.cat([row for row in rows if row is not None]).float().cpu()


def first_pairs(opened: OpenedModel) -> list[Pair]:
    """The resident set of a first start: by the profile's seed, or the first experts of each layer (of each size, where
    records differ). No history counts, so that the same profile gives the same logits everywhere."""
    settings, shape, kinds = opened.settings, opened.shape, opened.kinds
    budget, floor = settings.experts.resident, settings.tide.floor_per_layer or shape.top_k
    try:
        router = RouterShape(shape.moe_layers, shape.experts_per_layer, shape.top_k)
        seed = load_seed(Path(settings.tide.seed), shape.family, router) if settings.tide.seed else None
        if kinds is not None:
            return _first_of_bytes(kinds, seed, budget, floor)
        if seed is None:
            return first_set(shape.moe_layers, shape.experts_per_layer, budget, floor)
        return boot_set(seed.prior, budget, floor)
    except ValueError as error:
        raise ConfigError(str(error), where="experts.resident, tide.floor_per_layer") from error


def _first_of_bytes(kinds: Kinds, seed: Seed | None, budget: int, floor: int) -> list[Pair]:
    """Where nothing tells experts apart, sizes are kept as they occur."""
    guessed = None
    if seed is not None and not seed.layer_residents:
        scores = seed.prior
    else:
        layers, experts = kinds.of.shape
        shares = () if seed is None else seed.layer_residents
        start = layered_set(shares, experts, budget, floor) if shares else first_set(layers, experts, budget, floor)
        scores = guessed = first_order(kinds.of, start)
    return boot_set_of_bytes(scores, kinds.sizes, kinds.budget_bytes(budget), floor, guessed)


def _changed(
    settings: Settings,
    tokens: int,
    chunk: int | None,
    ranks: int | None,
    resident: int | None,
    numerics: Numerics | None,
) -> Settings:
    """One lane with room for the tokens, every rank on this machine, no tower for images that there are none of, and
    what the caller asks for."""
    model, context = settings.model, max(tokens, 16)
    return replace(
        settings,
        model=replace(
            model, prefill_chunk_tokens=given(chunk, model.prefill_chunk_tokens), numerics=numerics or model.numerics
        ),
        experts=replace(settings.experts, resident=given(resident, settings.experts.resident), spare_slots=1),
        cache=Cache(
            context_tokens=context, pool_tokens=context, dtype=settings.cache.dtype, split=settings.cache.split
        ),
        engine=Engine(device=settings.engine.device, lanes=1, threads=settings.engine.threads),
        parallel=Parallel(
            ranks=given(ranks, settings.parallel.ranks), data_port=free_port(), step_timeout_s=STEP_TIMEOUT_S
        ),
        vision=Vision(),
    )


def given(value: int | None, default: int) -> int:
    return default if value is None else value


def _check_limits(settings: Settings) -> None:
    """What a caller may give must keep the limits of a profile, for one rank as for many. Raises UsageError."""
    for key in KEYS:
        if key.dotted in GIVEN:
            for fault in faults_of(key, value_of(settings, key)):
                raise UsageError(fault.message)


def _check(job: Job, opened: OpenedModel) -> None:
    if not job.token_ids:
        raise UsageError("there is no token to compute")
    if not 0 <= job.decode <= len(job.token_ids):
        raise UsageError(f"{job.decode} tokens to decode of only {len(job.token_ids)}")
    for index, token in enumerate(job.token_ids):
        if not 0 <= token < opened.shape.vocab_size:
            raise UsageError(f"token {index} is {token}; this model's vocabulary has {opened.shape.vocab_size} tokens")


# Several ranks


def _over_ranks(job: Job, timeout_s: float) -> Tensor:
    with tempfile.TemporaryDirectory(prefix="tidelm-logits-") as name:
        folder = Path(name)
        (folder / JOB).write_bytes(msgspec.json.encode(job))
        run_ranks(["-m", "tided.engine.offline"], folder, job.settings.parallel.ranks, timeout_s)
        return load_file(folder / RESULT)[KEY]


def main(arguments: Sequence[str]) -> int:
    """One rank of a job. Its errors go to stderr, its exit code is theirs."""
    folder, number = Path(arguments[0]), int(arguments[1])
    job = msgspec.json.decode((folder / JOB).read_bytes(), type=Job)
    try:
        use_device(job.settings, number)
        opened = open_model(job.settings)
        refuse_shortage(opened, number)
        group = TorchGroup(job.settings, number)
        try:
            result = compute(job, opened, group, lambda stage, done, total: None)
            if number == 0:
                write_logits(folder / RESULT, result)
        finally:
            group.close()
    except TideError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # as a daemon ends: what is left of a group may wait for ranks that are gone
