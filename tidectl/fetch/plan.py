"""Which files a directory is to have, and what of them is here already."""

from dataclasses import dataclass, field
from pathlib import Path

from packers.hub import Repository
from packers.manifest import Manifest, is_untouched, read_manifest
from packers.transfer import part_bytes
from packers.wanted import Target
from tidectl import room
from tidectl.room import free_bytes
from tided.errors import UnavailableError, UsageError


@dataclass
class Plan:
    """`here`: files that are whole, by the manifest; `verify`: none is believed to be. `left_bytes`: of the others what
    has not come yet."""

    repository: Repository
    targets: list[Target]
    manifest: Manifest
    directory: Path
    left_out_bytes: int = 0
    verify: bool = False
    here: set[str] = field(default_factory=set)

    @property
    def total_bytes(self) -> int:
        return sum(target.nbytes for target in self.targets)

    @property
    def missing(self) -> list[Target]:
        return [target for target in self.targets if target.name not in self.here]

    @property
    def changed(self) -> list[str]:
        """Files of ours that have been written to since."""
        if self.verify:
            return []
        names = (target.name for target in self.missing if target.name in self.manifest.files)
        return sorted(name for name in names if _size(self.directory / name) is not None)

    def come_bytes(self, target: Target) -> int:
        """Of a file that is not known to be whole."""
        return target.nbytes if self.may_be(target) else self.part_bytes(target)

    def may_be(self, target: Target) -> bool:
        """A file of its size is there: it is compared before anything comes."""
        known = target.is_published or target.name in self.manifest.files
        return known and _size(self.directory / target.name) == target.nbytes

    def part_bytes(self, target: Target) -> int:
        """That came before the fetch was ended."""
        return 0 if self.may_be(target) else part_bytes(self.directory / target.name, target.nbytes)

    def look(self) -> None:
        """What is here. Raises UsageError for files that are in the way, UnavailableError where another fetch came
        between."""
        found = read_manifest(self.directory) or self.manifest
        if (found.repository, found.commit, found.kind) != (
            self.manifest.repository,
            self.manifest.commit,
            self.manifest.kind,
        ):
            raise UnavailableError("another fetch has begun here", where=str(self.directory), hint="run it again")
        self.manifest = found
        self.here = {target.name for target in self.targets if not self.verify and _is_here(self, target)}
        _refuse_others_files(self)

    @property
    def left_bytes(self) -> int:
        return sum(target.nbytes - self.come_bytes(target) for target in self.missing)


def refuse_shortage(plan: Plan) -> None:
    """Raises UnavailableError where the file system cannot hold what is left."""
    room.refuse_shortage(str(plan.directory), plan.left_bytes, free_bytes(plan.directory))


def _is_here(plan: Plan, target: Target) -> bool:
    entry = plan.manifest.files.get(target.name)
    path = plan.directory / target.name
    if entry is None or entry.bytes != target.nbytes or path.is_symlink() or not is_untouched(path, entry):
        return False
    return not target.published.sha256 or target.published.sha256 == entry.sha256


def _refuse_others_files(plan: Plan) -> None:
    """A file that no fetch of ours brought is replaced where it may be a damaged copy, by its size; else it is
    somebody's. So is a link, whose file may lie where no loader goes."""
    strange = [
        target.name
        for target in plan.missing
        if (plan.directory / target.name).is_symlink()
        or (
            target.name not in plan.manifest.files
            and _size(plan.directory / target.name) is not None
            and not plan.may_be(target)
        )
    ]
    if strange:
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise UsageError(
            f"{plan.directory} holds {strange[0]}{more}, which is not the repository's",
            hint="name another directory with --to, or move it away: it would be overwritten",
        )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
