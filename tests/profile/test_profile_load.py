"""From a valid profile to settings, and what a start refuses although the profile is valid."""

import json
import shlex
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packers.manifest import NAME, Manifest, write_manifest
from tided.errors import ConfigError, DataError
from tided.profile import check, load, load_for_start, loader, start
from tided.profile.checkpoint_files import INDEX, fetch_command
from tided.profile.reading import Reading, read
from tided.profile.schema import KEYS, SECTIONS, value_of
from tided.profile.start import refuse_missing, refuse_unread

ROOT = Path(__file__).parents[2]
BUNDLED = sorted((ROOT / "profiles").glob("*.toml"))
MINI = ROOT / "profiles" / "mini-deepseek.toml"
LARGE = ROOT / "profiles" / "ds41-mxfp4.toml"
GLM = LARGE.with_name("glm53-exl3.toml")

VALID = """\
[model]
path = "models/a"
served_name = "mini"
[experts]
resident = 8
[cache]
context_tokens = 64
pool_tokens = 128
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "profile.toml"
    path.parent.mkdir()
    path.write_text(VALID)
    return path


SHARDS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    for name in SHARDS:
        (directory / name).write_bytes(b"")
    (directory / INDEX).write_text(json.dumps({"weight_map": {f"{name}.weight": name for name in SHARDS}}))
    return directory


def test_what_is_not_written_has_its_default(profile: Path) -> None:
    found = load(profile)
    assert (found.model.served_name, found.experts.resident, found.cache.pool_tokens) == ("mini", 8, 128)
    written = {"path", "served_name", "resident", "context_tokens", "pool_tokens"}
    assert all(value_of(found, key) == key.default for key in KEYS if key.name not in written)


def test_paths_are_relative_to_the_profile(profile: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k\n")
    profile.write_text(f'{VALID}[tide]\nseed = "seed.json"\n[server]\napi_keys_file = "../keys"\n')
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.chdir(tmp_path)
    for name in (profile, profile.relative_to(tmp_path), str(profile)):
        found = load(name)
        assert found.model.path == str(tmp_path / "deep" / "models" / "a")
        assert found.tide.seed == str(tmp_path / "deep" / "seed.json")
        assert found.server.api_keys_file == str(tmp_path / "keys")
        assert found.parallel.key_file == ""
    profile.write_text(VALID.replace("models/a", "~/a"))
    assert load(profile).model.path == "/home/someone/a"
    profile.write_text(VALID.replace("models/a", "/srv/a"))
    assert load(profile).model.path == "/srv/a"


@pytest.mark.parametrize("path", ["~no-such-user/a", "x" * 300, "y/" * 3000])
def test_a_path_that_cannot_be_is_a_fault_not_a_crash(profile: Path, path: str) -> None:
    profile.write_text(
        f"{VALID}[tide]\nseed = {path!r}\n[server]\napi_keys_file = {path!r}\n".replace("models/a", path)
    )
    [error] = [problem for problem in check(profile) if problem.severity == "error"]
    assert "there is no file" in error.message
    profile.write_text(f"{VALID}[tide]\nseed = {path!r}\n".replace("models/a", path))
    assert [problem.line for problem in check(profile)] == [2, 10]


def test_a_link_to_a_checkpoint_keeps_its_name(profile: Path) -> None:
    (profile.parent / "models").mkdir()
    (profile.parent / "models" / "a").symlink_to("/nowhere")
    assert load(profile).model.path == str(profile.parent / "models" / "a")


def test_arrays_become_tuples(profile: Path) -> None:
    profile.write_text(f"{VALID}[parallel]\nranks = 2\nhosts = ['10.0.0.1', '10.0.0.2']\n")
    assert load(profile).parallel.hosts == ("10.0.0.1", "10.0.0.2")


@pytest.fixture
def draft_unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting is acted on by now: one for which this is not so."""
    keys = [key._replace(built=key.dotted != "engine.draft") for key in KEYS]
    monkeypatch.setattr(start, "KEYS", keys)


@pytest.mark.usefixtures("draft_unbuilt")
def test_a_setting_that_nothing_reads_is_refused_at_a_start_only(profile: Path) -> None:
    profile.write_text(f'{VALID}[engine]\n# why\ndraft = "confidence"\n[tide]\nhot_ring_slots = 0\n')
    found = load(profile)
    notes = [problem for problem in check(profile) if "does not act" in problem.message]
    assert [(note.severity, note.line) for note in notes] == [("note", 11)]
    with pytest.raises(ConfigError) as refused:
        refuse_unread(found, read(profile))
    assert f"{profile}:11:1: error: this build does not act on 'engine.draft'" in str(refused.value)
    assert 'set it to its default: "off"' in str(refused.value)
    assert "hot_ring_slots" not in str(refused.value)  # written, but with its default
    profile.write_text(VALID)
    refuse_unread(load(profile), read(profile))


def test_a_missing_checkpoint_or_seed_is_refused_with_its_path(profile: Path) -> None:
    profile.write_text(f'{VALID}[tide]\nseed = "seed.json"\n')
    with pytest.raises(DataError) as refused:
        refuse_missing(load(profile), read(profile))
    assert refused.value.exit_code == 65
    assert f"{profile}:2:1: error: there is no checkpoint at {profile.parent / 'models' / 'a'}" in str(refused.value)
    assert f"{profile}:10:1: error: there is no demand seed at {profile.parent / 'seed.json'}" in str(refused.value)
    assert [problem.severity for problem in check(profile)] == ["note", "note"]
    checkpoint(profile.parent / "models" / "a")
    (profile.parent / "seed.json").write_text("{}")
    refuse_missing(load(profile), read(profile))
    assert check(profile) == []


def test_missing_packs_are_refused_with_the_command_that_makes_them(profile: Path) -> None:
    checkpoint(profile.parent / "models" / "a")
    profile.write_text(VALID.replace("[experts]", "[experts]\nsource = 'pack'\npack_dir = 'packs'"))
    packs = profile.parent / "packs"
    for found in (f"{packs} cannot be read as a directory of packs", f"there is no pack of experts in {packs}"):
        with pytest.raises(DataError) as refused:
            refuse_missing(load(profile), read(profile))
        assert found in str(refused.value)
        assert f"tidectl pack {profile}" in str(refused.value)
        packs.mkdir(exist_ok=True)
    (packs / "experts-rank-0-of-2.mxfp4").write_bytes(b"")
    refuse_missing(load(profile), read(profile))


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        (("config.json",), "has no config.json"),
        ((INDEX,), f"has no {INDEX}, and no model.safetensors"),
        (SHARDS[1:2], f"has no {SHARDS[1]}, which its {INDEX} names"),
        (SHARDS, f"has no {SHARDS[0]} and 2 more, which its {INDEX} names"),
    ],
)
def test_what_a_directory_lacks_to_be_a_checkpoint_is_told_by_name(
    profile: Path, gone: tuple[str, ...], message: str
) -> None:
    directory = checkpoint(profile.parent / "models" / "a")
    refuse_missing(load(profile), read(profile))
    for name in gone:
        (directory / name).unlink()
    with pytest.raises(DataError) as refused:
        refuse_missing(load(profile), read(profile))
    assert f"{profile}:2:1: error: {directory} {message}\n" in str(refused.value)
    assert f"help: tidectl fetch REPOSITORY --to {directory}, or set model.path" in str(refused.value)
    [note] = check(profile)
    assert (note.severity, note.message) == ("note", f"{directory} {message}")


def test_a_checkpoint_in_one_file_needs_no_index(profile: Path) -> None:
    directory = checkpoint(profile.parent / "models" / "a")
    (directory / INDEX).unlink()
    (directory / "model.safetensors").write_bytes(b"")
    refuse_missing(load(profile), read(profile))


def test_a_damaged_index_is_told(profile: Path) -> None:
    directory = checkpoint(profile.parent / "models" / "a")
    for content in (b"{", b"{}", b"\xff", b'{"weight_map": {"a": 1}}', b"[" * 100_000):
        (directory / INDEX).write_bytes(content)
        with pytest.raises(DataError, match=f"{INDEX} is not what a checkpoint holds"):
            refuse_missing(load(profile), read(profile))


def test_the_command_that_fetches_is_one_that_a_shell_reads_as_it_is_meant(tmp_path: Path) -> None:
    command = fetch_command(tmp_path / "my models; true", "--dense")
    assert shlex.split(command) == ["tidectl", "fetch", "REPOSITORY", "--dense", "--to", f"{tmp_path}/my models; true"]
    assert command.endswith("/my models; true'")


def test_a_fetch_that_was_ended_is_told_with_the_command_that_goes_on(profile: Path) -> None:
    """Of the repository that the directory began with; what else stands there is not believed."""
    directory = checkpoint(profile.parent / "models" / "a")
    dense = checkpoint(profile.parent / "models" / "dense")
    profile.write_text(VALID.replace("[experts]", "dense = 'models/dense'\n[experts]"))
    for path in (directory, dense):
        (path / SHARDS[0]).unlink()
        write_manifest(path, Manifest("zai-org/GLM-5.3", "c" * 40))
    whole, other = check(profile)
    assert whole.suggestion.startswith(f"tidectl fetch zai-org/GLM-5.3 --to {directory}, or set model.path")
    assert other.suggestion.startswith(f"tidectl fetch zai-org/GLM-5.3 --dense --to {dense}; or set model.dense")
    for said in ("zai-org/GLM-5.3; rm -rf /", "\x1b[2J/a", "a"):
        (directory / NAME).write_text(json.dumps({"repository": said}))
        assert check(profile)[0].suggestion.startswith(f"tidectl fetch REPOSITORY --to {directory}")


def test_a_shard_s_name_does_not_steer_the_terminal(profile: Path) -> None:
    directory = checkpoint(profile.parent / "models" / "a")
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": "\x1b[2J" + "x" * 300}}))
    [note] = check(profile)
    assert "\x1b" not in note.message
    assert len(note.message) < len(str(directory)) + 300


def test_a_file_is_no_checkpoint(profile: Path) -> None:
    (profile.parent / "models").mkdir()
    (profile.parent / "models" / "a").write_text("x")
    with pytest.raises(DataError, match="Not a directory"):
        refuse_missing(load(profile), read(profile))


@pytest.mark.usefixtures("draft_unbuilt")
def test_a_start_reads_its_profile_once(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its checks judge one text, though another is written meanwhile."""
    checkpoint(profile.parent / "models" / "a")
    profile.write_text(VALID)

    def read_then_replaced(path: Path) -> Reading:
        found = read(path)
        path.write_text(f'{VALID}[engine]\ndraft = "confidence"\n')
        return found

    monkeypatch.setattr(loader, "read", read_then_replaced)
    assert load_for_start(profile).engine.draft == "off"
    with pytest.raises(ConfigError, match=r"does not act on 'engine\.draft'"):
        load_for_start(profile)


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
def test_bundled_profiles_have_no_error(path: Path) -> None:
    assert [problem for problem in check(path) if problem.severity == "error"] == []


def test_the_mini_profile_asks_for_nothing_unbuilt() -> None:
    refuse_unread(load(MINI), read(MINI))
    found = load(MINI)
    assert (found.parallel.ranks, found.cache.context_tokens, found.cache.pool_tokens) == (2, 4096, 8192)
    assert found.model.path == str(ROOT / "minis" / "deepseek")


def test_the_large_profile_is_the_one_it_promises() -> None:
    found = load(LARGE)
    assert (found.experts.resident, found.tide.hot_ring_slots, found.engine.lanes) == (10_000, 64, 2)
    assert (found.cache.context_tokens, found.cache.pool_tokens) == (1 << 20, 3 << 19)
    assert found.cache.prefix_ram_bytes
    assert found.cache.prefix_disk_bytes
    assert (found.engine.device, found.engine.draft, found.parallel.ranks) == ("cuda", "confidence", 2)
    assert found.parallel.interface
    assert len(found.parallel.hosts) == 2


def test_the_profile_of_the_second_model_is_the_one_it_promises() -> None:
    found = load(GLM)
    assert (found.experts.resident, found.experts.source, found.engine.lanes) == (12_968, "pack", 2)
    assert (found.cache.pool_tokens, found.cache.dtype, found.cache.split) == (320 << 10, "fp8", True)
    tide = found.tide
    assert (tide.fidelity, tide.sync_weight, tide.sync_reads, tide.sync_slots) == ("balanced", 0.2, 16, 32)
    assert found.engine.loop_break == 12
    assert found.model.dense != found.model.path


@pytest.mark.parametrize("path", [LARGE, GLM], ids=lambda path: path.stem)
def test_a_large_profile_is_complete(path: Path) -> None:
    text = path.read_text()
    written = {(section, name) for section in SECTIONS for name in keys_written(text, section)}
    assert written == {(key.section, key.name) for key in KEYS}


def keys_written(text: str, section: str) -> set[str]:
    lines = text.split(f"\n[{section}]\n")[1].split("\n[")[0].splitlines()
    return {line.split(" = ")[0] for line in lines if " = " in line and not line.startswith("#")}


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
def test_every_key_of_a_bundled_profile_is_commented(path: Path) -> None:
    """Each key has a comment above it; a key directly below another may share that one's."""
    bare, commented = [], False
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            commented = True
        elif " = " in line and not commented:
            bare.append(line)
        elif not line or line.startswith("["):
            commented = False
    assert bare == []


def test_an_uncommented_key_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "bare.toml"
    path.write_text("# The profile.\n\n[model]\npath = 'a'\n")
    with pytest.raises(AssertionError):
        test_every_key_of_a_bundled_profile_is_commented(path)


TOKENS = st.sampled_from(
    [
        "[",
        "]",
        "=",
        '"',
        "'",
        '"""',
        "\n",
        "#",
        ",",
        ".",
        "{",
        "}",
        "-1",
        "1e9",
        "nan",
        "true",
        "\\",
        "\r",
        "\u00e4",
        " ",
    ]
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A bundled profile after a few cuts, insertions, repetitions and exchanges."""
    text = draw(st.sampled_from([path.read_text() for path in BUNDLED]))
    for _ in range(draw(st.integers(1, 5))):
        lines = text.split("\n")
        at, other = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines) - 1))
        column = draw(st.integers(0, len(lines[at])))
        match draw(st.sampled_from(["insert", "cut", "repeat", "swap", "value", "delete"])):
            case "insert":
                lines[at] = lines[at][:column] + draw(TOKENS | st.text(max_size=3)) + lines[at][column:]
            case "cut":
                lines[at] = lines[at][:column]
            case "repeat":
                lines.insert(other, lines[at])
            case "swap":
                lines[at], lines[other] = lines[other], lines[at]
            case "value":
                lines[at] = lines[at].split(" = ")[0] + " = " + draw(TOKENS)
            case "delete":
                del lines[at:other]
        text = "\n".join(lines)
    return text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(mutated())
def test_no_text_crashes_the_loader_and_every_fault_has_a_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mutated.toml"
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    problems = check(path)
    lines = text.split("\n")
    for problem in problems:
        assert 1 <= problem.line <= len(lines)
        assert problem.source == lines[problem.line - 1].removesuffix("\r") or "�" in problem.source
        assert 1 <= problem.column <= len(lines[problem.line - 1]) + 1
        assert problem.render().startswith(f"{path}:{problem.line}:{problem.column}: {problem.severity}: ")
    if any(problem.severity == "error" for problem in problems):
        with pytest.raises(ConfigError):
            load(path)
    else:
        found = load(path)
        assert msgspec.convert(msgspec.to_builtins(found), type(found)) == found


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_crash_the_loader(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.toml"
    path.write_bytes(data)
    assert all(problem.line >= 1 for problem in check(path))
