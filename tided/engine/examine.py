"""What only the engine's own code can tell of a machine and a profile, for `tidectl doctor`: `python -m
tided.engine.examine PROFILE RANK... [--at-rest]` prints one JSON line a question, and takes no memory for weights.

A process of its own: a driver that hangs or crashes ends this one, and what it had told by then counts.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

import msgspec

from tided.errors import TideError
from tided.settings import Settings

AT_REST = "--at-rest"
Value = dict[str, Any]


class Told(msgspec.Struct, omit_defaults=True):
    """An answer. `what` empty: `value` is it; else what is wrong, in the words of our own errors, or `crash`: of
    others."""

    question: str
    value: Value = {}
    what: str = ""
    where: str = ""
    hint: str = ""
    crash: str = ""


class Examination:
    """One question a method. Each opens what it needs, so one that fails hides no other."""

    def __init__(self, settings: Settings, ranks: Sequence[int]) -> None:
        self.settings, self.ranks = settings, ranks

    def torch(self) -> Value:
        import torch

        there = torch.cuda.is_available()
        devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())] if there else []
        return {
            "version": str(torch.__version__),
            "cuda": torch.version.cuda or "",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if there else "",  # type: ignore[no-untyped-call]
            "devices": [
                {"name": d.name, "capability": [d.major, d.minor], "memory_bytes": d.total_memory} for d in devices
            ],
        }

    def checkpoint(self) -> Value:
        shards = self._checkpoint.shards
        size = sum(shard.size_bytes for shard in shards)
        return {"tensors": len(self._checkpoint.tensors), "shards": len(shards), "bytes": size}

    def inventory(self) -> Value:
        from tided.models.families import family_of

        family = family_of(self._checkpoint.config)
        family.inventory(self._checkpoint, self.settings)
        return {"family": family.name, "tensors": len(self._checkpoint.tensors)}

    def needs(self) -> Value:
        """Bytes by rank and class, and what of a start's own gates does not pass here, in words."""
        from tided.engine.devices import here
        from tided.engine.memory import gates, gb, needs

        opened, node = self._opened, here(self.settings)
        apart = node is not None and node.apart
        ranks = {str(rank): {need.what: need.nbytes for need in needs(opened, rank, apart)} for rank in self.ranks}
        missing = {
            gate.name: f"{gb(gate.missing_bytes)} more than the {gb(gate.free_bytes)} that are free"
            for rank in self.ranks
            for gate in (gates(opened, rank, node, started=False) if node else [])
            if not gate.passes
        }
        return {"ranks": ranks, "missing": missing, "judged": node is not None}

    def packs(self) -> Value:
        """That they are this checkpoint's, by their headers."""
        from tided.engine.build import open_source

        for rank in self.ranks:
            open_source(self._opened, rank).close()
        return {"ranks": list(self.ranks)}

    def reads(self) -> Value:
        """The disk at records of this model, by the engine's own probe and source: a second, and 256 MB at most."""
        from tided.engine.build import open_source
        from tided.experts.probe import measure

        opened = self._opened
        with closing(open_source(opened, self.ranks[0])) as source:
            curve = measure(source, opened.all_pairs, opened.largest_bytes, self.settings.experts.read_threads)
            points = [{"in_flight": p.depth, "bytes_per_s": p.bytes_per_s, "s": p.latency_s} for p in curve.points]
            return {
                "record_bytes": opened.largest_bytes,
                "records": len(opened.all_pairs),
                "direct": source.stats.direct,
                "points": points,
                "not_measured": curve.why,
            }

    @cached_property
    def _checkpoint(self) -> Any:
        from tided.models.families import open_checkpoint

        return open_checkpoint(self.settings.model)

    @cached_property
    def _opened(self) -> Any:
        from tided.engine.build import open_model

        return open_model(self.settings)


QUESTIONS: tuple[str, ...] = ("torch", "checkpoint", "inventory", "needs", "packs", "reads")


def answers(settings: Settings, ranks: Sequence[int], at_rest: bool) -> Iterator[Told]:
    """`at_rest`: nobody is served here whom a probe of the disk would slow."""
    examination = Examination(settings, ranks)
    for question in QUESTIONS:
        if (question == "packs" and settings.experts.source != "pack") or (question == "reads" and not at_rest):
            continue
        yield _answer(question, getattr(examination, question))


def _answer(question: str, ask: Callable[[], Value]) -> Told:
    try:
        return Told(question, ask())
    except TideError as error:
        return Told(question, what=error.what, where=error.where, hint=error.hint)
    except Exception as error:
        return Told(question, crash=f"{type(error).__name__}: {error}")


def main() -> int:
    from tided.profile import load

    profile, *words = sys.argv[1:]
    at_rest = words[-1:] == [AT_REST]
    for told in answers(load(profile), [int(rank) for rank in words if rank != AT_REST], at_rest):
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
