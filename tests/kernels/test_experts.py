"""The router, and experts out of slots, against dense matrices."""

import pytest
import torch

from kernels import experts, router
from kernels.numerics import FP32, NATIVE
from kernels.record import ExpertRecord

RECORD = ExpertRecord(hidden=64, intermediate=64, ranks=1)
LIMIT = 1.0


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def slots():
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(0, 256, (5, RECORD.slot_bytes), dtype=torch.uint8, generator=generator)
    for part in RECORD.parts[3:]:
        data[:, part.offset : part.offset + part.nbytes] = 124 + data[:, part.offset : part.offset + part.nbytes] % 3
    return data


def plain(x, slots, picks, weights):
    """One token and one expert at a time."""
    total = torch.zeros_like(x)
    for t in range(len(x)):
        for slot, weight in zip(picks[t].tolist(), weights[t], strict=True):
            w13, w2 = experts.decode(slots[slot], RECORD)
            gate, up = (w13 @ x[t]).chunk(2)
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            total[t] += w2 @ (weight * gate * torch.sigmoid(gate) * up)
    return total


@pytest.mark.parametrize("count", [1, 4, 40])
def test_grouped_experts(slots, count):
    x, weights = randn(count, 64), randn(count, 3, seed=1).abs()
    picks = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(t))[:3] for t in range(count)])
    got = experts.grouped_experts(x, slots, RECORD, picks, weights, LIMIT, FP32)
    torch.testing.assert_close(got, plain(x, slots, picks, weights), rtol=1e-4, atol=1e-4)


def test_each_expert_is_decoded_once(slots, monkeypatch):
    decoded, decode = [], experts.decode
    monkeypatch.setattr(experts, "decode", lambda slot, record: decoded.append(1) or decode(slot, record))
    picks = torch.tensor([[0, 1, 2], [2, 1, 4], [1, 0, 2]])
    experts.grouped_experts(randn(3, 64), slots, RECORD, picks, torch.ones(3, 3), LIMIT, FP32)
    assert len(decoded) == 4


def test_halves_add_up_to_the_whole(slots):
    """A record cut over two ranks: rows of w1 and w3, columns of w2."""
    half = ExpertRecord(64, 64, 2)
    cut = torch.zeros(2, 5, half.slot_bytes, dtype=torch.uint8)
    for i, (whole, part) in enumerate(zip(RECORD.parts, half.parts, strict=True)):
        data = slots[:, whole.offset : whole.offset + whole.nbytes].view(5, whole.rows, whole.row_bytes)
        for rank, piece in enumerate(data.chunk(2, 2 if i in (2, 5) else 1)):
            cut[rank, :, part.offset : part.offset + part.nbytes] = piece.reshape(5, -1)
    x, picks, weights = randn(4, 64), torch.tensor([[0, 1], [2, 3], [4, 0], [1, 3]]), randn(4, 2, seed=1).abs()
    whole = experts.grouped_experts(x, slots, RECORD, picks, weights, LIMIT, NATIVE)
    parts = [experts.grouped_experts(x, data, half, picks, weights, LIMIT, NATIVE) for data in cut]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-4, atol=1e-4)


def test_the_weight_counts_before_the_second_matrix(slots):
    """Its product is what is rounded: scaling afterwards gives other bits."""
    x, picks = NATIVE.activation(randn(1, 64)), torch.tensor([[2]])
    weighted = experts.grouped_experts(x, slots, RECORD, picks, torch.tensor([[0.3]]), LIMIT, NATIVE)
    one = experts.grouped_experts(x, slots, RECORD, picks, torch.tensor([[1.0]]), LIMIT, NATIVE)
    assert not torch.allclose(weighted, one * 0.3, rtol=1e-4)
    torch.testing.assert_close(weighted, one * 0.3, rtol=0.1, atol=0.1 * float(one.abs().max()))


def test_an_expert_without_a_slot(slots):
    with pytest.raises(ValueError, match="no slot"):
        experts.grouped_experts(randn(1, 64), slots, RECORD, torch.tensor([[1, -1]]), torch.ones(1, 2), LIMIT, FP32)


def test_router_scores():
    x, gate = randn(3, 8), randn(5, 8, seed=1)
    torch.testing.assert_close(router.scores(x, gate), torch.log1p(torch.exp(x @ gate.t())).sqrt())


def test_the_bias_chooses_and_does_not_weigh():
    score = torch.tensor([[0.5, 0.4, 0.3, 0.2]])
    bias = torch.tensor([0.0, 0.0, 0.0, 1.0])
    got = router.route(score, bias, torch.ones(4, dtype=torch.bool), 2, 1.5)
    assert got.ids.tolist() == [[3, 0]]
    torch.testing.assert_close(got.weights, torch.tensor([[0.2, 0.5]]) / 0.7 * 1.5)
    assert not got.missed.any()


def test_an_absent_expert_is_substituted_by_the_best_routable():
    score = torch.tensor([[0.5, 0.4, 0.3, 0.2], [0.1, 0.2, 0.9, 0.8]])
    routable = torch.tensor([False, True, True, True])
    got = router.route(score, torch.zeros(4), routable, 2, 1.0)
    assert got.ids.tolist() == [[1, 2], [2, 3]]
    torch.testing.assert_close(got.weights, torch.tensor([[0.4 / 0.7, 0.3 / 0.7], [0.9 / 1.7, 0.8 / 1.7]]))
    assert got.wanted.tolist() == [[0, 1], [2, 3]]
    assert got.missed.tolist() == [[True, False], [False, False]]
    torch.testing.assert_close(got.wanted_weights[0], torch.tensor([0.5, 0.4]) / 0.9)
    assert got.wanted_scores[0].tolist() == pytest.approx([0.5, 0.4])


def test_the_bias_chooses_a_substitute_and_does_not_weigh():
    score, bias = torch.tensor([[0.5, 0.4, 0.3, 0.2]]), torch.tensor([0.0, 0.0, 0.3, 0.0])
    got = router.route(score, bias, torch.tensor([True, False, True, True]), 2, 1.5)
    assert (got.wanted.tolist(), got.missed.tolist()) == ([[2, 0]], [[False, False]])
    got = router.route(score, bias, torch.tensor([False, True, True, True]), 2, 1.5)
    assert (got.ids.tolist(), got.missed.tolist()) == ([[2, 1]], [[False, True]])
    torch.testing.assert_close(got.weights, torch.tensor([[0.3, 0.4]]) / 0.7 * 1.5)
    torch.testing.assert_close(got.wanted_weights, torch.tensor([[0.3, 0.5]]) / 0.8)


def test_too_few_routable_experts():
    with pytest.raises(ValueError, match="1 routable experts, the router needs 2"):
        router.route(torch.ones(1, 3), torch.zeros(3), torch.tensor([False, True, False]), 2, 1.0)


@pytest.mark.parametrize("count", [1, 4, 40])
def test_experts_that_come_late_leave_no_trace_in_the_bits(slots, count):
    """Whatever comes first: outputs are kept by (row, k) and added in the order of k."""
    x, weights = randn(count, 64), randn(count, 3, seed=1).abs()
    picks = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(t))[:3] for t in range(count)])
    whole = experts.grouped_experts(x, slots, RECORD, picks, weights, LIMIT, NATIVE)
    outputs = torch.full((count, 3, 64), torch.nan)
    for batch in ([3], [0, 4], [2, 1]):
        here = torch.where(torch.isin(picks, torch.tensor(batch)), picks, -1)
        experts.pick_outputs(outputs, x, slots, RECORD, here, weights, LIMIT, NATIVE)
    assert torch.equal(experts.sum_of_picks(outputs), whole)
    assert not torch.equal(experts.sum_of_picks(outputs.flip(1)), whole) or count == 1


def test_a_row_that_may_use_all_it_wants_is_routed_as_if_all_were_routable():
    score, bias = torch.rand(20, 9, generator=torch.Generator().manual_seed(4)), randn(9, seed=5)
    routable = torch.arange(9) < 4
    whole = router.route(score, bias, torch.ones(9, dtype=torch.bool), 3, 1.5)
    few = router.route(score, bias, routable, 3, 1.5)
    allowed = routable.expand(20, 9).clone()
    allowed[::2] = True
    got = router.reroute(few, bias, allowed, 1.5)
    assert torch.equal(got.ids[::2], whole.ids[::2])
    assert torch.equal(got.weights[::2], whole.weights[::2])
    assert torch.equal(got.ids[1::2], few.ids[1::2])
    assert torch.equal(got.weights[1::2], few.weights[1::2])
    assert torch.equal(got.missed, few.missed)
