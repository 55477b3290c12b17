"""`tidectl render` and `tidectl parse` on every reference vector, and what they say of bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidectl.canned import Tidectl
from tidectl import profiles
from tided.chat.tokenizer import Tokenizer
from tided.profile import load

GOLDEN = Path(__file__).parents[1] / "golden" / "encodings"


def golden(name: str) -> list:
    data = json.loads((GOLDEN / name).read_text(encoding="utf-8"))
    return [pytest.param({**case, "tools": data.get("tools", [])}, id=case["id"]) for case in data["cases"]]


def rendered(tidectl: Tidectl, body: object, *arguments: str) -> str:
    ran = tidectl("render", *arguments, stdin=json.dumps(body))
    assert ran.exit_code == 0, ran.stderr
    return ran.stdout_bytes.decode()  # `stdout` has line ends translated


@pytest.mark.parametrize("case", golden("deepseek_v41_prompts.json"))
def test_deepseek_prompt(tidectl: Tidectl, case: dict) -> None:
    assert rendered(tidectl, case["request"], "--family", "deepseek-v41") == case["expected"]["prompt"]


@pytest.mark.parametrize("case", golden("glm53_prompts.json"))
def test_glm_prompt(tidectl: Tidectl, case: dict) -> None:
    assert rendered(tidectl, case["request"], "--family", "glm53") == case["expected"]["prompt"]


@pytest.mark.parametrize("case", golden("deepseek_v41_anthropic_prompts.json"))
def test_anthropic_prompt(tidectl: Tidectl, case: dict) -> None:
    arguments = ("--family", "deepseek-v41", "--api", "anthropic")
    assert rendered(tidectl, case["anthropic_body"], *arguments) == case["expected"]["prompt"]


OUTPUTS = [
    pytest.param(family, *param.values, id=param.id)
    for family, name in (("deepseek-v41", "deepseek_v41_outputs.json"), ("glm53", "glm53_outputs.json"))
    for param in golden(name)
]


@pytest.mark.parametrize("chunk", [(), ("--chunk", "1"), ("--chunk", "3")], ids=["whole", "1", "3"])
@pytest.mark.parametrize(("family", "case"), OUTPUTS)
def test_output(tidectl: Tidectl, tmp_path: Path, family: str, case: dict, chunk: tuple[str, ...]) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(case["tools"]))
    tools = ("--tools", str(tmp_path / "tools.json")) if case["tools"] else ()
    options = json.dumps(case["options"])
    ran = tidectl("parse", "--family", family, "--options", options, *tools, *chunk, stdin=case["output_text"])
    assert ran.exit_code == 0, ran.stderr
    expected = case["expected"]
    for call in expected["tool_calls"]:
        call.pop("arguments_text", None)
    assert json.loads(ran.stdout) == expected


def test_an_api_body_is_translated_and_a_template_variable_is_not(tidectl: Tidectl) -> None:
    question = [{"role": "user", "content": "q"}]
    api = rendered(tidectl, {"messages": question, "reasoning_effort": "medium"}, "--family", "glm53")
    template = {"messages": question, "options": {"reasoning_effort": "medium"}}
    assert "Effort: High<" in api
    assert "Effort: Max<" in rendered(tidectl, template, "--family", "glm53")
    body = {"messages": question, "output_config": {"effort": "low"}}
    assert "Effort: Low<" in rendered(tidectl, body, "--family", "glm53", "--api", "anthropic")
    cleared = {"messages": [*question, {"role": "assistant", "content": "a", "reasoning_content": "r"}, *question]}
    assert "<think>r<" in rendered(tidectl, cleared, "--family", "glm53")
    cleared["chat_template_kwargs"] = {"clear_thinking": True}
    assert "<think>r<" not in rendered(tidectl, cleared, "--family", "glm53")


@pytest.mark.parametrize(
    ("arguments", "body", "code", "words"),
    [
        (["render", "--family", "gpt"], "{}", 2, "gpt"),
        (["render"], "{}", 2, "name a profile or a family"),
        (["render", "--family", "glm53", "--ids"], "{}", 2, "needs a profile"),
        (["render", "--family", "glm53"], "{\n x", 65, "stdin:2:2: is not JSON"),
        (["render", "--family", "glm53"], "[1]", 65, "expected a JSON object"),
        (["render", "--family", "glm53"], "[" * 100_000, 65, "nested too deeply"),
        (["render", "--family", "glm53"], "{}", 65, "messages"),
        (["render", "--family", "glm53"], '{"messages": [{"role": "x"}]}', 65, "messages[0].role"),
        (["render", "--family", "glm53"], '{"messages": [{"role": "user"}], "options": {"x": 1}}', 65, "options.x"),
        (["render", "--family", "deepseek-v41", "--api", "anthropic"], '{"messages": 1}', 65, "messages"),
        (["parse", "--family", "glm53", "--options", "{"], "", 65, "--options:1:2"),
        (["parse", "--family", "glm53", "--options", '{"x": 1}'], "", 65, "options.x"),
        (["parse", "--family", "glm53", "--options", '{"stop": [""]}'], "", 65, "stop"),
        (["parse", "--family", "glm53", "--options", '{"backend_finish": "x"}'], "", 65, "backend_finish"),
        (["parse", "--family", "glm53", "--tools", "no-such-file"], "", 65, "no-such-file"),
        (["parse", "--family", "glm53", "--chunk", "0"], "", 2, "chunk"),
    ],
)
def test_bad_input(tidectl: Tidectl, arguments: list[str], body: str, code: int, words: str) -> None:
    ran = tidectl(*arguments, stdin=body)
    assert (ran.exit_code, ran.stdout) == (code, "")
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr


def run(*arguments: str, stdin: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "tidectl.main", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60)


def test_bytes_come_out_as_they_went_in() -> None:
    text = "a\r\nb\u2028é潮🌊\n"
    body = json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False).encode()
    ran = run("render", "--family", "glm53", stdin=body)
    assert ran.stdout.decode().endswith(f"<|user|>{text}<|assistant|><think>")
    ran = run("parse", "--family", "glm53", "--chunk", "1", stdin=f"x</think>{text}".encode())
    assert json.loads(ran.stdout)["content"] == text
    ran = run("parse", "--family", "glm53", stdin=b"a\xff")
    assert (ran.returncode, ran.stdout) == (65, b"")
    assert b"byte 1" in ran.stderr


def test_token_ids_are_those_of_the_prompt(tidectl: Tidectl) -> None:
    body = {"messages": [{"role": "user", "content": "the tide <｜User｜> é潮🌊"}]}
    ran = tidectl("render", "mini-deepseek", "--family", "deepseek-v41", "--ids", stdin=json.dumps(body))
    assert ran.exit_code == 0, ran.stderr
    tokenizer = Tokenizer.open(Path(load(profiles.find("mini-deepseek")).model.path))
    ids = json.loads(ran.stdout)
    assert ids.count(tokenizer.special_id("<｜User｜>")) == 1
    marks = {token_id: spelling for spelling, token_id in tokenizer.special_ids.items()}
    assert tokenizer.decoder(marks).feed(ids) == rendered(tidectl, body, "mini-deepseek", "--family", "deepseek-v41")
    assert "Effort" in rendered(tidectl, body, "--family", "deepseek-v41"), "the profile's default is not to think"
    assert tidectl("render", "mini-deepseek", "--family", "glm53", "--ids", stdin=json.dumps(body)).exit_code == 65


@pytest.mark.parametrize("command", ["render", "parse"])
def test_no_torch(command: str) -> None:
    """Prompts are a matter of text: no tensor library, no server."""
    code = f"import sys, tidectl.{command}; print(*{{'torch', 'numpy', 'aiohttp', 'triton'}} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "", ran.stderr


def test_a_profile_tells_the_family(tidectl: Tidectl, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    named = rendered(tidectl, body, "mini-deepseek", "--family", "deepseek-v41")
    assert rendered(tidectl, body, "mini-deepseek") == named
    assert rendered(tidectl, body, "mini-deepseek", "--family", "glm53") != named  # what is named wins
    profile = tmp_path / "p.toml"
    profile.write_text(
        "[model]\npath='.'\nserved_name='a'\n[experts]\nresident=1\n[cache]\ncontext_tokens=16\npool_tokens=16"
    )
    ran = tidectl("render", str(profile), stdin=json.dumps(body))
    assert (ran.exit_code, "--family" in ran.stderr) == (65, True)
