"""What is shown of the experts follows every change, and agrees with the residents themselves."""

import random

import numpy as np

from tided.control.messages import Change, Load, Swap
from tided.engine.board import RECENT_S, ExpertBoard, as_json


def rows(board: ExpertBoard) -> list[str]:
    return as_json(board, None, 0.0)["states"]


def test_a_swap_and_a_hot_read():
    board = ExpertBoard(2, 4, [(0, 0), (0, 1), (1, 2)])
    assert rows(board) == ["1100", "0010"]
    board.changed(Change(load=[Load(1, (0, 3), (0, 0)), Load(2, (1, 0), None)]), 10.0)
    assert rows(board) == ["1103", "3010"]
    assert as_json(board, None, 10.0)["activity"] == {"sequence": 1, "active": [[0, 3], [1, 0]], "recent": []}
    board.changed(Change(publish=[1]), 11.0)
    assert rows(board) == ["0101", "3010"]
    board.changed(Change(publish=[2]), 12.0)
    assert rows(board) == ["0101", "2010"]
    board.changed(Change(promote=[Swap((1, 2), (1, 0))]), 12.0)
    assert rows(board) == ["0101", "1020"]
    board.changed(Change(withdraw=[(1, 2)]), 12.0)
    found = as_json(board, None, 12.0)
    assert found["states"] == ["0101", "1000"]
    assert found["counts"] == {"not_loaded": 5, "resident": 3, "transient": 0, "loading": 0}
    assert found["resident_per_layer"] == [2, 1]


def test_slots_are_those_of_what_can_be_routed_to():
    slots = {(0, 0): 5, (1, 2): 0}
    board = ExpertBoard(2, 4, [(0, 0), (1, 2)], slot_of=slots.get, arena_slots=7)
    assert "slots" not in as_json(board, None, 0.0)
    found = as_json(board, None, 0.0, slots=True)
    assert (found["slots"], found["arena_slots"]) == ([[5, -1, -1, -1], [-1, -1, 0, -1]], 7)
    board.changed(Change(load=[Load(1, (0, 3), (0, 0))]), 10.0)
    assert board.slots == [5, -1, -1, -1, -1, -1, 0, -1]
    slots[0, 3] = 6
    board.changed(Change(publish=[1]), 11.0)
    assert board.slots == [-1, -1, -1, 6, -1, -1, 0, -1]


def test_a_load_is_seen_for_three_seconds():
    board = ExpertBoard(1, 4, [(0, 0)])
    board.changed(Change(load=[Load(1, (0, 3), None)]), 10.0)
    board.changed(Change(publish=[1]), 10.001)
    for now_s, seen in [(10.01, [[0, 3]]), (10.0 + RECENT_S, [[0, 3]]), (10.1 + RECENT_S, [])]:
        activity = as_json(board, None, now_s)["activity"]
        assert (activity["active"], activity["recent"]) == ([], seen)


def test_heat_is_a_digit_by_place():
    board = ExpertBoard(2, 10, [(0, 0)])
    heat = np.arange(20, dtype=np.float64)[::-1].copy()
    assert as_json(board, heat, 0.0)["heat"] == ["9988776655", "4433221100"]


def test_random_changes_agree_with_the_books_of_the_motion():
    """Beside the policy that rank 0 decides with: after any changes both say the same."""
    from tided.engine.motion import Motion
    from tided.tide.demand import RouterShape
    from tided.tide.hot import HotReads

    dice, shape = random.Random(7), RouterShape(3, 16, 2)
    residents = [(layer, expert) for layer in range(3) for expert in range(6)]
    hot = HotReads(shape, residents, 6, 2, np.ones((3, 16)))
    motion, board = Motion(hot, 1, 4), ExpertBoard(3, 16, residents)
    for step in range(400):
        weights = np.zeros((3, 16))
        for _ in range(6):
            weights[dice.randrange(3), dice.randrange(16)] = dice.random()
        if motion.stepped(4):
            motion.observe(weights, np.full(3, 4))
        if step % 20 == 0:
            motion.take_plan([((0, 0), (0, 9))], "test")
        change, _ = motion.change()
        board.changed(change, float(step))
        ended = [ticket for ticket in list(motion._reading) if dice.random() < 0.7 and motion._reading[ticket].missing]
        for ticket in ended:
            (motion.failed if dice.random() < 0.1 else motion.landed)([ticket])
        digits = "".join(rows(board))
        pairs = {divmod(index, 16): digit for index, digit in enumerate(digits) if digit != "0"}
        assert {pair for pair, digit in pairs.items() if digit == "1"} == set(hot.residents)
        assert {pair for pair, digit in pairs.items() if digit == "2"} == set(hot.ring)
        assert {pair for pair, digit in pairs.items() if digit == "3"} == {
            r.load.pair for r in motion._reading.values()
        }
    assert board.sequence > 50


def test_what_is_shown_of_the_largest_model_is_small():
    board = ExpertBoard(40, 480, [(layer, expert) for layer in range(40) for expert in range(250)])
    from tided.api.json_text import to_json

    text = to_json(as_json(board, np.random.default_rng(1).random(19_200), 0.0))
    assert len(text) < 60_000
