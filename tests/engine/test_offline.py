"""Teacher-forced logits, held against recorded ones, over one rank and over processes."""

import json
import os
import shutil

import pytest
import torch
from real_pair import GOLDEN
from safetensors import safe_open
from safetensors.torch import load_file

from tided.engine import local_ranks
from tided.engine.offline import logits, settings_of, write_logits
from tided.errors import ConfigError, DataError, PairError, TensorError, UsageError

INPUTS = json.loads((GOLDEN / "inputs.json").read_text())
IDS = INPUTS["prompt_ids"] + INPUTS["decode_input_ids"]
STEPS = len(INPUTS["decode_input_ids"])
UNTIED_ROWS = 22  # from there on a tie at the top-k border may fall either way


@pytest.fixture(scope="module")
def expected():
    with safe_open(GOLDEN / "expected_fp32.safetensors", "pt") as file:
        decode = torch.stack([file.get_tensor(f"decode.{step}.logits").flatten() for step in range(STEPS)])
        return file.get_tensor("prefill.logits"), decode


@pytest.mark.parametrize("options", [{}, {"chunk": 7}, {"ranks": 2, "chunk": 64}], ids=["1 rank", "chunks", "2 ranks"])
def test_logits_are_those_recorded(expected, options):
    values = logits(GOLDEN, IDS, decode=STEPS, numerics="fp32", timeout_s=120, **options)
    assert (values.dtype, values.shape) == (torch.float32, (len(IDS), 512))
    prefill, decode = expected
    assert len(prefill) == len(IDS) - STEPS
    torch.testing.assert_close(values[:UNTIED_ROWS], prefill[:UNTIED_ROWS], atol=2e-4, rtol=0)
    torch.testing.assert_close(values[-STEPS:], decode, atol=2e-4, rtol=0)


def test_absent_experts_change_logits_the_same_way_every_time():
    few = [logits(GOLDEN, IDS[:20], resident=40, numerics="fp32") for _ in range(2)]
    assert torch.equal(*few)
    assert (few[0] - logits(GOLDEN, IDS[:20], numerics="fp32")).abs().max() > 0.1


def test_all_tokens_may_be_decoded():
    one_by_one, at_once = (logits(GOLDEN, IDS[:9], decode=decode, numerics="fp32") for decode in (9, 0))
    torch.testing.assert_close(one_by_one, at_once, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"token_ids": []}, UsageError, "no token"),
        ({"token_ids": [1, 512]}, UsageError, "token 1 is 512; this model's vocabulary has 512"),
        ({"decode": 4}, UsageError, "4 tokens to decode of only 3"),
        ({"chunk": 0}, UsageError, "'model.prefill_chunk_tokens' must be an integer from 1 to 8192"),
        ({"chunk": 10_000}, UsageError, "'model.prefill_chunk_tokens' must be an integer from 1 to 8192"),
        ({"chunk": 10_000, "ranks": 2}, UsageError, "'model.prefill_chunk_tokens' must be an integer from 1 to 8192"),
        ({"ranks": 0}, UsageError, "'parallel.ranks' must be an integer from 1 to 64, not the integer 0"),
        ({"resident": 0}, ConfigError, "experts.resident = 0: this model needs 30 to 80"),
        ({"resident": 81}, ConfigError, "experts.resident = 81: this model needs 30 to 80"),
        ({"token_ids": [1] * 1025}, ConfigError, "cache.context_tokens = 1025: this model reaches 1024"),
        ({"ranks": 3}, ConfigError, "cannot be cut over 3 ranks"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(options, error, match):
    with pytest.raises(error, match=match):
        logits(GOLDEN, **({"token_ids": [1, 2, 3]} | options))


def test_a_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(DataError, match="no such directory"):
        logits(tmp_path / "nothing", [1])


def test_a_ranks_own_error_comes_back_with_its_kind(tmp_path):
    broken = tmp_path / "model"
    shutil.copytree(GOLDEN, broken)
    (shard,) = [p for p in broken.glob("model-*") if "layers.3.ffn.experts.0.w1.weight" in load_names(p)]
    with shard.open("r+b") as file:
        rename_tensor(file, b"layers.3.ffn.experts.0.w1.weight", b"layers.3.ffn.experts.0.w9.weight")
    index = broken / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("layers.3.ffn.experts.0.w1.weight", "layers.3.ffn.experts.0.w9.weight"))
    with pytest.raises((TensorError, DataError), match=r"experts\.0\.w1\.weight"):
        logits(broken, IDS[:3], ranks=2, timeout_s=120)


def load_names(path) -> list[str]:
    return list(load_file(path))


def rename_tensor(file, old: bytes, new: bytes) -> None:
    header = file.read()
    file.seek(header.index(old))
    file.write(new)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    out = tmp_path / "out.safetensors"
    write_logits(out, torch.ones(2, 3))
    assert torch.equal(load_file(out)["logits"], torch.ones(2, 3))
    with pytest.raises(OSError, match=r".*"):
        write_logits(tmp_path / "missing" / "out.safetensors", torch.ones(1))
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


def test_settings_of_a_checkpoint_keep_every_expert():
    assert settings_of(GOLDEN).experts.resident == 80


# Processes


def start(tmp_path, script: str, ranks: int = 2, timeout_s: float = 60) -> None:
    (tmp_path / "rank_script.py").write_text(f"import sys\nfolder, rank = sys.argv[1], int(sys.argv[2])\n{script}")
    local_ranks.run_ranks(["-m", "rank_script"], tmp_path, ranks, timeout_s)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_ranks_that_end_well(here):
    start(here, "open(f'{folder}/done-{rank}', 'w').close()")
    assert {path.name for path in here.glob("done-*")} == {"done-0", "done-1"}


def test_the_rank_with_a_reason_is_quoted_and_the_other_is_ended(here):
    hang = "import os, time; open(f'{folder}/pid', 'w').write(str(os.getpid())); time.sleep(600)"
    wait = "import os, time\n  while not os.path.exists(f'{folder}/pid'): time.sleep(0.01)"
    with pytest.raises(DataError, match="rank 1: it is broken"):
        start(here, f"if rank == 0:\n  {hang}\nelse:\n  {wait}\n  print('it is broken'); sys.exit(65)")
    with pytest.raises(ProcessLookupError):
        os.kill(int((here / "pid").read_text()), 0)


def test_ranks_that_do_not_end(here):
    with pytest.raises(PairError, match="rank 0, rank 1 did not end in time"):
        start(here, "import time; time.sleep(600)", timeout_s=0.3)


def test_a_rank_that_dies_without_a_word(here):
    with pytest.raises(PairError, match="ended with code -9"):
        start(here, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", ranks=1)
