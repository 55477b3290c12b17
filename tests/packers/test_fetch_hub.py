"""Checkpoints come whole, or without their routed experts, from a hub that cuts, throttles, fails and lies; whatever
ends a fetch, the next one goes on, and the bytes are the hub's."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
from hub_server import COMMIT, Hub, serving
from shard_files import write_checkpoint

from packers import manifest, transfer, wanted
from packers.hub import Published, Repository, _Broken
from packers.manifest import faults, read_manifest
from packers.shards import Checkpoint
from tidectl import room
from tidectl.fetch import plan
from tidectl.fetch.options import Options
from tidectl.fetch.progress import Progress, speed
from tidectl.fetch.run import _alone, run
from tided.errors import DataError, TideError, UnavailableError, UsageError

ROOT = Path(__file__).parents[2]
REPO = "some/model"
EXPERTS, LAYERS = 4, 3


def u8(chance: random.Random, nbytes: int) -> tuple[str, list[int], bytes]:
    return "U8", [nbytes], chance.randbytes(nbytes)


def release(path: Path, seed: int = 1, scale: int = 1) -> Path:
    """A shard of a layer with experts, one without any, one of experts alone, as releases come; texts beside them."""
    chance = random.Random(seed)
    shards: dict[str, dict[str, tuple[str, list[int], bytes]]] = {"model-0.safetensors": {}}
    shards["model-0.safetensors"]["model.embed_tokens.weight"] = u8(chance, 30_001 * scale)
    shards["model-0.safetensors"]["model.norm.weight"] = u8(chance, 64)
    for layer in range(LAYERS):
        tensors = shards.setdefault(f"model-{layer + 1}.safetensors", {})
        if layer < LAYERS - 1:
            tensors[f"model.layers.{layer}.mlp.gate.weight"] = u8(chance, 700)
        for expert in range(EXPERTS):
            tensors[f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"] = u8(chance, 20_000 * scale)
        if layer < LAYERS - 1:
            tensors[f"model.layers.{layer}.mlp.shared_experts.up_proj.weight"] = u8(chance, 5_003)
            tensors[f"model.layers.{layer}.input_layernorm.weight"] = u8(chance, 64)
    write_checkpoint(path, shards, model_type="glm_moe_dsa", hidden_size=4)
    (path / "tokenizer.json").write_text('{"model": 1}')
    (path / "empty.txt").write_text("")
    (path / ".gitattributes").write_text("*.safetensors filter=lfs")
    (path / "extra").mkdir()
    (path / "extra" / "notes.md").write_text("notes")
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release(tmp_path_factory.mktemp("hub") / "model")


def at_once(repository: Repository) -> Repository:
    repository._sleep = lambda seconds: None
    return repository


@pytest.fixture
def hub(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Nothing is waited for between tries."""
    made = Hub({REPO: source})
    listed = Repository.listed.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Repository, "listed", classmethod(lambda cls, name, *_: at_once(listed(cls, name))))
    with serving(made) as address:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield made


def bring(to: Path, as_json: bool = False, **options: Any) -> None:
    run(Options(REPO, to, **options), as_json)


def contents(path: Path, but: tuple[str, ...] = (manifest.NAME,)) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and file.name not in (*but, ".gitattributes"))
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def visible_bytes(source: Path) -> int:
    return sum(map(len, contents(source).values()))


# Whole checkpoints


def test_a_checkpoint_comes_whole(hub: Hub, source: Path, tmp_path: Path) -> None:
    bring(tmp_path / "here")
    assert contents(tmp_path / "here") == contents(source)
    assert Checkpoint.open(tmp_path / "here").identity() == Checkpoint.open(source).identity()
    assert hub.sent_bytes == visible_bytes(source)


def test_what_is_left_beside_it(hub: Hub, source: Path, tmp_path: Path) -> None:
    bring(tmp_path, revision=COMMIT)
    found = read_manifest(tmp_path)
    assert found is not None
    assert (found.repository, found.commit, found.kind, found.complete) == (REPO, COMMIT, "whole", True)
    data = contents(source)
    assert {name: entry.sha256 for name, entry in found.files.items()} == {
        name: hashlib.sha256(body).hexdigest() for name, body in data.items()
    }
    assert {entry.by for name, entry in found.files.items() if name.endswith(".safetensors")} == {"sha256"}
    assert found.files["config.json"].by == "git"


def test_the_sums_beside_it_find_one_bit(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bring(tmp_path)
    found = read_manifest(tmp_path)
    assert found is not None
    assert list(faults(tmp_path, found)) == []
    shard = tmp_path / "model-2.safetensors"
    body = bytearray(shard.read_bytes())
    body[777] ^= 4
    shard.write_bytes(body)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").unlink()
    told = "\n".join(faults(tmp_path, found))
    assert "model-2.safetensors: sha256" in told
    assert "config.json: 2 bytes, not" in told
    assert "tokenizer.json: cannot be read" in told
    assert "model-1" not in told
    capsys.readouterr()
    bring(tmp_path)  # which mends it, and says so
    assert "config.json and 1 more changed since they were fetched" in capsys.readouterr().err
    assert list(faults(tmp_path, read_manifest(tmp_path) or found)) == []


@pytest.mark.parametrize("dense", [False, True])
def test_damage_under_an_old_time_is_found_when_it_is_asked_for(hub: Hub, tmp_path: Path, dense: bool) -> None:
    bring(tmp_path, dense=dense)
    before, body = hub.sent_bytes, contents(tmp_path)
    shard = tmp_path / "model-1.safetensors"
    times = (shard.stat().st_atime_ns, shard.stat().st_mtime_ns)
    shard.write_bytes(body[shard.name][:-1] + b"!")
    os.utime(shard, ns=times)
    bring(tmp_path, dense=dense, verify=True)
    assert contents(tmp_path) == body
    headers = sum(shard.data_offset for shard in Checkpoint.open(hub.repositories[REPO]).shards) if dense else 0
    assert before < hub.sent_bytes <= before + len(body[shard.name]) + headers + (5_000 if dense else 0)
    found = read_manifest(tmp_path)
    assert found is not None
    assert found.files[shard.name].by == ("" if dense else "sha256")


def test_a_second_call_brings_nothing(hub: Hub, source: Path, tmp_path: Path) -> None:
    bring(tmp_path)
    before = hub.sent_bytes
    bring(tmp_path)
    assert hub.sent_bytes == before


@pytest.mark.parametrize("failures", [0.3, 0.6])
def test_over_a_hub_that_fails_no_byte_comes_twice(
    hub: Hub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: float
) -> None:
    hub.failures = failures
    monkeypatch.setattr(transfer, "REQUEST_BYTES", 1 << 14)
    bring(tmp_path)
    assert contents(tmp_path) == contents(source)
    assert hub.failed > 5
    assert hub.sent_bytes == visible_bytes(source)


def test_a_hub_that_stays_away_is_told_and_the_next_call_goes_on(
    hub: Hub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "REQUEST_BYTES", 1 << 14)
    fate = hub.fate
    for enough in (40_000, 120_000, 200_000):
        monkeypatch.setattr(hub, "fate", lambda enough=enough: "refused" if hub.sent_bytes > enough else fate())
        with pytest.raises(UnavailableError, match="503"):
            bring(tmp_path, connections=2)
        found = read_manifest(tmp_path)
        assert found is not None
        assert not found.complete
    monkeypatch.setattr(hub, "fate", fate)
    bring(tmp_path)
    assert contents(tmp_path) == contents(source)
    # Where one connection gives up, what is on its way on the other is lost.
    assert hub.sent_bytes <= visible_bytes(source) + 3 * transfer.REQUEST_BYTES


def test_files_that_are_here_already_are_looked_at_and_kept(hub: Hub, source: Path, tmp_path: Path) -> None:
    """By another tool, say; one of them is damaged."""
    for name, body in contents(source).items():
        if name.startswith("model-"):
            (tmp_path / name).write_bytes(body)
    damaged = tmp_path / "model-1.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    bring(tmp_path)
    assert contents(tmp_path) == contents(source)
    large = sum(len(body) for name, body in contents(source).items() if name.startswith("model-"))
    assert hub.sent_bytes == visible_bytes(source) - large + damaged.stat().st_size


def test_nobody_s_file_is_overwritten(hub: Hub, tmp_path: Path) -> None:
    """Of its size it may be a damaged copy; else somebody made it."""
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(UsageError, match=r"holds config\.json, which is not"):
        bring(tmp_path)
    assert (tmp_path / "config.json").read_text() == "mine"
    assert hub.sent_bytes == 0
    bring(tmp_path / "whole")
    (tmp_path / "whole" / manifest.NAME).unlink()
    with pytest.raises(UsageError, match="and 2 more, which is not"):  # the index, two shards of experts
        bring(tmp_path / "whole", dense=True)


def test_a_link_is_somebody_s(hub: Hub, source: Path, tmp_path: Path) -> None:
    """As other tools leave them, to a cache: a loader refuses what lies outside."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "model-1.safetensors").symlink_to(source / "model-1.safetensors")
    with pytest.raises(UsageError, match="holds model-1"):
        bring(tmp_path / "here")


@pytest.mark.parametrize("kept", [0, 1])
def test_what_is_done_never_exceeds_what_there_is(
    hub: Hub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """With parts, files to be compared, one of them damaged, and one that comes twice."""
    for name in ("model-0.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    (tmp_path / "model-0.safetensors").write_bytes(bytes((source / "model-0.safetensors").stat().st_size))
    transfer.part_path(tmp_path / "model-1.safetensors").write_bytes(
        (source / "model-1.safetensors").read_bytes()[:999]
    )
    hub.lies["model-3.safetensors"] = "damaged once"
    told: list[int] = []
    came = Progress.came

    def noted(self: Progress, nbytes: int) -> None:
        came(self, nbytes)
        told.append(self._done)

    monkeypatch.setattr(Progress, "came", noted)
    bring(tmp_path, connections=1, verify=bool(kept))
    assert max(told) == told[-1] == visible_bytes(source)
    assert min(told) >= 0


def test_room_is_not_wanted_for_what_is_here(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(tmp_path)
    (tmp_path / manifest.NAME).unlink()
    monkeypatch.setattr(plan, "free_bytes", lambda directory: 0)
    bring(tmp_path)
    assert read_manifest(tmp_path) is not None


def test_only_what_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    bring(tmp_path, include=["*.json", "extra/*"], exclude=["tokenizer*"])
    assert sorted(contents(tmp_path)) == ["config.json", "extra/notes.md", "model.safetensors.index.json"]
    with pytest.raises(UsageError, match="no such file"):
        bring(tmp_path, include=["overlay.safetensors"])


# A hub that lies


@pytest.mark.parametrize(
    ("lie", "told"),
    [("sum", "published is"), ("damaged", "published is"), ("short", "bytes long, not")],
)
@pytest.mark.parametrize("file", ["model-1.safetensors", "tokenizer.json"])
def test_bytes_that_are_not_those_published_are_refused(
    hub: Hub, tmp_path: Path, lie: str, told: str, file: str
) -> None:
    hub.lies[file] = lie
    with pytest.raises(DataError, match=told) as refused:
        bring(tmp_path)
    assert refused.value.where == f"{REPO}/{file}"
    assert not (tmp_path / file).exists()
    assert not transfer.part_path(tmp_path / file).exists() or lie == "short"
    hub.lies.clear()
    bring(tmp_path)
    assert (tmp_path / file).exists()


def test_bytes_that_came_wrong_once_come_again(hub: Hub, source: Path, tmp_path: Path) -> None:
    hub.lies["model-1.safetensors"] = "damaged once"
    bring(tmp_path)
    assert contents(tmp_path) == contents(source)


def test_a_part_that_was_damaged_on_the_disk_comes_again(hub: Hub, source: Path, tmp_path: Path) -> None:
    transfer.part_path(tmp_path / "model-1.safetensors").write_bytes(bytes(10_000))
    transfer.part_path(tmp_path / "model-2.safetensors").write_bytes(bytes(10_000_000))  # longer than the file
    bring(tmp_path)
    assert contents(tmp_path) == contents(source)


def test_a_directory_stays_with_its_commit(
    hub: Hub, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The repository moves on between two calls: no file of the newer one gets among those of the older."""
    here, newer = tmp_path / "here", release(tmp_path / "newer", seed=2)
    bring(here, include=["model-0*", "*.json"])
    hub.repositories |= {f"{REPO}@{COMMIT}": source, REPO: newer}
    hub.commit = "f" * 40
    bring(here)
    assert contents(here) == contents(source)
    assert f"is at {'f' * 12} by now" in capsys.readouterr().err
    with pytest.raises(UsageError, match=f"holds commit {COMMIT[:12]}"):
        bring(here, revision="main")
    bring(tmp_path / "other")
    assert contents(tmp_path / "other") == contents(newer)
    del hub.repositories[REPO]  # what is asked for is gone, the commit is there
    bring(here)


def test_another_repository_or_kind_is_refused(hub: Hub, source: Path, tmp_path: Path) -> None:
    hub.repositories["some/other"] = source
    bring(tmp_path, include=["*.json"])
    with pytest.raises(UsageError, match="--to"):
        run(Options("some/other", tmp_path), False)
    with pytest.raises(UsageError, match="--to"):
        bring(tmp_path, dense=True)


def test_a_failure_keeps_what_is_whole(hub: Hub, tmp_path: Path) -> None:
    hub.lies["model-3.safetensors"] = "sum"
    with pytest.raises(DataError):
        bring(tmp_path, connections=1)
    found = read_manifest(tmp_path)
    assert found is not None
    assert {"config.json", "model-0.safetensors", "model-2.safetensors"} <= set(found.files)


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a//b", "a\\b", "a/b\n", "x" * 300])
def test_names_that_lead_elsewhere_are_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.extra = [name]
    with pytest.raises(DataError, match="no name of a file"):
        bring(tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_repository_cannot_bring_our_manifest(hub: Hub, tmp_path: Path) -> None:
    hub.extra = [manifest.NAME]
    bring(tmp_path)
    found = read_manifest(tmp_path)
    assert found is not None
    assert found.repository == REPO


# The user's own word


def test_a_sum_of_the_user_s_counts(hub: Hub, source: Path, tmp_path: Path) -> None:
    right = hashlib.sha256((source / "tokenizer.json").read_bytes()).hexdigest()
    bring(tmp_path / "a", include=["tokenizer.json"], sums=[f"tokenizer.json={right}"])
    with pytest.raises(DataError, match="published is 0000"):
        bring(tmp_path / "b", include=["tokenizer.json"], sums=[f"tokenizer.json={'0' * 64}"])
    with pytest.raises(DataError, match="not 0000"):  # before a byte comes: the hub itself says another
        bring(tmp_path / "c", sums=[f"model-1.safetensors={'0' * 64}"])
    assert not (tmp_path / "c").exists()
    with pytest.raises(DataError, match="published is 0000"):  # of a file that is here
        bring(tmp_path / "a", include=["tokenizer.json"], sums=[f"tokenizer.json={'0' * 64}"])
    for wrong in ("tokenizer.json", "tokenizer.json=12", f"none={right}"):
        with pytest.raises(UsageError, match="--sha256"):
            bring(tmp_path / "d", sums=[wrong])


def test_a_token_is_honoured(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    with pytest.raises(TideError, match="HF_TOKEN"):
        bring(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "secret")
    bring(tmp_path, include=["config.json"])


def test_bytes_come_from_elsewhere_and_a_token_does_not_go_there(
    hub: Hub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large files do: by a redirect to another host."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.token = "secret"
    hub.elsewhere = huggingface_hub.constants.ENDPOINT.replace("127.0.0.1", "localhost")
    bring(tmp_path)
    assert contents(tmp_path) == contents(source)
    assert hub.told_elsewhere == {None}


# Room, order, words


def test_room_is_looked_at_before_a_byte_comes(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "free_bytes", lambda directory: room.SPARE_BYTES + 100_000)
    with pytest.raises(UnavailableError, match=r"28\d\.\d kB are to come, 268\.5 MB are free"):
        bring(tmp_path)
    assert hub.sent_bytes == 0
    bring(tmp_path, include=["config.json"])


def test_a_disk_that_fills_is_told(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as filled:
        filled.setattr(transfer, "_put", full)
        with pytest.raises(UnavailableError, match="file system is full") as refused:
            bring(tmp_path)
    assert "goes on" in refused.value.hint
    bring(tmp_path)


def test_a_dry_run_brings_nothing(hub: Hub, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bring(tmp_path / "here", as_json=True, dry_run=True)
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "tidectl.fetch-plan/1"
    assert {file["name"]: file["bytes"] for file in said["files"]} == {
        name: len(body) for name, body in contents(source).items()
    }
    assert said["left_bytes"] == said["total_bytes"] == visible_bytes(source)
    assert not (tmp_path / "here").exists()
    assert hub.sent_bytes == 0
    bring(tmp_path / "here", dry_run=True)
    seen = capsys.readouterr()
    assert "model-1.safetensors" in seen.out
    assert "to come: " in seen.err


@pytest.mark.parametrize("name", ["model", "a/b/c", "a/b@main", "https://hub/a/b", "a/b\n", "a b/c", ""])
def test_what_is_no_name_of_a_repository_is_a_wrong_call(hub: Hub, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is no repository") as refused:
        run(Options(name, tmp_path), False)
    assert refused.value.exit_code == 2
    assert "--revision" in refused.value.hint


def test_one_fetch_at_a_time(hub: Hub, tmp_path: Path) -> None:
    with _alone(tmp_path), pytest.raises(UnavailableError, match="another fetch"):
        bring(tmp_path)


def test_what_a_fetch_says_at_its_end(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bring(tmp_path, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "tidectl.fetch/1"
    assert said["bytes"] == said["fetched_bytes"] == hub.sent_bytes
    bring(tmp_path)
    assert "as the hub published them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rate", "left", "told"),
    [
        (0.0, 10**9, "nothing comes at the moment"),
        (1e8, 10**9, "100.0 MB/s, 10 s left"),
        (1e8, 10**11, "100.0 MB/s, 17 min left"),
        (1e8, 10**12, "100.0 MB/s, 2.8 h left"),
    ],
)
def test_progress_is_honest(rate: float, left: int, told: str) -> None:
    assert speed(rate, left) == told


# Dense weights alone


def routed(name: str) -> bool:
    return ".mlp.experts." in name


def test_dense_weights_are_the_hub_s_bytes_without_its_experts(hub: Hub, source: Path, tmp_path: Path) -> None:
    bring(tmp_path, dense=True)
    whole, found = Checkpoint.open(source), Checkpoint.open(tmp_path)
    assert sorted(found.tensors) == sorted(name for name in whole.tensors if not routed(name))
    for name, info in found.tensors.items():
        other = whole.tensors[name]
        assert (info.dtype, info.shape) == (other.dtype, other.shape)
        assert body_of(info) == body_of(other), name
    assert found.config == whole.config
    assert not (tmp_path / f"model-{LAYERS}.safetensors").exists()  # which holds experts alone
    experts = sum(info.nbytes for name, info in whole.tensors.items() if routed(name))
    assert hub.sent_bytes < visible_bytes(source) - experts + 20_000  # headers, read to know what is where
    kept = read_manifest(tmp_path)
    assert kept is not None
    assert kept.files["model-0.safetensors"].by == "sha256"  # without experts, so it is the hub's own
    assert kept.files["model-1.safetensors"].by == ""
    assert list(faults(tmp_path, kept)) == []


def body_of(info: Any) -> bytes:
    with info.path.open("rb") as file:
        file.seek(info.offset)
        return file.read(info.nbytes)


def test_dense_weights_come_through_a_hub_that_fails(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(tmp_path / "once", dense=True)
    hub.failures = 0.5
    monkeypatch.setattr(transfer, "REQUEST_BYTES", 1 << 13)
    bring(tmp_path / "again", dense=True)
    assert hub.failed > 5
    assert contents(tmp_path / "again") == contents(tmp_path / "once")


def test_a_dry_run_of_dense_weights_tells_what_is_left_out(
    hub: Hub, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bring(tmp_path / "here", as_json=True, dense=True, dry_run=True)
    said = json.loads(capsys.readouterr().out)
    whole = Checkpoint.open(source)
    experts = sum(info.nbytes for name, info in whole.tensors.items() if routed(name))
    assert abs(said["left_out_bytes"] - experts) < 5_000  # headers


def test_a_repository_without_experts_is_refused(hub: Hub, tmp_path: Path) -> None:
    tensors = {"one.safetensors": {"model.norm.weight": ("U8", [4], b"1234")}}
    hub.repositories[REPO] = write_checkpoint(tmp_path / "plain", tensors, model_type="some")
    with pytest.raises(DataError, match="routed experts"):
        bring(tmp_path / "here", dense=True)
    with pytest.raises(UsageError, match="--dense says itself"):
        bring(tmp_path / "here", dense=True, include=["*"])


def test_an_index_that_its_shards_deny_is_refused_before_hours(hub: Hub, source: Path, tmp_path: Path) -> None:
    other = release(tmp_path / "other")
    index = json.loads((other / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "model-1.safetensors"
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.repositories[REPO] = other
    with pytest.raises(DataError, match="index and shard differ"):
        bring(tmp_path / "here", dense=True)


def test_both_families_name_their_routed_experts_so() -> None:
    from tided.models.deepseek_v41 import names as deepseek

    for name in (*deepseek.routed_expert_names()(3, 5), *deepseek.expert_names("mtp.0", 2)):
        assert wanted.ROUTED.search(name), name
        assert deepseek.part_of(name) in ("experts", "draft experts")
    for name in ("layers.3.ffn.shared_experts.w1.weight", "layers.3.ffn.gate.weight", "mtp.0.norm.weight"):
        assert not wanted.ROUTED.search(name), name
        assert deepseek.part_of(name) in ("dense", "draft")


def test_glm_names_its_routed_experts_so() -> None:
    from tests.bundled import GLM
    from tided.models.glm53.config import read_config
    from tided.models.glm53.names import part_of

    checkpoint = Checkpoint.open(GLM.path)
    part = part_of(read_config(checkpoint.config))
    assert {bool(wanted.ROUTED.search(name)) for name in checkpoint.tensors} == {True, False}
    for name in checkpoint.tensors:
        assert bool(wanted.ROUTED.search(name)) == (part(name) in ("experts", "draft experts")), name


# Ended at any point


def ended(hub: Hub, address: str, to: Path, options: tuple[str, ...], more_bytes: int, by: int) -> int:
    """The exit code of a fetch in a process of its own that got a signal when so many bytes more had come, or came to
    its end before."""
    command = [sys.executable, "-m", "tidectl.main", "fetch", REPO, "--to", str(to), *options]
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_TELEMETRY": "1"}
    enough, deadline = hub.sent_bytes + more_bytes, time.monotonic() + 120
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and (not by or hub.sent_bytes < enough):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if by:
        process.send_signal(by)
    _, said = process.communicate(timeout=60)
    if by == signal.SIGINT:
        assert "this goes on:\n  tidectl fetch" in said, said
    return process.returncode


@pytest.mark.parametrize(
    ("options", "signals"),
    [((), (signal.SIGKILL, signal.SIGINT, signal.SIGKILL)), (("--dense",), (signal.SIGKILL,))],
    ids=["whole", "dense"],
)
def test_ended_at_any_point_it_goes_on(tmp_path: Path, options: tuple[str, ...], signals: tuple[int, ...]) -> None:
    source, here, chance = release(tmp_path / "large", scale=10), tmp_path / "here", random.Random(len(options))
    hub = Hub({REPO: source}, failures=0.05)
    with serving(hub) as address:
        assert ended(hub, address, tmp_path / "once", options, 0, by=0) == 0
        wanted_bytes, hub.sent_bytes = sum(map(len, contents(tmp_path / "once").values())), 0
        hub.bytes_per_s = wanted_bytes // 4
        codes = [
            ended(hub, address, here, options, chance.randrange(wanted_bytes // 20, wanted_bytes // 4), number)
            for number in signals
        ]
        hub.bytes_per_s = 0
        assert ended(hub, address, here, options, 0, by=0) == 0
    assert codes == [130 if number == signal.SIGINT else -number for number in signals]
    assert contents(here) == contents(tmp_path / "once")
    headers = 4 * 8 * 2000 if options else 0  # each plan of dense weights reads them
    # A process that is killed loses what was on its way: a megabyte stands for the sockets' buffers.
    assert hub.sent_bytes < wanted_bytes + headers + 4 * (1 << 20)


# A manifest that is none


@pytest.mark.parametrize("text", [b"", b"{}", b'{"version": 2}', b"\xff", b"[" * 100_000])
def test_a_manifest_that_is_none_says_what_to_do(hub: Hub, tmp_path: Path, text: bytes) -> None:
    (tmp_path / manifest.NAME).write_bytes(text)
    with pytest.raises(DataError, match="delete it"):
        bring(tmp_path)


def test_what_a_hub_says_beside_the_point_is_not_believed() -> None:
    from types import SimpleNamespace as Said

    from packers.hub import _published

    lfs = Said(sha256="../../x")
    files = [Said(rfilename="a", size=3, lfs=lfs, blob_id="x"), Said(rfilename="b", size=None, lfs=None, blob_id=None)]
    assert dict(_published(Said(siblings=files))) == {"a": Published(3)}
    assert dict(_published(Said(siblings=None))) == {}


@pytest.mark.parametrize(("status", "headers"), [(429, {"Retry-After": "\u00b2"}), (503, {"Retry-After": "9" * 5000})])
def test_a_hub_that_says_no_number_of_seconds_is_asked_again(status: int, headers: dict[str, str]) -> None:
    repository = Repository("a/b", COMMIT, {"f": Published(5)})
    with pytest.raises(_Broken) as broken:
        repository._check(SimpleNamespace(status_code=status, headers=headers), "f", 0)
    assert broken.value.wait_s == 0.0


@pytest.mark.parametrize("total", ["\u00b2", "*", "9" * 5000])
def test_a_hub_that_says_no_length_of_a_file_is_believed_about_none(total: str) -> None:
    repository = Repository("a/b", COMMIT, {"f": Published(5)})
    repository._check(SimpleNamespace(status_code=206, headers={"Content-Range": f"bytes 0-4/{total}"}), "f", 0)
    with pytest.raises(DataError, match="6 bytes long, not 5"):
        repository._check(SimpleNamespace(status_code=206, headers={"Content-Range": "bytes 0-4/6"}), "f", 0)
