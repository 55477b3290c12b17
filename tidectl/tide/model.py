"""Whose history is meant, and where it is. It belongs to the daemon that records into it: reading makes a copy."""

from pathlib import Path
from typing import NamedTuple

from packers.exl3_sizes import whole_sizes
from packers.joined import identity_of
from packers.overlay import digest_of, identity_under
from packers.shards import Checkpoint
from tidectl import fits, runner
from tidectl.state import state_dir
from tided.errors import DataError, NotRunningError
from tided.profile import load
from tided.settings import Settings
from tided.tide.demand import RouterShape
from tided.tide.history import History, path_of
from tided.tide.kinds import Kinds, kinds_of
from tided.tide.seed import Seed, load_seed


class Model(NamedTuple):
    """Whose history it is. `kinds`: of its experts, where their records differ in size."""

    profile: Path
    settings: Settings
    identity: str
    family: str
    shape: RouterShape
    kinds: Kinds | None

    @property
    def history(self) -> Path:
        return path_of(_directory(), self.identity, self.shape)

    @property
    def seed(self) -> Seed | None:
        file = self.settings.tide.seed
        return load_seed(Path(file), self.family, self.shape) if file else None


def model_of(profile: Path | None) -> Model:
    path = profile or _ran()
    settings = load(path)
    checkpoint = Checkpoint.open(settings.model.path)
    identity = checkpoint.identity()
    if settings.model.dense:
        identity = identity_of(identity, Checkpoint.open(settings.model.dense).identity())
    found = fits.dimensions(Path(settings.model.path))
    if found is None:
        raise DataError("is no checkpoint of a family that this build knows", where=settings.model.path)
    sizes = whole_sizes(checkpoint, found.mixed) if found.mixed else None
    return Model(
        path,
        settings,
        identity_under(identity, digest_of(settings.model.overlay or settings.model.ablation)),
        str(checkpoint.config["model_type"]),
        RouterShape(found.layers, found.experts, found.top_k),
        None if sizes is None else kinds_of(sizes, settings.experts.spare_slots, settings.tide.hot_ring_slots),
    )


def _ran() -> Path:
    now = runner.status(state_dir())
    ran = now.run or now.last
    if ran is None:
        raise NotRunningError("nothing runs, and nothing ran here before", hint="name a PROFILE")
    return Path(ran.profile)


def read(model: Model) -> History:
    return History.open(_directory(), model.identity, model.shape, record=False)


def _directory() -> Path:
    return state_dir() / "history"
