"""What ranks tell each other before they serve."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from tests.control.conftest import make_settings
from tests.daemon.tiny import GOLDEN
from tided import boot, guard
from tided.control.keys import load_keys
from tided.control.lockstep import Follower
from tided.engine import facts
from tided.engine.build import open_model
from tided.engine.facts import facts_of
from tided.engine.offline import settings_of
from tided.errors import PairError, UnavailableError


class Side:
    def __init__(self):
        self.told = None

    def tell(self, *_): ...

    def joined(self, session): ...

    def ended(self, error):
        self.told = error


def test_a_rank_that_was_let_in_hears_why_rank_0_does_not_go_on(tmp_path, monkeypatch):
    keys = load_keys(tmp_path / "curve.key", create=True)
    leaders = make_settings(3, start_timeout_s=1.5)  # rank 2 never comes
    followers = replace(leaders, parallel=replace(leaders.parallel, start_timeout_s=60.0))
    monkeypatch.setattr(boot, "_open", lambda *_: None)
    monkeypatch.setattr(boot, "_history", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(boot, "_pilot", lambda *_: SimpleNamespace(boot_pairs=list))
    monkeypatch.setattr(boot, "facts_of", lambda *_: {})
    side = Side()
    leader = threading.Thread(target=boot.run_rank, args=(leaders, 0, keys, tmp_path, side), daemon=True)
    leader.start()
    follower = Follower(followers, 1, keys)
    joining = threading.Thread(target=lambda: said.append(_refusal(follower)), daemon=True)
    said = []
    joining.start()
    joining.join(20)
    assert "rank 0 ended: rank 2 did not come" in str(said[0])
    leader.join(20)
    assert isinstance(side.told, UnavailableError)
    follower.close()


def _refusal(follower):
    with pytest.raises(PairError) as refused:
        follower.join({})
    return refused.value


def test_the_processor_is_a_fact(monkeypatch):
    opened = open_model(settings_of(GOLDEN))
    ours = facts_of(opened)
    monkeypatch.setattr(facts.torch.backends.cpu, "get_cpu_capability", lambda: "another")
    differences = guard.compare(ours, facts_of(opened))
    assert [(name, theirs) for name, _, theirs in differences] == [("processor", "another")]


@pytest.mark.parametrize("driver", ["580.95.05", None])
def test_of_a_gpu_its_name_its_driver_and_the_collectives_are_facts(monkeypatch, tmp_path, driver):
    cuda = facts.torch.cuda
    monkeypatch.setattr(cuda, "get_device_name", lambda: "NVIDIA GB10")
    monkeypatch.setattr(cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(facts, "NVIDIA_DRIVER", tmp_path / "version")
    if driver:
        (tmp_path / "version").write_text(f"{driver}\n")
    opened = open_model(settings_of(GOLDEN))
    device = replace(opened.settings.engine, device="cuda")
    ours = facts_of(dataclasses.replace(opened, settings=replace(opened.settings, engine=device)))
    told = {"processor": "NVIDIA GB10", "driver": driver or guard.ABSENT, "library.nccl": "2.27.3"}
    assert ours.items() >= told.items()
    monkeypatch.setattr(cuda.nccl, "version", lambda: (2, 28, 1))
    theirs = facts_of(dataclasses.replace(opened, settings=replace(opened.settings, engine=device)))
    assert guard.compare(ours, theirs) == [("library.nccl", "2.27.3", "2.28.1")]
    assert facts.about(ours)["machine"]["device"] == "NVIDIA GB10"
    assert facts.about(ours)["build"]["nccl"] == "2.27.3"


def test_of_the_facts_those_are_told_that_a_figure_is_of(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2-of-somebody")
    opened = open_model(settings_of(GOLDEN))
    ours = facts_of(opened)
    told = facts.about(ours | {"driver": "580.1", "library.nccl": "2.27.3"})
    assert told["build"].keys() == {"tidelm", "code", "torch", "triton", "numpy", "nccl"}
    assert (told["build"]["code"], told["build"]["torch"]) == (guard.code_digest(), ours["library.torch"])
    assert told["machine"] == guard.machine() | {"device": ours["processor"], "driver": "580.1"}
    assert told["machine"]["cores"] >= 1
    assert told["checkpoint"]["identity"] == opened.checkpoint.identity()
    assert told["checkpoint"].keys() == {"identity", "dense", "family", "tokenizer"}
    assert not any(hidden in str(told) for hidden in ("AVX2-of-somebody", str(opened.checkpoint.path)))
    assert "driver" not in facts.about(ours)["machine"]


def test_the_tokenizer_is_a_fact_by_its_content(tmp_path):
    opened = open_model(settings_of(GOLDEN))
    ours = facts_of(opened)["tokenizer"]
    whole = (opened.checkpoint.path / "tokenizer.json").read_bytes()
    found = []
    for content in (whole, whole + b" ", b""):
        (tmp_path / "tokenizer.json").write_bytes(content)
        found.append(facts._tokenizer(tmp_path))
    assert [one == ours for one in found] == [True, False, False]
    assert facts._tokenizer(tmp_path / "elsewhere") == guard.ABSENT
