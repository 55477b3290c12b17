"""Which profile and which rank a unit's name means on this node."""

import socket

import pytest

from tided.errors import ConfigError, UnavailableError, UsageError
from tided.profile import instances
from tided.profile.instances import Instance, is_own_address, parse, profile_of, rank_here, unit_name
from tided.settings import Parallel


@pytest.mark.parametrize(
    ("name", "rank", "unit"),
    [
        ("ds41-mxfp4", None, "tided@ds41-mxfp4.service"),
        ("mini.2_b", 0, "tided@mini.2_b:0.service"),
        ("a", 63, "tided@a:63.service"),
    ],
)
def test_a_unit_and_its_instance_say_the_same(name, rank, unit):
    assert unit_name(name, rank) == unit
    assert parse(unit.removeprefix("tided@").removesuffix(".service")) == Instance(name, rank)


@pytest.mark.parametrize("name", ["", "../etc/passwd", "a/b", "a b", "a:1", "-a", ".a", "a\n", "é", "a" * 101, "%i"])
def test_a_name_that_is_a_path_or_needs_escapes_is_refused(name):
    with pytest.raises(UsageError, match="cannot be named"):
        unit_name(name)
    if ":" not in name:
        with pytest.raises(UsageError, match="no instance"):
            parse(name)


@pytest.mark.parametrize("instance", ["a:", "a:x", "a:-1", "a:01", "a:100", "a:1:2", ":1", "a:1\n"])
def test_a_rank_is_a_small_number(instance):
    with pytest.raises(UsageError, match="NAME or NAME:RANK"):
        parse(instance)


def test_a_nodes_own_profile_comes_before_a_bundled_one_of_that_name(tmp_path):
    assert profile_of("mini-deepseek", tmp_path) == instances.BUNDLED_DIR / "mini-deepseek.toml"
    own = tmp_path / "mini-deepseek.toml"
    own.write_text("")
    assert profile_of("mini-deepseek", tmp_path) == own
    with pytest.raises(ConfigError, match="there is no profile 'mine'") as refused:
        profile_of("mine", tmp_path)
    assert str(tmp_path / "mine.toml") in refused.value.hint


def here(*hosts):
    return lambda host: host in hosts


PAIR = Parallel(ranks=2, hosts=("192.168.177.11", "192.168.177.12"))


def test_the_rank_of_a_node_is_the_one_with_its_address():
    assert rank_here(PAIR, "pair", here("192.168.177.11")) == 0
    assert rank_here(PAIR, "pair", here("192.168.177.12")) == 1
    assert rank_here(Parallel(ranks=1), "one", here()) == 0


def test_an_address_that_is_not_up_yet_may_come_a_second_one_never_goes():
    with pytest.raises(UnavailableError, match="is an address of this node") as refused:
        rank_here(PAIR, "pair", here())
    assert refused.value.exit_code == 69  # restarted
    with pytest.raises(ConfigError, match="several ranks live on this node: 0, 1") as refused:
        rank_here(PAIR, "pair", here(*PAIR.hosts))
    assert refused.value.exit_code == 78  # not
    assert "tided@pair:0.service" in refused.value.hint
    with pytest.raises(ConfigError, match="several ranks live on this node: 0, 1, 2"):
        rank_here(Parallel(ranks=3), "local", here())


def test_an_address_is_ours_if_it_can_be_bound():
    assert is_own_address("127.0.0.1")
    assert not is_own_address("203.0.113.77")  # of a network that is kept for documents
    assert not is_own_address("no-such-host.invalid")


def test_asking_for_an_address_takes_no_port_of_a_service():
    with socket.create_server(("127.0.0.1", 0)):
        assert is_own_address("127.0.0.1")
