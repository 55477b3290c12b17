"""The commands that need no daemon, and what all commands have in common."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.tidectl.canned import MODEL, Tidectl
from tidectl import logits, profile_commands, profiles, state, waiting
from tidectl.main import app
from tided.errors import NotRunningError, PermissionError_, UnavailableError
from tided.profile import instances
from tided.profile.schema import KEYS

ROOT = Path(__file__).parents[2]
COMMANDS = [
    "start",
    "stop",
    "restart",
    "status",
    "logs",
    "chat",
    "logits",
    "doctor",
    "fetch",
    "pack",
    "synth",
    "render",
    "parse",
    "version",
    "profile",
    "service",
]
HEAVY = ("torch", "numpy", "triton", "aiohttp", "zmq", "tokenizers", "safetensors", "rich", "msgspec")


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment
    )


def test_help_names_every_command_and_exit_code(tidectl: Tidectl) -> None:
    ran = tidectl("--help")
    assert ran.exit_code == 0
    assert all(f"\n  {command} " in ran.stdout for command in COMMANDS)
    assert all(f"\n    {code} " in ran.stdout for code in (0, 1, 2, 3, 4, 65, 69, 70, 77, 78, 130))
    assert tidectl("profile", "-h").exit_code == 0


def test_the_book_names_every_command() -> None:
    shown = [name for name, command in typer.main.get_command(app).commands.items() if not command.hidden]
    [line] = [line for line in (ROOT / "docs" / "commands.md").read_text().splitlines() if "| `tidectl --help`" in line]
    assert sorted(re.findall(r"`(\w+)`", line)) == sorted(shown)


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        yield (*path, name), command
        yield from commands(command, *path, name) if hasattr(command, "commands") else ()


def test_every_option_is_explained_and_every_example_can_be_typed(tidectl: Tidectl) -> None:
    tree = dict(commands(typer.main.get_command(app)))
    examples = re.findall(r"^ +tidectl (.+?)(?:   .*)?$", tidectl("--help").stdout, re.MULTILINE)
    for path, command in tree.items():
        shown = tidectl(*path, "--help").stdout
        assert "range>" not in shown
        assert all(option.help for option in command.params)
        examples += re.findall(r"^    tidectl (.+?)(?:   .*)?$", shown, re.MULTILINE)
    assert len(examples) >= 12
    assert [(example, wrong(example)) for example in examples if wrong(example)] == []


def wrong(example: str) -> str:
    """What is wrong with a call, by the kind of error; empty where its words are understood. Nothing is run."""
    words = shlex.split(re.split(r" [<>|&;] ?", f"{example} ")[0], comments=True)
    command = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command = command.commands[words.pop(0)]
    if {"-h", "--help", "--version"} & {*words}:
        return ""
    try:
        command.make_context("example", words)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer has no public class for a wrong call
            raise
        return type(error).__name__
    return ""


PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "minis/README.md")),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "profiles").glob("*.toml"),
]


def test_every_example_of_the_pages_can_be_typed() -> None:
    """On lines of their own; what stands between backquotes may leave out what a command needs."""
    lines, mentions = [], []
    for page in PAGES:
        text = page.read_text()
        lines += re.findall(r"^(?:# *)?(?: {4})?(?:\S*/)?tidectl (.+)$", text, re.MULTILINE)
        mentions += [re.sub(r"\b[A-Z]\b", "1", one) for one in re.findall(r"`tidectl ([^`\n]+)`", text)]
    assert len(lines) > 30
    assert len(mentions) > 100
    parts = [part for line in lines for part in re.split(r"&& (?:\S*/)?tidectl ", line)]
    assert [(part, wrong(part)) for part in parts if wrong(part)] == []
    absent = ("", "MissingParameter", "BadOptionUsage", "NoArgsIsHelpError")
    assert [(mention, wrong(mention)) for mention in mentions if wrong(mention) not in absent] == []


@pytest.mark.parametrize(
    "example",
    [
        "tide import a.json mini-deepseek --mergge",
        "bench verfy r.json",
        "bench verify r.json --nope",
        "service install --perfix /opt/tidelm",
        "profile chek mini-deepseek",
        "stat",
        "fetch",
    ],
)
def test_an_example_that_cannot_be_typed_is_found(example: str) -> None:
    assert wrong(example)


def test_what_a_command_does_is_not_cut_off_in_a_list(tidectl: Tidectl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first sentence fits a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    groups = [(), *(path for path, command in commands(typer.main.get_command(app)) if hasattr(command, "commands"))]
    assert len(groups) == 5
    for group in groups:
        shown = tidectl(*group, "--help").stdout
        listed = shown.partition("\nCommands:\n")[2].partition("\n\n")[0]
        assert listed
        assert "..." not in listed, listed
        assert max(map(len, listed.splitlines())) <= 80


@pytest.mark.parametrize("command", [[], ["--help"], ["status", "--help"], ["profile", "list"], ["version"]])
def test_nothing_heavy_is_imported_for(command: list[str]) -> None:
    code = (
        "import sys, tidectl.main\n"
        f"sys.argv = ['tidectl', *{command}]\n"
        "try:\n    tidectl.main.main()\nexcept SystemExit:\n    pass\n"
        f"print(*[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    ran = python("-c", code)
    allowed = {"msgspec"} if command == ["profile", "list"] else set()
    loaded = ran.stderr.splitlines()[-1].split() if ran.stderr.strip() else []
    assert set(loaded) <= allowed, ran.stderr


def test_help_costs_little_more_than_python_itself() -> None:
    """Compared with a bare interpreter in the same moment, so that a busy machine does not decide."""

    def best_of(count: int, *arguments: str) -> float:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            assert python(*arguments).returncode == 0
            times.append(time.perf_counter() - began)
        return min(times)

    bare = best_of(5, "-c", "pass")
    assert best_of(5, "-m", "tidectl.main", "--help") < 10 * bare


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["start"],
        ["start", "no-such-profile"],
        ["stop", "--timeout", "x"],
        ["chat", "?", "--url", "ftp://x"],
        ["chat", "?", "--temperature", "3"],
        ["logs", "--rank", "-1"],
        ["logits", "--tokens", "a", "--out", "b"],
        ["logits", "mini-deepseek", "--checkpoint", "c", "--tokens", "a", "--out", "b"],
        ["profile", "check"],
    ],
)
def test_wrong_usage_is_2_and_words_on_stderr(tidectl: Tidectl, arguments: list[str]) -> None:
    ran = tidectl(*arguments)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr
    assert "Traceback" not in ran.stderr


def with_json(group: Any, *path: str) -> list[tuple[str, ...]]:
    return [found for found, command in commands(group, *path) if any(p.name == "json" for p in command.params)]


@pytest.mark.parametrize("path", with_json(typer.main.get_command(app)), ids=" ".join)
def test_with_json_a_mistake_is_one_object_too(tidectl: Tidectl, path: tuple[str, ...]) -> None:
    ran = tidectl(*path, "--nonsense", "--json")
    told = json.loads(ran.stdout)
    assert (told["schema"], set(told["error"])) == ("tidectl.error/1", {"what", "where", "hint", "exit_code"})
    assert (ran.exit_code, told["error"]["exit_code"]) == (2, 2)
    assert told["error"]["what"] in ran.stderr


def test_with_json_a_failure_is_one_object_too(tidectl: Tidectl, tmp_path: Path) -> None:
    ran = tidectl("start", "mini-depseek", "--json")
    assert json.loads(ran.stdout) == {
        "schema": "tidectl.error/1",
        "error": {
            "what": "no profile 'mini-depseek': neither a file nor the name of one",
            "where": "",
            "hint": "did you mean 'mini-deepseek'?",
            "exit_code": 2,
        },
    }
    assert "error: no profile" in ran.stderr
    (tmp_path / "a.toml").write_text("x = 1")
    failed = json.loads(tidectl("restart", str(tmp_path / "a.toml"), "--json").stdout)["error"]
    assert (failed["exit_code"], "a.toml:1:1: error: unknown key 'x'" in failed["what"]) == (78, True)
    assert json.loads(tidectl("stop", "--json").stdout)["error"]["exit_code"] == 3


# profile


def test_profile_check_tells_all_and_says_78(tidectl: Tidectl, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[model]\npaht = 'x'\n")
    ran = tidectl("profile", "check", str(path))
    assert (ran.exit_code, ran.stdout) == (78, "")
    assert f"{path}:2:1: error: unknown key 'model.paht'" in ran.stderr
    assert "did you mean 'path'?" in ran.stderr
    assert ran.stderr.endswith("the checkpoint has not been looked at yet\n")
    found = json.loads(tidectl("profile", "check", str(path), "--json").stdout)
    assert (found["schema"], found["ok"], found["file"]) == ("tidectl.profile-check/1", False, str(path))
    assert {"line": 2, "column": 1, "severity": "error", "suggestion": "did you mean 'path'?"}.items() <= next(
        problem for problem in found["problems"] if "paht" in problem["message"]
    ).items()


@pytest.mark.parametrize("name", ["mini-deepseek", "ds41-mxfp4"])
def test_bundled_profiles_check_clean_by_name(tidectl: Tidectl, name: str) -> None:
    ran = tidectl("profile", "check", name)
    assert ran.exit_code == 0
    assert "a valid profile" in ran.stderr
    assert ": error: " not in ran.stderr
    assert json.loads(tidectl("profile", "check", name, "--json").stdout)["ok"]


def test_notes_do_not_fail_a_check(tidectl: Tidectl) -> None:
    ran = tidectl("profile", "check", "ds41-mxfp4")
    assert "note: " in ran.stderr
    assert "has not been looked at" not in ran.stderr
    assert ran.exit_code == 0


def test_profile_list_and_show(tidectl: Tidectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "SITE_DIR", tmp_path)
    listed = json.loads(tidectl("profile", "list", "--json").stdout)
    assert [row["name"] for row in listed["profiles"]] == [
        "ds41-mxfp4", "glm53-exl3", "mini-deepseek", "mini-glm",
    ]  # fmt: skip
    assert all(row["title"] and Path(row["path"]).is_file() for row in listed["profiles"])
    assert "mini-deepseek\n" in tidectl("profile", "list").stdout
    obstacles = {row["name"]: row["obstacles"] for row in listed["profiles"]}
    assert obstacles["mini-deepseek"] == obstacles["mini-glm"] == []
    shown = json.loads(tidectl("profile", "show", "mini-deepseek", "--json").stdout)
    assert shown["settings"]["experts"]["resident"] == 312
    resident = next(key for key in shown["keys"] if key["key"] == "experts.resident")
    assert (resident["value"], resident["affects"], resident["required"]) == (312, "numbers", True)
    text = tidectl("profile", "show", "mini-deepseek").stdout
    assert "[experts]\nresident = 312\n    Routed experts kept in memory, over all layers.\n" in text
    assert "verify_reads = false (default)" in text


def test_a_broken_profile_hides_no_other(tidectl: Tidectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what comes with TideLM, and of this node's own."""
    monkeypatch.setattr(profiles, "SITE_DIR", tmp_path)
    (tmp_path / "a-broken.toml").write_text("# Mine.\n[model\n")
    (tmp_path / "mine.toml").write_text("# \u202eMine.\n" + (ROOT / "profiles" / "mini-glm.toml").read_text())
    (tmp_path / "wrong.toml").write_text("[model]\npath = 5\n")
    ran = tidectl("profile", "list")
    assert ran.exit_code == 78
    names = ["ds41-mxfp4", "glm53-exl3", "mini-deepseek", "mini-glm", "a-broken", "mine", "wrong"]
    assert [line for line in ran.stdout.splitlines() if not line.startswith(" ")] == names
    assert f"    broken: {tmp_path}/a-broken.toml:2:7: error: " in ran.stdout
    assert "    tidectl profile check a-broken\n" in ran.stdout
    assert "\n    Mine.\n" in ran.stdout
    told = tidectl("profile", "list", "--json")
    rows = {row["name"]: row for row in json.loads(told.stdout)["profiles"]}
    assert (told.exit_code, list(rows)) == (78, names)
    assert [name for name, row in rows.items() if row["error"]] == ["a-broken", "wrong"]
    assert rows["wrong"]["error"]["exit_code"] == 78
    assert "'model.path'" in rows["wrong"]["error"]["what"]
    (tmp_path / "a-broken.toml").unlink()
    (tmp_path / "wrong.toml").unlink()
    assert tidectl("profile", "list").exit_code == 0
    (tmp_path / "closed.toml").mkdir()  # no file: cannot be read, by root neither
    closed = tidectl("profile", "list")
    assert (closed.exit_code, "no profile can be read here" in closed.stdout) == (78, True)


def test_what_keeps_a_listed_profile_from_starting(
    tidectl: Tidectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "BUNDLED_DIR", tmp_path)
    monkeypatch.setattr(profiles, "SITE_DIR", tmp_path / "absent")
    text = "[model]\npath='c'\nserved_name='a'\n[experts]\nresident=1\n[cache]\ncontext_tokens=16\npool_tokens=16\n"
    unbuilt = [key._replace(built=False) for key in KEYS if key.dotted == "tide.max_swaps"]
    monkeypatch.setattr(profile_commands, "KEYS", unbuilt)
    (tmp_path / "p.toml").write_text(f"{text}[tide]\nmax_swaps = 7\n")
    [row] = json.loads(tidectl("profile", "list", "--json").stdout)["profiles"]
    missing = f"there is no checkpoint at {tmp_path / 'c'}"
    assert row["obstacles"] == ["this build does not act on tide.max_swaps", missing]
    assert f"    does not start: {missing}\n" in tidectl("profile", "list").stdout
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "model.safetensors").write_text("")
    (tmp_path / "c" / "config.json").write_text(json.dumps({"model_type": "deepseek_v41", "text_config": MODEL}))
    (tmp_path / "p.toml").write_text(text)
    [row] = json.loads(tidectl("profile", "list", "--json").stdout)["profiles"]
    assert row["obstacles"] == ["'experts.resident' must be 6 to 16 with this checkpoint, not 1"]


def test_a_file_wins_over_a_bundled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert profiles.find("mini-deepseek") == ROOT / "profiles" / "mini-deepseek.toml"
    (tmp_path / "mini-deepseek").write_text("")
    assert profiles.find("mini-deepseek") == Path("mini-deepseek")


def test_a_nodes_own_profile_is_known_by_its_name_as_it_is_to_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert profiles.SITE_DIR == instances.SITE_DIR
    monkeypatch.setattr(profiles, "SITE_DIR", tmp_path)
    for name in ("ours", "mini-glm"):
        (tmp_path / f"{name}.toml").write_text("")
        assert profiles.find(name) == instances.profile_of(name, tmp_path) == tmp_path / f"{name}.toml"
        assert profiles.name_of(str(tmp_path / f"{name}.toml")) == name
    assert profiles.names("our") == ["ours"]
    assert profiles.find("mini-deepseek") == profiles.BUNDLED_DIR / "mini-deepseek.toml"


def test_a_misspelt_name_gets_a_suggestion(tidectl: Tidectl) -> None:
    assert "did you mean 'mini-deepseek'?" in tidectl("start", "mini-depseek").stderr


def test_version(tidectl: Tidectl) -> None:
    found = json.loads(tidectl("version", "--json").stdout)
    assert found["schema"] == "tidectl.version/1"
    assert found["parts"]["torch"]
    assert tidectl("version").stdout.startswith(f"tidelm {found['version']}\n")
    assert tidectl("--version").stdout == f"tidelm {found['version']}\n"


# logits


class Offline(types.ModuleType):
    """Stands in for tided.engine.offline, whose import costs seconds."""

    def __init__(self) -> None:
        super().__init__("tided.engine.offline")
        self.asked: tuple[Any, ...] = ()

    def logits(self, target: Any, ids: list[int], *, progress: Any, **options: Any) -> Any:
        progress("experts", 1, 2)
        self.asked = (target, ids, options)
        return types.SimpleNamespace(shape=(len(ids), 32))

    def write_logits(self, path: Path, values: Any) -> None:
        path.write_text(str(values.shape))


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    path = tmp_path / "c"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "deepseek_v41", "text_config": MODEL}))
    (path / "model.safetensors").write_text("")
    return str(path)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Offline:
    fake = Offline()
    monkeypatch.setitem(sys.modules, "tided.engine.offline", fake)
    import tided.engine

    monkeypatch.setattr(tided.engine, "offline", fake, raising=False)
    return fake


def test_logits_of_a_checkpoint(
    tidectl: Tidectl, tmp_path: Path, checkpoint: str, offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LINE_EVERY_S", 0)
    tokens, out = tmp_path / "ids.json", tmp_path / "x.safetensors"
    tokens.write_text("[3, 1, 2]")
    options = ["--chunk", "2", "--ranks", "2", "--resident", "9", "--decode", "1", "--numerics", "fp32"]
    ran = tidectl("logits", "--checkpoint", checkpoint, "--tokens", str(tokens), "--out", str(out), *options)
    assert (ran.exit_code, ran.stdout) == (0, "")
    assert "experts 1 of 2" in ran.stderr
    assert f"{out}: logits [3 tokens, 32] in fp32" in ran.stderr
    asked = {"chunk": 2, "ranks": 2, "resident": 9, "decode": 1, "numerics": "fp32"}
    assert offline.asked == (Path(checkpoint), [3, 1, 2], asked)
    assert out.read_text() == "(3, 32)"


def test_logits_of_a_profile(tidectl: Tidectl, tmp_path: Path, offline: Offline) -> None:
    tokens, out, profile = tmp_path / "ids.json", tmp_path / "x.safetensors", tmp_path / "p.toml"
    tokens.write_text("[3]")
    profile.write_text(
        "[model]\npath='.'\nserved_name='a'\n[experts]\nresident=1\n[cache]\ncontext_tokens=16\npool_tokens=16"
    )
    arguments = ["logits", str(profile), "--tokens", str(tokens), "--out", str(out)]
    assert tidectl(*arguments).exit_code == 65  # the checkpoint is missing
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    ran = tidectl(*arguments, "--json")
    assert json.loads(ran.stdout) == {
        "schema": "tidectl.logits/1",
        "out": str(out),
        "key": "logits",
        "tokens": 1,
        "vocabulary": 32,
    }
    assert offline.asked[0].model.path == str(tmp_path)
    assert set(offline.asked[2].values()) == {None, 0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{}", "no array of token ids"),
        ("[]", "no array of token ids"),
        ("[1, true]", "element 1 is no token id: true"),
        ("[1.0]", "element 0 is no token id: 1.0"),
        ("[-1]", "element 0 is no token id: -1"),
        ("[" * 100_000, "not JSON"),
        ("[0, 256]", "element 1 is no token id: 256\n  the model's vocabulary has 256 tokens"),
        (str([0] * 65), "65 tokens: the model reaches 64"),
    ],
)
def test_a_token_file_that_is_none(
    tidectl: Tidectl, tmp_path: Path, checkpoint: str, offline: Offline, text: str, words: str
) -> None:
    tokens, out = tmp_path / "ids.json", tmp_path / "x.safetensors"
    tokens.write_text(text)
    ran = tidectl("logits", "--checkpoint", checkpoint, "--tokens", str(tokens), "--out", str(out))
    assert ran.exit_code == 65
    assert f"{tokens}: {words}" in ran.stderr
    assert not out.exists()


def test_logits_refuses_before_it_computes(tidectl: Tidectl, tmp_path: Path, checkpoint: str, offline: Offline) -> None:
    tokens = tmp_path / "ids.json"
    tokens.write_text("[1, 2]")
    common = ["logits", "--checkpoint", checkpoint, "--tokens", str(tokens), "--out"]
    assert tidectl(*common, str(tmp_path / "x"), "--decode", "3").exit_code == 2
    for place, words in (("no/x", "no is no directory"), (".", "is a directory")):
        ran = tidectl(*common, str(tmp_path / place))
        assert (ran.exit_code, words in ran.stderr) == (2, True)
    nowhere = tidectl("logits", "--checkpoint", "/nope", "--tokens", str(tokens), "--out", str(tmp_path / "x"))
    assert (nowhere.exit_code, "there is no checkpoint at /nope\n  --checkpoint" in nowhere.stderr) == (65, True)
    assert offline.asked == ()


def test_a_result_that_cannot_be_written(
    tidectl: Tidectl, tmp_path: Path, checkpoint: str, offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "ids.json"
    tokens.write_text("[1]")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(offline, "write_logits", full)
    ran = tidectl("logits", "--checkpoint", checkpoint, "--tokens", str(tokens), "--out", str(tmp_path / "x"))
    assert ran.exit_code == 69
    assert "No space left on device" in ran.stderr


def test_options_leave_defaults_to_the_engine() -> None:
    assert logits.Options() == (None, None, None, 0, None)


# state directory


def test_the_state_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_STATE_DIR", str(tmp_path / "a" / "b"))
    path = state.state_dir()
    assert path == tmp_path / "a" / "b"
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o755)
    assert state.state_dir().stat().st_mode & 0o777 == 0o700


def test_where_the_state_directory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDE_STATE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(state, "SYSTEM_DIR", tmp_path / "system")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state.state_dir() == tmp_path / "xdg" / "tidelm"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state.state_dir() == tmp_path / ".local" / "state" / "tidelm"
    (tmp_path / "system").mkdir()
    assert state.state_dir() == tmp_path / "system"
    monkeypatch.setattr(state, "_make_private", lambda *_: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert state.state_dir() == tmp_path / ".local" / "state" / "tidelm"


def test_a_shared_directory_is_refused_not_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("TIDE_STATE_DIR", str(shared))
    with pytest.raises(PermissionError_, match="others may use"):
        state.state_dir()
    assert shared.stat().st_mode & 0o7777 == 0o1777


def test_a_file_is_no_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIDE_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(UnavailableError, match="no state directory"):
        state.state_dir()


# ends


def test_an_interrupted_command_exits_with_130(tidectl: Tidectl, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tidectl.about.show", interrupted)
    ran = tidectl("version")
    assert (ran.exit_code, ran.stdout) == (130, "")
    assert "Traceback" not in ran.output
    assert json.loads(tidectl("version", "--json").stdout)["error"]["exit_code"] == 130


def test_no_logs_is_not_running(tidectl: Tidectl, state: Path) -> None:
    assert tidectl("logs").exit_code == NotRunningError.exit_code
