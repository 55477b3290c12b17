"""A start from packs: what is wrong with them is told before the ranks meet and anything is loaded."""

import pytest
from msgspec.structs import replace

from tests.daemon.tiny import GOLDEN
from tided.boot import run_rank
from tided.engine.offline import settings_of
from tided.engine.packing import pack_checkpoint
from tided.errors import DataError


class Told:
    """The loop's side of a rank that does not get far."""

    def __init__(self):
        self.phases, self.error = [], None

    def tell(self, message, done=0, total=0):
        self.phases.append(message)

    def ended(self, error):
        self.error = error


@pytest.mark.parametrize(
    ("ranks", "damage", "message"),
    [
        (2, None, "experts-rank-0-of-1.mxfp4: is missing"),
        (1, 2_000, "the header is damaged"),
        (1, 5_000, "the index is damaged"),
    ],
)
def test_a_pack_that_is_missing_or_damaged_ends_the_start_at_once(tmp_path, ranks, damage, message):
    path = pack_checkpoint(GOLDEN, ranks, 0, tmp_path / "packs", lambda done, total: None)[0]
    if damage:
        data = bytearray(path.read_bytes())
        data[damage] ^= 1
        path.write_bytes(data)
    settings, told = settings_of(GOLDEN), Told()
    experts = replace(settings.experts, source="pack", pack_dir=str(path.parent))
    run_rank(replace(settings, experts=experts), 0, None, tmp_path / "state", told)
    assert isinstance(told.error, DataError)
    assert message in str(told.error)
    assert told.phases == ["checkpoint"]
