"""Two real ranks of the tiny model, over HTTP: they answer, drain, and fail quickly and cleanly (contract C10)."""

import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tests.daemon.helpers import Stream, health, running, spoken, started, until, write_profile
from tests.daemon.tiny import profile_text
from tidectl import supervisor

CLIENT_SEES_S = 20.0  # silence counts after 3 s, a step that does not end after 60; a busy machine takes its time
PATCHED = (sys.executable, "-m", "tests.daemon.patched_rank")


def fails(tmp_path, rank, words):
    (tmp_path / "state").mkdir(mode=0o700, exist_ok=True)
    (tmp_path / "state" / f"failure-{rank}").write_text(words)


def test_an_answer_is_finished_before_an_orderly_stop(checkpoint, tmp_path):
    with running(profile_text(checkpoint), tmp_path, drain_s=60) as pair:  # as long as a busy machine needs
        served = health(pair.url)[1]
        assert served["status"] == "ok"
        assert served["engine_config"]["data_plane"]["sum_us"] > 0, "how fast the ranks add is not told"
        stream = Stream(pair.url, max_tokens=8)
        stream.first_words()
        pair.handle.process.send_signal(signal.SIGTERM)
        *events, done = stream.events()
        assert done == "[DONE]"
        assert any(event["choices"] and event["choices"][0]["finish_reason"] for event in events)
        last = pair.ended()
        assert last.first is None
        assert [rank.exit_code for rank in last.ranks] == [0, 0]
        assert [pair.state(rank).phase for rank in (0, 1)] == ["stopped", "stopped"]
        assert "hello" not in pair.log(0) + pair.log(1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_when_a_follower_dies_or_hangs_the_client_is_told_and_a_new_start_works(checkpoint, tmp_path, number):
    text = profile_text(checkpoint)
    with running(text, tmp_path) as pair:
        stream = Stream(pair.url, max_tokens=900)
        stream.first_words()
        pair.kill(1, number)
        began_s = time.monotonic()
        events = list(stream.events())
        assert time.monotonic() - began_s < CLIENT_SEES_S
        *_, failure, done = events
        assert done == "[DONE]"
        assert "rank" in failure["error"]["message"]
        assert failure["error"]["type"] == "server_error"
        assert health(pair.url) is None or health(pair.url)[0] == 503
        last = pair.ended()
        assert {rank.rank: rank.exit_code for rank in last.ranks} == {0: 70, 1: 137}
        assert "rank" in pair.state(0).message
        assert pair.state(0).exit_code == 70
        if number == signal.SIGSTOP:
            return
        with started(pair.profile, pair.state_dir) as again:
            again.handle.wait_ready(60)
            assert Stream(pair.url, max_tokens=2).first_words()


@pytest.mark.parametrize("victim", [1])
def test_a_node_whose_memory_runs_out_ends_both_ranks_before_it_freezes(checkpoint, tmp_path, victim):
    free = tmp_path / "free"
    free.write_text("9000000000")
    fails(tmp_path, victim, f"memory 0 {free}")
    text = profile_text(checkpoint) + "\n[memory]\nexit_after_s = 0.5\n"
    with running(text, tmp_path, program=PATCHED) as pair:
        stream = Stream(pair.url, max_tokens=900)
        stream.first_words()
        free.write_text("100000000")
        *_, failure, done = stream.events()
        assert done == "[DONE]"
        assert f"the memory of rank {victim}'s node runs out: 0.10 GB are free" in failure["error"]["message"]
        last = pair.ended()
        assert {rank.rank: rank.exit_code for rank in last.ranks} == {victim: 69, 1 - victim: 70}
        assert "runs out" in pair.state(0).message
        assert "runs out" in pair.state(1).message


@pytest.mark.parametrize("victim", [0, 1])
def test_when_an_engine_hangs_while_its_loop_beats_on_the_client_is_told(checkpoint, tmp_path, victim):
    fails(tmp_path, victim, "hang 12")
    with running(profile_text(checkpoint), tmp_path, program=PATCHED, step_timeout_s=1.0) as pair:
        stream = Stream(pair.url, max_tokens=900)
        stream.first_words()
        *_, failure, done = stream.events()
        assert done == "[DONE]"
        assert "engine makes no step since" in failure["error"]["message"]
        last = pair.ended()
        assert {rank.rank: rank.exit_code for rank in last.ranks} == {0: 70, 1: 70}
        assert "engine makes no step" in pair.state(1).message
        assert "in fail" in pair.log(victim)  # where the engine stood


@pytest.mark.parametrize("victim", [0, 1])
def test_an_engine_that_fails_is_told_of_in_its_own_words_long_before_silence_counts(checkpoint, tmp_path, victim):
    fails(tmp_path, victim, "raise 12 the disk is gone")
    with running(profile_text(checkpoint), tmp_path, program=PATCHED, peer_timeout_s=60) as pair:
        began_s = time.monotonic()
        *_, failure, done = Stream(pair.url, max_tokens=900).events()
        assert done == "[DONE]"
        assert "step 12 failed: OSError: the disk is gone" in failure["error"]["message"]
        assert "/secret" not in str(failure)
        last = pair.ended()
        assert time.monotonic() - began_s < 30
        assert {rank.rank: rank.exit_code for rank in last.ranks} == {0: 70, 1: 70}
        assert f"rank {victim} ended: step 12 failed: OSError: the disk is gone" in pair.state(1 - victim).message
        assert "/secret" not in pair.state(1 - victim).message
        assert "/secret/x" in pair.log(victim)  # whose machine it is finds it there


@pytest.mark.parametrize("asked", [0, 1, None])
def test_a_stop_while_ranks_load_is_no_failure_of_any(checkpoint, tmp_path, asked):
    fails(tmp_path, 0, "load 0"), fails(tmp_path, 1, "load 0")
    profile, port = write_profile(tmp_path, profile_text(checkpoint), peer_timeout_s=60)
    with started(profile, tmp_path / "state", port, PATCHED) as pair:
        until(lambda: all((state := pair.state(rank)) and state.message == "model" for rank in (0, 1)), 60)
        if asked is None:
            pair.handle.process.send_signal(signal.SIGTERM)
        else:
            pair.kill(asked, signal.SIGTERM)
        assert [(rank.exit_code, rank.message) for rank in pair.ended().ranks] == [(0, ""), (0, "")]
        assert [pair.state(rank).phase for rank in (0, 1)] == ["stopped", "stopped"]


def test_when_rank_0_dies_the_others_end(checkpoint, tmp_path):
    with running(profile_text(checkpoint), tmp_path) as pair:
        stream = Stream(pair.url, max_tokens=900)
        stream.first_words()
        pair.kill(0, signal.SIGKILL)
        with suppress(OSError):  # the connection breaks: nobody is left to send an event
            assert "[DONE]" not in list(stream.events())
        last = pair.ended()
        assert last.first == 0
        assert {rank.rank: rank.exit_code for rank in last.ranks} == {0: 137, 1: 70}


def test_one_rank_alone_serves_and_says_so_while_it_loads(checkpoint, tmp_path):
    profile, port = write_profile(tmp_path, profile_text(checkpoint), ranks=1)
    with started(profile, tmp_path / "state", port) as single:
        status, body = until(lambda: health(single.url), 60)  # the port answers before the model is there
        assert (status, body["status"]) == (503, "loading")
        single.handle.wait_ready(60)
        events = list(Stream(single.url, max_tokens=4).events())
        assert "".join(spoken(event) for event in events[:-1] if event["choices"])
        supervisor.stop(single.state_dir, 20)


def test_ranks_with_different_settings_are_refused_with_both_values(checkpoint, tmp_path):
    profile, _ = write_profile(tmp_path, profile_text(checkpoint))
    other = tmp_path / "other.toml"
    other.write_text(profile.read_text().replace("prefill_chunk_tokens = 32", "prefill_chunk_tokens = 64"))
    state = ["--state-dir", str(tmp_path / "state")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tided.daemon", "--profile", str(path), "--rank", str(rank), *state],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, path in enumerate((profile, other))
    ]
    words = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [78, 78]
    for text in words:
        assert "model.prefill_chunk_tokens: rank 0 has 32, rank 1 has 64" in text
