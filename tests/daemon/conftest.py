import pytest

from tests.daemon.tiny import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")
