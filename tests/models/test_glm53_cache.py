"""GLM-5.3's contexts in FP8, and shared by ranks: rows that are kept, tokens that are chosen, collectives."""

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from kernels.latent_rows import row_bytes, unpack
from tests.models.glm53_checkpoint import with_config
from tests.models.rig import GLM, Threads, load_model, settings
from tests.models.test_glm53_golden import LOGITS, PROMPT, serve
from tided.cache.pool import rows_between
from tided.errors import ConfigError
from tided.models.deepseek_v41.family import DeepseekV41Family
from tided.models.glm53.attention import Attention
from tided.models.glm53.family import Glm53Family
from tided.models.glm53.indexer import Indexer
from tided.settings import Parallel

TOKENS = load_file(GLM / "golden_main.safetensors")["tokens"].long()


def kept(path=GLM, draft: str = "off", numerics: str = "fp32", ranks: int = 1, **cache):
    base = settings(path, numerics=numerics)
    return replace(
        base,
        cache=replace(base.cache, **cache),
        engine=replace(base.engine, draft=draft),
        parallel=Parallel(ranks=ranks),
    )


class Counted:
    """A group whose collectives are counted."""

    def __init__(self, group) -> None:
        self.group, self.rank, self.ranks, self.calls = group, group.rank, group.ranks, 0

    def sum(self, part):
        self.calls += 1
        return self.group.sum(part)

    def concat(self, part):
        self.calls += 1
        return self.group.concat(part)


@pytest.mark.parametrize(("ranks", "chunk"), [(2, PROMPT), (2, 7), (4, 64)])
def test_shared_contexts_give_the_reference(ranks, chunk):
    """Without rounding, within what fp32 sums in another order differ by; and the same bits on every rank."""
    golden = load_file(GLM / "golden_main.safetensors")
    found = Threads(ranks).run(lambda group: serve(load_model(GLM, group, kept(split=True)), TOKENS, chunk))
    for logits in found:
        assert torch.equal(logits, found[0])
        torch.testing.assert_close(logits[136:], golden["logits_tail"], rtol=0, atol=LOGITS)


@pytest.fixture
def choices(monkeypatch):
    """(rank, layer) -> what was chosen for each span: positions that count."""
    seen: dict[tuple[int, int], list[list[int]]] = {}
    real = Indexer._of_all_ranks

    def watch(self, found, tokens):
        result = real(self, found, tokens)
        for score, position in result:
            rows = [row[s > -torch.inf].tolist() for s, row in zip(score, position, strict=True)]
            seen.setdefault((self.group.rank, self.layer), []).extend(rows)
        return result

    monkeypatch.setattr(Indexer, "_of_all_ranks", watch)
    return seen


@pytest.mark.parametrize("ties", [False, True])
def test_ranks_that_share_contexts_choose_what_one_would(tmp_path, choices, ties):
    """Where all scores are equal too: then the oldest."""
    path = with_config(tmp_path)
    if ties:
        tensors = load_file(path / "model.safetensors")
        for name in [name for name in tensors if name.endswith("weights_proj.weight")]:
            tensors[name] = torch.zeros_like(tensors[name])
        save_file(tensors, path / "model.safetensors")
    serve(load_model(path, config=kept(path)), TOKENS, 64)
    alone = {layer: choices.pop((0, layer)) for layer in (0, 1, 4)}
    Threads(2).run(lambda group: serve(load_model(path, group, kept(path, split=True)), TOKENS, 64))
    assert choices == {(rank, layer): rows for rank in (0, 1) for layer, rows in alone.items()}
    assert not ties or alone[4][-1] == list(range(32))


def test_each_rank_keeps_its_tokens_and_no_other():
    def rows(model):
        lane = model.open_lane(0)
        model.prefill(lane, TOKENS, "none")
        share = model.rotations.share
        own = share.count(217)
        return [
            (rows_between(lane, share.ranks, 0, own, held[layer]).clone(), held[layer].nbytes)
            for held, layers in ((model.pool.rows, range(6)), (model.pool.keys, (0, 1, 4)))
            for layer in layers
        ]

    whole = Threads(2).run(lambda group: rows(load_model(GLM, group, kept())))[0]
    parts = Threads(2).run(lambda group: rows(load_model(GLM, group, kept(split=True))))
    for (all_rows, nbytes), *shares in zip(whole, *parts, strict=True):
        for rank, (own, own_bytes) in enumerate(shares):
            torch.testing.assert_close(own, all_rows[rank::2], rtol=0, atol=5e-5)
            assert own_bytes == nbytes // 2


@pytest.mark.parametrize("split", [False, True])
def test_collectives_of_a_layer(split):
    """Two; of a shared context four, and a fifth where a layer chooses among more tokens than it attends to."""

    def calls(group):
        counted = Counted(group)
        model = load_model(GLM, counted, kept(split=split))
        lane, found = model.open_lane(0), []
        for part in (TOKENS[:20], TOKENS[20:100], TOKENS[100:101]):
            before = counted.calls
            model.prefill(lane, part, "none") if len(part) > 1 else model.decode([lane], part)
            found.append(counted.calls - before)
        return found

    layer = 4 if split else 2
    embedding, head, choosing = 1, 1, 3 * split
    assert Threads(2).run(calls)[0] == [
        6 * layer + embedding,
        6 * layer + embedding + choosing,
        6 * layer + embedding + choosing + head,
    ]


def greedy(_, logits):
    return logits.argmax(1)


@pytest.mark.parametrize("shared_choice", [True, False])
def test_a_drafter_over_shared_contexts_proposes_the_same(tmp_path, shared_choice):
    path = with_config(tmp_path, index_share_for_mtp_iteration=shared_choice)

    def proposed(group, **cache):
        model = load_model(path, group, kept(path, draft="4", **cache))
        lanes = [model.open_lane(index) for index in range(2)]
        model.prefill(lanes[0], TOKENS[:PROMPT], "none")
        model.prefill(lanes[1], TOKENS[:9], "none")
        return model.propose(lanes, TOKENS[[PROMPT, 9]], greedy)

    alone = Threads(2).run(proposed)[0]
    for draft in Threads(2).run(lambda group: proposed(group, split=True)):
        assert torch.equal(draft.ids, alone.ids)
        torch.testing.assert_close(draft.logits, alone.logits, rtol=0, atol=LOGITS)


@pytest.mark.parametrize("numerics", ["fp32", "native"])
def test_in_fp8_the_pool_holds_the_rows_packed(numerics):
    """The first layer's rows do not depend on what was kept before: they are the others', packed."""
    pools = {}
    for dtype in ("bf16", "fp8"):
        model = load_model(GLM, config=kept(numerics=numerics, dtype=dtype))
        lane = model.open_lane(0)
        model.prefill(lane, TOKENS, "none")
        pools[dtype] = rows_between(lane, 1, 0, 217, model.pool.rows[0]), model.pool.keys
    plain, packed = pools["bf16"][0].float(), pools["fp8"][0]
    assert packed.shape == (217, row_bytes(64, 16))
    read = unpack(packed, 64)
    assert 0 < float((read - plain)[:, :64].norm() / plain[:, :64].norm()) < 0.03
    assert torch.equal(read[:, 64:], plain[:, 64:].bfloat16().float())
    assert pools["bf16"][1][0].dtype == pools["fp8"][1][0].dtype, "index keys are kept as they are"


def test_fp8_moves_what_a_layer_gives_a_little(monkeypatch):
    """The first layer: what comes behind it chooses other tokens and experts in a random model."""
    seen = []
    real = Attention.forward

    def watch(self, step, x):
        result = real(self, step, x)
        if self.layer == 0:
            seen.append(result)
        return result

    monkeypatch.setattr(Attention, "forward", watch)
    for dtype in ("bf16", "fp8"):
        model = load_model(GLM, config=kept(dtype=dtype))
        model.prefill(model.open_lane(0), TOKENS, "none")
    plain, packed = seen
    assert 0 < float((packed - plain).norm() / plain.norm()) < 0.05


def test_fp8_rows_do_not_depend_on_ranks_or_chunks():
    """But for a code that rounds to the other side now and then."""

    def rows(group, chunk, **cache):
        model = load_model(GLM, group, kept(dtype="fp8", **cache))
        lane, share = model.open_lane(0), model.rotations.share
        for part in TOKENS.split(chunk):
            model.prefill(lane, part, "none")
        return rows_between(lane, share.ranks, 0, share.count(217), model.pool.rows[0]).clone()

    one = Threads(1).run(lambda group: rows(group, 217))[0]
    for ranks, chunk in ((1, 7), (2, 64)):
        parts = Threads(ranks).run(lambda group, chunk=chunk: rows(group, chunk, split=True))
        for rank, own in enumerate(parts):
            assert float((own == one[rank::ranks]).float().mean()) > 0.99


@pytest.mark.parametrize(("ranks", "divides"), [(2, True), (3, False), (4, True)])
def test_ranks_must_share_a_page(ranks, divides):
    asked = kept(ranks=ranks, split=True)
    if divides:
        Glm53Family().check({}, asked)
        return
    with pytest.raises(ConfigError, match="3 ranks cannot share contexts"):
        Glm53Family().check({}, asked)


@pytest.mark.parametrize(("cache", "said"), [({"dtype": "fp8"}, r"cache\.dtype"), ({"split": True}, r"cache\.split")])
def test_a_family_without_them_refuses_both(cache, said):
    DeepseekV41Family().check({}, kept())
    with pytest.raises(ConfigError, match=said):
        DeepseekV41Family().check({}, kept(**cache))
