"""An edit of the model's weights by the profile, over HTTP: two ranks answer as the checkpoint would whose weights hold
it, and ranks that were given other files do not pair."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packers.overlay import Overlay
from tests.bundled import DEEPSEEK, Mini
from tests.daemon.helpers import running, write_profile
from tests.e2e.conftest import ask, get, mini, post
from tests.edits import Edit, edited, settings
from tided.engine.offline import logits
from tided.settings import Settings

pytestmark = pytest.mark.xdist_group("serving")
QUESTION = "Tell me a short story about a fox."  # no answer is certain: an edit shows
TOKENS = 16


@pytest.fixture(scope="module")
def edit(model: Mini, tmp_path_factory: pytest.TempPathFactory) -> Edit:
    return edited(model, tmp_path_factory.mktemp("edit"))


def profile(edit: Edit, file: Path) -> str:
    """Every expert resident: nothing but the weights decides."""
    text = mini(edit.mini, resident=edit.mini.experts)
    return text.replace("[model]", f'[model]\n{edit.key} = "{file}"\nnumerics = "fp32"', 1)


def log_probabilities(of: Settings, prompt: list[int], answered: list[int]) -> torch.Tensor:
    """[tokens of the answer]: of each, behind those before it."""
    rows = torch.log_softmax(logits(of, prompt + answered[:-1])[len(prompt) - 1 :], -1)
    return rows.gather(1, torch.tensor(answered).unsqueeze(1)).squeeze(1)


def test_two_ranks_answer_as_the_edited_checkpoint_would(edit: Edit, tmp_path: Path) -> None:
    with running(profile(edit, edit.file), tmp_path) as pair:
        _, health = asyncio.run(get(pair.url, "/health"))
        status, reply = asyncio.run(post(pair.url, ask(QUESTION, max_tokens=TOKENS, logprobs=True)))
        logs = [pair.log(rank) for rank in (0, 1)]
    sha256 = Overlay.open(edit.file).sha256
    assert health["overlay"] == {"sha256": sha256, "changes": edit.points}
    assert all(f"overlay: {edit.points}" in log and sha256 in log for log in logs)
    assert status == 200, reply
    prompt = edit.mini.ids(QUESTION)
    choice = reply["choices"][0]
    said = edit.mini.tokenizer.encode_text(choice["message"]["content"])
    assert len(said) > 5
    served = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]][: len(said)])
    assert (served - log_probabilities(edit.in_weights(), prompt, said)).abs().max() < 0.005
    assert (served - log_probabilities(settings(edit.stock), prompt, said)).abs().max() > 0.03


def test_ranks_that_were_given_other_files_are_refused_with_both_names(tmp_path: Path) -> None:
    edit = edited(DEEPSEEK, tmp_path / "edit")
    raw = bytearray(edit.file.read_bytes())
    raw[-4] ^= 1
    (tmp_path / "other.safetensors").write_bytes(raw)
    first, _ = write_profile(tmp_path, profile(edit, edit.file))
    (other := tmp_path / "other.toml").write_text(
        first.read_text().replace(str(edit.file), f"{tmp_path}/other.safetensors")
    )
    state = ["--state-dir", str(tmp_path / "state")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tided.daemon", "--profile", str(path), "--rank", str(rank), *state],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, path in enumerate((first, other))
    ]
    words = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [78, 78]
    ours, theirs = (Overlay.open(path).sha256 for path in (edit.file, tmp_path / "other.safetensors"))
    told = f"overlay: rank 0 has {edit.points}, sha256 {ours}, rank 1 has {edit.points}, sha256 {theirs}"
    assert all(told in text for text in words)
