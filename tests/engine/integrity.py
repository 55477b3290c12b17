"""What a rank holds when nothing is asked of it: nothing but its weights, its residents and its prompt cache."""

from pathlib import Path

from tided.cache.bundle import nbytes


def at_rest(rank, tampered: bool = False) -> None:
    """Fails unless all that requests had was given back. What was handed to the writer is written. `tampered`: files
    were changed or taken away by others."""
    executor = rank.executor
    executor.check()
    assert executor.lanes == {}
    assert rank.model.pool.free_tokens == rank.model.pool.pages * rank.model.page_tokens
    check_arena(rank.residents)
    assert executor._loads.keys() == rank.residents._reading.keys()
    caching = executor.caching
    assert (caching.kept, caching.recalling, caching._found, caching.parked.lanes) == (0, 0, {}, [])
    assert caching.background._pending_bytes == 0
    check_prefixes(caching.prefixes, tampered)
    if caching.plan.folder is not None:
        assert names(caching.plan.folder / "parked") == set()


def check_arena(residents) -> None:
    """Every slot of the pool is free, a pair's, or taken by a read under way."""
    arena = residents.arena
    taken = {reading.slot for reading in residents._reading.values()}
    assert arena._taken == taken
    assert arena.free + len(arena.directory) + len(taken) == arena.pool


def check_prefixes(prefixes, tampered: bool = False) -> None:
    """Memory and disk hold what the books say, within their bytes."""
    prefixes.check()
    states = sum(nbytes(parts) for _, parts in prefixes._states.values())
    pages = sum(map(nbytes, prefixes._pages.values()))
    assert states + pages == prefixes._ram.used_bytes <= prefixes._ram.budget_bytes
    if prefixes._folder is None or not prefixes._disk.budget_bytes:
        return
    disk = prefixes._disk
    assert set(disk.entries) == prefixes._written
    assert set(disk.page_bytes) == prefixes._pages_written
    expected = {f"{key}.state" for key in disk.entries} | {f"{key}.pages" for key in disk.page_bytes}
    assert names(prefixes._folder) <= expected
    assert disk.used_bytes <= disk.budget_bytes
    if not tampered:
        assert names(prefixes._folder) == expected
        assert size(prefixes._folder) == disk.used_bytes


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
