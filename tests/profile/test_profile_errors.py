"""What a person sees whose profile is wrong: all of it at once, each with its line."""

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from tided.errors import ConfigError, PermissionError_
from tided.profile import check, load, render
from tided.profile.rules import faults_of
from tided.profile.schema import KEYS, SECTIONS, Key, wanted

VALID = """\
[model]
path = "model"
served_name = "mini"

[experts]
resident = 8

[cache]
context_tokens = 64
pool_tokens = 128
"""

SEVERAL = """\
# A profile with several faults.
[model]
path = "model"
served_name = ""
numeric = "fp32"

[experts]
residents = 312
read_threads = "4"

[cache]
context_tokens = 8192
pool_tokens = 4096

[parallel]
ranks = 2
hosts = ["10.0.0.1",
  7]
port = 3

[serve]
host = "0.0.0.0"

[tide]
sensitivity = "hihg"
prior_votes = nan
"""

SEVERAL_REPORT = """\
FILE:4:15: error: 'model.served_name' must be a string that is not empty, not the string ""
 4 | served_name = ""
   |               ^^
   = rule: model.served_name: Name that clients see.

FILE:5:1: error: unknown key 'model.numeric'
 5 | numeric = "fp32"
   | ^^^^^^^
   = rule: [model] has the keys path, served_name, numerics, prefill_chunk_tokens, decoder_replay, dense, overlay, \
ablation, engram_cache_bytes
   = help: did you mean 'numerics'?

FILE:7:2: error: missing key 'experts.resident'
 7 | [experts]
   |  ^^^^^^^
   = rule: experts.resident: Routed experts kept in memory, over all layers.

FILE:8:1: error: unknown key 'experts.residents'
 8 | residents = 312
   | ^^^^^^^^^
   = rule: [experts] has the keys resident, spare_slots, verify_reads, source, pack_dir, read_threads
   = help: did you mean 'resident'?

FILE:9:16: error: 'experts.read_threads' must be an integer from 1 to 256, not the string "4"
 9 | read_threads = "4"
   |                ^^^
   = rule: experts.read_threads: Most expert reads in flight; a start measures how many the disk gains from.

FILE:13:1: error: a pool of 4096 tokens cannot hold one request of 8192 tokens
 13 | pool_tokens = 4096
    | ^^^^^^^^^^^
    = rule: cache.pool_tokens >= cache.context_tokens

FILE:18:3: error: element 2 of 'parallel.hosts' must be a string that is not empty, not the integer 7
 18 |   7]
    |   ^
    = rule: parallel.hosts: One address a rank, rank 0 first; empty: every rank on this machine.

FILE:19:1: error: unknown key 'parallel.port'
 19 | port = 3
    | ^^^^
    = rule: [parallel] has the keys ranks, hosts, control_port, data_port, interface, hca, gid_index, one_shot, \
key_file, heartbeat_s, peer_timeout_s, step_timeout_s, start_timeout_s
    = help: 'port' belongs to [server]

FILE:21:2: error: unknown section 'serve'
 21 | [serve]
    |  ^^^^^
    = rule: the sections are model, experts, cache, tide, engine, parallel, server, vision, memory, audit
    = help: did you mean 'server'?

FILE:25:15: error: 'tide.sensitivity' must be one of "off", "low", "medium", "high", "max", \
or a number from 0 to below 0.5, not the string "hihg"
 25 | sensitivity = "hihg"
    |               ^^^^^^
    = rule: tide.sensitivity: How fast the resident set follows new traffic: half-life of 40, 20, 10 or 5 requests; \
or the newest request's share of all votes, "high" is 0.067. Off: no plans and no aging; a ring still exchanges \
residents for what it read.
    = help: did you mean 'high'?

FILE:26:15: error: 'tide.prior_votes' must be a number from 0 to 1000000, not the number nan
 26 | prior_votes = nan
    |               ^^^
    = rule: tide.prior_votes: Weight of the seed against observed requests.

11 errors"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return tmp_path / "profile.toml"


def written(profile: Path, text: str | bytes) -> Path:
    profile.write_bytes(text if isinstance(text, bytes) else text.encode())
    return profile


def errors(profile: Path) -> list[tuple[int, int, str]]:
    return [(found.line, found.column, found.message) for found in check(profile) if found.severity == "error"]


def test_all_faults_at_once_in_compiler_form(profile: Path) -> None:
    written(profile, SEVERAL)
    assert render(check(profile)).replace(str(profile), "FILE") == SEVERAL_REPORT
    with pytest.raises(ConfigError) as refused:
        load(profile)
    assert str(refused.value).replace(str(profile), "FILE") == SEVERAL_REPORT
    assert refused.value.exit_code == 78


def test_a_syntax_error_names_its_place(profile: Path) -> None:
    written(profile, VALID + "[tide]\nseed = \n")
    assert render(check(profile)).replace(str(profile), "FILE") == (
        "FILE:12:8: error: invalid value\n"
        " 12 | seed =\n"
        "    |        ^\n"
        "    = rule: TOML, see https://toml.io\n\n"
        "1 error"
    )


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("lines", "line", "column"),
    [
        (["[model]", 'path = "a', "[x]"], 2, 10),
        (["a = 1", "a = 2"], 2, 6),
        (["a = [1,", "  2"], 3, 1),
        (["a = 1", "", "b = 'x'y"], 3, 8),
    ],
)
def test_line_ends_do_not_move_a_syntax_error(
    profile: Path, lines: list[str], line: int, column: int, line_end: str
) -> None:
    written(profile, line_end.join(lines) + line_end)
    [(found_line, found_column, _)] = errors(profile)
    # An error behind the last line end is shown at the end of the last line: there is no line 3 of two.
    expected = (line, column) if line <= len(lines) else (len(lines), len(lines[-1]) + 1)
    assert (found_line, min(found_column, len(lines[found_line - 1]) + 1)) == expected


def test_a_number_longer_than_python_reads_is_a_fault_with_its_place(profile: Path) -> None:
    written(profile, f"{VALID}[tide]\nmax_swaps = {'1_0' * 2500}\n")
    [(line, column, message)] = errors(profile)
    assert (line, column, message) == (12, 13, "a number of so many digits")
    with pytest.raises(ConfigError):
        load(profile)


@pytest.mark.parametrize(
    ("section", "name", "most"),
    [
        ("cache", "context_tokens", 1 << 24),
        ("cache", "pool_tokens", 1 << 32),
        ("experts", "resident", 1 << 20),
        ("experts", "spare_slots", 1 << 20),
        ("model", "engram_cache_bytes", 1 << 50),
    ],
)
def test_a_size_has_an_upper_limit(profile: Path, section: str, name: str, most: int) -> None:
    key = SECTIONS[section][name]
    assert list(faults_of(key, most)) == []
    [fault] = faults_of(key, most + 1)
    assert f"to {most}" in fault.message


def test_every_number_has_an_upper_limit() -> None:
    assert [key.dotted for key in KEYS if wanted(key.type).endswith("or more")] == []


def test_nothing_but_missing_keys_in_an_empty_file(profile: Path) -> None:
    written(profile, "")
    assert errors(profile) == [(1, 1, f"missing key '{key.dotted}'") for key in KEYS if key.required]


def test_a_missing_key_points_at_its_section(profile: Path) -> None:
    written(profile, VALID.replace("resident = 8\n", ""))
    assert errors(profile) == [(5, 2, "missing key 'experts.resident'")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tide = 3", "'tide' must be a table"),
        ("[[tide]]", "'tide' must be a table"),
        ("[tide]\nport = 1", "unknown key 'tide.port'"),
        ("port = 1", "unknown key 'port'"),
        ("[tide]\n'a\\b' = 1", "unknown key 'tide.a\\b'"),
        ('[tide]\n"\\u001b[31m" = 1', "unknown key 'tide.\\x1b[31m'"),
        ("tide.seeds.x = 1", "unknown key 'tide.seeds'"),
        ("tide = { seed = { x = 1 } }", "'tide.seed' must be a string, not a table"),
        ("[tide]\nseed = []", "'tide.seed' must be a string, not an empty array"),
        ("[tide]\nrecord = 1", "'tide.record' must be true or false, not the integer 1"),
        ("[tide]\nmax_swaps = true", "'tide.max_swaps' must be an integer from 0 to 1048576, not true"),
        ("[tide]\nmax_swaps = 1.0", "'tide.max_swaps' must be an integer from 0 to 1048576, not the number 1"),
        ("[tide]\nprior_votes = inf", "'tide.prior_votes' must be a number from 0 to 1000000, not the number inf"),
        ("[tide]\nfidelity = 1979-05-27", 'must be one of "fast", "balanced", "exact", not a date or time'),
        ("[parallel]\nheartbeat_s = 0", "'parallel.heartbeat_s' must be a number above 0 to 10, not the integer 0"),
        ("[parallel]\nhosts = 'a'", "must be an array of values, each a string that is not empty, not the string"),
        ('[tide]\nseed = "a\\u0000b"', "'tide.seed' holds a control character"),
        ('[server]\nhost = " 127.0.0.1"', "'server.host' holds a control character, or a blank"),
    ],
)
def test_wrong_shapes_are_named(profile: Path, text: str, message: str) -> None:
    # Keys without a header of their own can only stand before the first one.
    written(profile, f"{VALID}\n{text}\n" if text.startswith("[") else f"{text}\n{VALID}")
    assert message in "\n".join(found for _, _, found in errors(profile))


def edges(key: Key) -> list[Any]:
    """Values just outside what the key's type allows."""
    info = msgspec.inspect.type_info(key.type)
    while isinstance(info, msgspec.inspect.Metadata):
        info = info.type
    match info:
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            outside = [None if info.ge is None else info.ge - 1, info.gt, None if info.le is None else info.le + 1]
            return ["x", *(value for value in outside if value is not None)]
        case msgspec.inspect.LiteralType():
            return ["", "x", 1]
        case msgspec.inspect.BoolType():
            return ["true", 1]
        case msgspec.inspect.StrType():
            return [1, *([""] if info.min_length else [])]
    return [1, [""], [1]]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in KEYS for value in edges(key)], ids=str)
def test_every_key_refuses_what_is_outside_its_type(profile: Path, key: Key, value: Any) -> None:
    lines = [line for line in VALID.splitlines() if not line.startswith(f"{key.name} =")]
    text = msgspec.json.encode(value).decode()
    header = f"[{key.section}]"
    if header in lines:
        lines.insert(lines.index(header) + 1, f"{key.name} = {text}")
    else:
        lines += [header, f"{key.name} = {text}"]
    written(profile, "\n".join(lines))
    named = [(line, message) for line, _, message in errors(profile) if f"'{key.dotted}'" in message]
    assert [lines[line - 1] for line, _ in named] == [f"{key.name} = {text}"], named


def test_every_key_has_words_and_an_effect() -> None:
    assert all(key.text.endswith(".") and key.affects in {"numbers", "node", "policy"} for key in KEYS)


RULES: list[tuple[str, Literal["error", "note"], str]] = [
    ("[parallel]\nranks = 2\nhosts = ['a', 'b', 'c']", "error", "3 hosts for 2 ranks"),
    ("[parallel]\nranks = 2\nhosts = ['127.0.0.1', '10.0.0.2']", "error", "cannot reach a rank at 127.0.0.1"),
    ("[parallel]\nranks = 2\ndata_port = 5711", "error", "port 5711 is the control plane's (5710 and 5711)"),
    ("[server]\nport = 5720\n[parallel]\nranks = 2", "error", "port 5720 is used between the ranks"),
    ("[parallel]\nheartbeat_s = 2\npeer_timeout_s = 3", "error", "dead after 3 s with a heartbeat each 2 s"),
    ("[engine]\nloop_break = 1", "error", "no answer would have a second one"),
    (
        "[memory]\nreserve_bytes = 5\nexit_below_bytes = 6",
        "error",
        "a start may leave 5 bytes free, and ends again below 6",
    ),
    ("[audit]\nidle_s = 5", "error", "but none is remembered"),
    ("[audit]\nidle_s = 5\nremember_tokens = 9\n[tide]\nsync_slots = 0", "error", "no expert could be read"),
    ("[vision]\nrank = 1", "error", "there is no rank 1: there are 1, from 0 on"),
    ("[vision]\nrank = 2\n[parallel]\nranks = 2", "error", "there is no rank 2: there are 2, from 0 on"),
    (
        "[vision]\nurl_hosts = ['a.example', 'https://b.example/x']",
        "error",
        "'https://b.example/x' is no name of a host",
    ),
    ("[vision]\nurl_hosts = ['a.example:443']", "error", "'a.example:443' is no name of a host"),
    ("[parallel]\nkey_file = 'no.key'", "error", "there is no file "),
    ("[server]\napi_keys_file = 'no.txt'", "error", "there is no file "),
    ("[server]\nhost = '0.0.0.0'", "error", "anyone who reaches 0.0.0.0 could ask"),
    ("[server]\nhost = '0.0.0.0'\nallow_open = true", "note", "anyone who reaches 0.0.0.0 may ask"),
]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("source = 'pack'", "experts.pack_dir is empty"),
        ("verify_reads = true", "a checkpoint has no checksums to verify"),
        ("verify_reads = true\npack_dir = 'packs'", "a checkpoint has no checksums to verify"),
    ],
)
def test_combinations_of_packs_that_cannot_work(profile: Path, keys: str, message: str) -> None:
    written(profile, VALID.replace("resident = 8", f"resident = 8\n{keys}"))
    [found] = [problem for problem in check(profile) if problem.severity == "error"]
    assert message in found.message
    assert found.source.strip() in keys


@pytest.mark.parametrize(("text", "severity", "message"), RULES)
def test_combinations_that_cannot_work(profile: Path, text: str, severity: str, message: str) -> None:
    written(profile, f"{VALID}\n{text}\n")
    [found] = [problem for problem in check(profile) if message in problem.message]
    assert found.severity == severity
    # A combination is reported at a key that the person wrote, not at a default's section.
    assert found.source.strip() in text


ALLOWED = [
    "[parallel]\nranks = 2\nhosts = ['127.0.0.1', '127.0.0.1']",
    "[parallel]\nranks = 1\ndata_port = 5711",
    "[server]\nhost = '::1'\nport = 5710",
    "[parallel]\nheartbeat_s = 1.5\npeer_timeout_s = 3",
]


@pytest.mark.parametrize("text", ALLOWED)
def test_combinations_that_work(profile: Path, text: str) -> None:
    written(profile, f"{VALID}\n{text}\n")
    load(profile)
    assert [problem.message for problem in check(profile) if "checkpoint" not in problem.message] == []


def test_one_wrong_key_does_not_hide_a_rule_over_others(profile: Path) -> None:
    text = VALID.replace("resident = 8", "resident = 0").replace("pool_tokens = 128", "pool_tokens = 32")
    written(profile, text)
    assert [line for line, _, _ in errors(profile)] == [6, 10]


def test_text_that_is_not_utf8_is_named_by_place(profile: Path) -> None:
    written(profile, b"[model]\npath = '\xff'\n")
    assert errors(profile) == [(2, 9, "not UTF-8 text")]


def test_a_byte_order_mark_is_no_fault(profile: Path) -> None:
    written(profile, b"\xef\xbb\xbf" + VALID.encode())
    assert load(profile).model.served_name == "mini"


def test_what_is_no_profile_is_refused(profile: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(profile)
    with pytest.raises(ConfigError, match="directory"):
        load(tmp_path)
    written(profile, b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="no profile"):
        load(profile)


def test_deep_nesting_is_a_fault_not_a_crash(profile: Path) -> None:
    written(profile, "a = " + "[" * 5000 + "]" * 5000)
    [(line, column, message)] = errors(profile)
    assert (line, column) == (1, 1)
    assert "nested too deeply" in message


def test_a_closed_profile_is_a_matter_of_permission(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", closed)  # tests may run as root, whom no mode keeps out
    with pytest.raises(PermissionError_):
        load(profile)


def test_nothing_in_a_profile_steers_the_terminal(profile: Path) -> None:
    written(profile, VALID + "[tide]\nseeds = '\u202e'  # \u009b31m\tx\n")
    report = render(check(profile))
    assert all(char.isprintable() or char == "\n" for char in report)


def test_the_caret_stands_under_wide_characters(profile: Path) -> None:
    written(profile, f"{VALID}[parallel]\nhosts = ['日本', 7]\nranks = 2\n")
    shown = render(check(profile)).splitlines()
    caret = next(line for line in shown if "^" in line)
    assert caret.index("^") == len(" 12 | hosts = ['xxxx', ")


def test_a_long_line_is_shown_around_the_fault(profile: Path) -> None:
    hosts = ", ".join(["'10.0.0.1'"] * 63)
    written(profile, f"{VALID}[parallel]\nranks = 64\nhosts = [{hosts}, 7]\n")
    line, caret = render(check(profile)).splitlines()[1:3]
    assert line[caret.index("^")] == "7"
    assert len(line) < 180
