"""Every rank gets a device of its own, and memory that is not there is told before and when it is asked for."""

import errno

import pytest
import torch
from msgspec.structs import replace
from real_pair import GLM, GOLDEN, opened

from tided.engine import devices
from tided.engine.build import build_rank, open_model
from tided.engine.devices import allocating, free_bytes, is_shortage, local_index, refuse_shortage, use_device
from tided.engine.memory import Node, gates, largest_budget, needs, passing_bytes, with_resident
from tided.engine.offline import first_pairs, settings_of
from tided.errors import ConfigError, UnavailableError
from tided.experts.placement import SEGMENT_BYTES
from tided.models.deepseek_v41.family import DeepseekV41Family
from tided.models.parallel import Alone
from tided.settings import Cache, Engine, Experts, Memory, Parallel, Vision

ON_CUDA = Engine(device="cuda")


def with_settings(**changes):
    return open_model(replace(settings_of(GOLDEN), **changes))


def asked_of(model, *ranks) -> int:
    """What a start wants free for these ranks of one host, one prefill chunk included."""
    stays = sum(need.nbytes for rank in ranks for need in needs(model, rank) if not need.taken)
    memory = model.settings.memory
    chunks = len(ranks) * passing_bytes(model)
    return stays + max(memory.reserve_bytes, chunks + memory.exit_below_bytes)


def huge_slots():
    return with_settings(experts=Experts(resident=80, spare_slots=1 << 45))


def huge_pool():
    return with_settings(cache=Cache(context_tokens=1024, pool_tokens=1 << 50))


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [((), [0, 1, 2, 3]), (("a", "b", "a", "b"), [0, 0, 1, 1]), (("a", "b", "c", "d"), [0, 0, 0, 0])],
)
def test_ranks_of_a_host_count_its_devices(hosts, expected):
    parallel = Parallel(ranks=4, hosts=hosts)
    assert [local_index(parallel, rank) for rank in range(4)] == expected


def test_a_rank_takes_its_device_and_one_too_many_is_refused(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    settings = replace(settings_of(GOLDEN), engine=ON_CUDA, parallel=Parallel(ranks=3))
    use_device(settings, 0), use_device(settings, 1)
    with pytest.raises(UnavailableError, match="rank 2 is number 3 of its host, which has 2 CUDA devices"):
        use_device(settings, 2)
    use_device(replace(settings, engine=Engine()), 2)  # a processor is shared
    assert chosen == [0, 1]


def test_what_the_settings_ask_for_is_what_is_allocated():
    model = with_settings()
    rank = build_rank(model, Alone(), first_pairs(model), lambda *_: None)
    asked = {need.what: need.nbytes for need in needs(model, 0)}
    assert asked["residents"] + asked["slots beside them"] == rank.residents.arena_bytes
    pool = rank.model.pool
    assert asked["context"] == sum(t.nbytes for held in (pool.rows, pool.keys) for t in held.values()) > 0
    lane = rank.model.open_lane(0)
    assert 0 < lane.windows.nbytes <= asked["windows of lanes"] / model.settings.engine.lanes
    taps = [rank.executor.tap.counts, rank.executor.tap.mass, rank.executor.tap.uses]
    assert asked["demand"] == sum(grid.nbytes for grid in taps)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_drafter_is_counted_with_its_experts(ranks):
    model = with_settings(engine=Engine(draft="confidence"), parallel=Parallel(ranks=ranks))
    rank = build_rank(model, Part(ranks), first_pairs(model), lambda *_: None)
    (drafter,) = [need for need in needs(model, 0) if need.what == "drafter"]
    owned = rank.model.drafter
    shared = {id(part) for part in (owned.head, owned.rotations, *vars(owned.rotations).values())}
    parts = {id(part): part for part in tensors(owned, shared | {id(rank.model.pool)})}
    assert 0 <= sum(part.nbytes for part in parts.values()) - drafter.nbytes < 2048  # routing tables, scales spread out
    assert drafter.nbytes > owned.blocks[0].moe.bank.slots.nbytes > 0
    assert "drafter" not in [need.what for need in needs(with_settings(), 0)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("path", [GOLDEN, GLM])
def test_dense_weights_are_counted(path, ranks):
    model = opened(ranks, 64 if path == GLM else 80, path=path)
    rank = build_rank(model, Part(ranks), first_pairs(model), lambda *_: None)
    (dense,) = [need.nbytes for need in needs(model, 0) if need.what == "dense weights"]
    held, engrams = rank.model, getattr(rank.model, "engrams", None)
    beside = {id(part) for part in (held.pool, rank.bank, held.rotations, *vars(held.rotations).values())}
    weights = [held.embed, held.blocks, held.norm, held.head, engrams and list(engrams.layers.values())]
    parts = {id(part): part for part in tensors(weights, beside)}
    found = sum(part.nbytes for part in parts.values())
    assert 0 <= found - dense < 0.002 * dense  # sinks, scales of hyper-connections


def test_dense_weights_that_do_not_fit_are_refused_with_their_size(monkeypatch):
    model = opened(2, 64, path=GLM)
    total = asked_of(model, 0, 1)
    monkeypatch.setattr(devices, "free_bytes", lambda on_cuda: total)
    refuse_shortage(model, 0)
    monkeypatch.setattr(devices, "free_bytes", lambda on_cuda: total - 1)
    with pytest.raises(
        UnavailableError,
        match=r"MB of dense weights \(model\.path\).* on each of 2 ranks.* too little\n.*resident = 63 fits",
    ):
        refuse_shortage(model, 0)


@pytest.mark.parametrize("holder", [0, 1])
def test_the_vision_tower_is_counted_where_it_is(holder):
    model = with_settings(vision=Vision(rank=holder), parallel=Parallel(ranks=2))
    rank = build_rank(model, Part(2), first_pairs(model), lambda *_: None)
    counted = [need.nbytes for need in needs(model, 0) if need.what == "vision tower"]
    held = [part.nbytes for part in tensors(rank.model.vision.tower)] if rank.model.vision.tower else []
    assert len(counted) == (holder == 0)
    assert 0 <= sum(held) - sum(counted) < 8192  # norms and biases are spread out


def test_ranks_of_a_host_have_one_tower(monkeypatch):
    model = with_settings(vision=Vision(rank=1), parallel=Parallel(ranks=2))
    both = asked_of(model, 0, 1)
    assert asked_of(model, 1) > both / 2
    monkeypatch.setattr(devices, "free_bytes", lambda on_cuda: both)
    refuse_shortage(model, 0)
    monkeypatch.setattr(devices, "free_bytes", lambda on_cuda: both - 1)
    with pytest.raises(UnavailableError, match="on each of 2 ranks"):
        refuse_shortage(model, 0)


def test_a_model_without_a_tower_is_refused_with_a_rank_for_it(monkeypatch):
    monkeypatch.setattr(DeepseekV41Family, "vision_bytes", lambda self, config: 0)
    with pytest.raises(ConfigError, match=r"vision\.rank = 0: this model has no vision tower"):
        with_settings(vision=Vision(rank=0))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_layer_behind_the_trunk_is_counted_with_its_experts(ranks):
    """GLM-5.3."""
    model = opened(ranks, 64, path=GLM, draft="acceptance")
    rank = build_rank(model, Part(ranks), first_pairs(model), lambda *_: None)
    (drafter,) = [need for need in needs(model, 0) if need.what == "drafter"]
    owned = rank.model.drafter
    shared = {id(part) for part in (owned.head, owned.rotations, *vars(owned.rotations).values())}
    parts = {id(part): part for part in tensors(owned, shared | {id(rank.model.pool)})}
    assert 0 <= sum(part.nbytes for part in parts.values()) - drafter.nbytes < 8192  # norms, routing tables
    context = next(need for need in needs(model, 0) if need.what == "context")
    held = rank.model.pool
    assert context.nbytes == sum(t.nbytes for kind in (held.rows, held.keys) for t in kind.values())


class Part:
    """The first rank's share of a group that nobody else is in."""

    rank = 0

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The others would be like it."""
        return self.ranks * part


def tensors(holder, beside=frozenset()):
    """All that an object holds, but what is held `beside` it."""
    if id(holder) in beside:
        return
    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, list | tuple):
        for part in holder:
            yield from tensors(part, beside)
    elif hasattr(holder, "__dict__"):
        yield from tensors(list(vars(holder).values()), beside)


def test_a_checkpoint_without_a_drafter_is_refused_before_its_weights_are_read(monkeypatch):
    model = with_settings(engine=Engine(draft="5"))
    text = model.checkpoint.config["text_config"]
    text["num_nextn_predict_layers"], text["compress_ratios"] = 0, text["compress_ratios"][: text["num_hidden_layers"]]
    monkeypatch.setattr(type(model.checkpoint), "read", None)
    with pytest.raises(ConfigError, match="no drafter"):
        refuse_shortage(model, 0)


@pytest.mark.parametrize("model", [huge_slots, huge_pool])
def test_memory_that_is_not_there_is_missed_before_it_is_asked_for(model):
    with pytest.raises(UnavailableError, match=r"B of residents \(experts\.resident\).*cache\.pool_tokens.* are free"):
        refuse_shortage(model(), 0)


def test_a_start_that_would_die_on_its_first_long_prompt_is_refused(monkeypatch):
    """Everything that stays fits, with the reserve; a prefill chunk beside it does not."""
    model = with_settings(memory=Memory(reserve_bytes=10, exit_below_bytes=5))
    stays = sum(need.nbytes for need in needs(model, 0) if not need.taken)
    chunk = passing_bytes(model)
    assert chunk > 100
    monkeypatch.setattr(devices, "free_bytes", lambda on_cuda: stays + chunk + 5)
    refuse_shortage(model, 0)
    monkeypatch.setattr(devices, "free_bytes", lambda on_cuda: stays + chunk + 4)
    load, serve = gates(model, 0, devices.here(model.settings), started=True)
    assert (load.passes, serve.missing_bytes) == (True, 1)
    with pytest.raises(UnavailableError, match=r"a prefill chunk takes .* in passing \(model\.prefill_chunk_tokens\)"):
        refuse_shortage(model, 0)


def test_what_a_refusal_names_fits_and_one_more_does_not(monkeypatch):
    model = opened(2, 80)
    monkeypatch.setattr(devices, "free_bytes", lambda on_cuda: asked_of(with_resident(model, 70), 0, 1) + 1)
    with pytest.raises(UnavailableError, match=r"experts\.resident = 70 fits"):
        refuse_shortage(model, 0)
    refuse_shortage(with_resident(model, 70), 0)
    with pytest.raises(UnavailableError):
        refuse_shortage(with_resident(model, 71), 0)


def test_one_memory_of_system_and_device_is_judged_once_and_without_the_file_cache(tmp_path, monkeypatch):
    """GB10. CUDA counts the file cache as used; the system's figure does not, unless CUDA's is the larger one."""
    model = with_settings(engine=Engine(device="cuda"))
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 104857600 kB\nMemAvailable: 94371840 kB\n")
    monkeypatch.setattr(devices, "MEMINFO", meminfo)
    monkeypatch.setattr(devices, "is_unified", lambda: True)
    for device, expected in ((32 << 30, 90 << 30), (91 << 30, 91 << 30)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=device: (device, 100 << 30))
        assert devices.here(model.settings) == Node(False, expected)
    both = gates(model, 0, Node(False, 90 << 30), started=True)
    assert [gate.name for gate in both] == ["load", "serve"]
    stays = sum(need.nbytes for need in needs(model, 0) if not need.taken)
    assert both[0].asked_bytes == stays + model.settings.memory.reserve_bytes
    beside = [need for need in needs(model, 0) if need not in needs(model, 0, apart=True)]
    assert [(need.what, need.nbytes) for need in beside] == [("rounding of slots", 3 * SEGMENT_BYTES)]


def test_a_device_with_memory_of_its_own_is_judged_beside_the_system(tmp_path, monkeypatch):
    model = with_settings(
        engine=Engine(device="cuda"), cache=Cache(context_tokens=64, pool_tokens=64, prefix_ram_bytes=77)
    )
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 94371840 kB\n")
    monkeypatch.setattr(devices, "MEMINFO", meminfo)
    monkeypatch.setattr(devices, "is_unified", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (24 << 30, 32 << 30))
    node = devices.here(model.settings)
    assert node == Node(True, 90 << 30, 24 << 30)
    found = {gate.name: gate for gate in gates(model, 0, node, started=True)}
    asked = [need for need in needs(model, 0, node.apart) if not need.taken]
    own = sum(need.nbytes for need in asked if not need.system)
    others = sum(need.nbytes for need in asked if need.system)
    assert found["load, device"].asked_bytes == own
    assert found["serve, device"].asked_bytes == own + passing_bytes(model)
    assert found["load"].asked_bytes == others + model.settings.memory.reserve_bytes
    assert 77 <= others < own
    assert largest_budget(model, [Node(True, 90 << 30, own + passing_bytes(model))], started=True) == 80
    less = own + passing_bytes(model) - 1
    assert largest_budget(model, [Node(True, 90 << 30, less)], started=True) == 79


def test_no_budget_fits_where_the_system_is_short_beside_a_device_of_its_own(monkeypatch):
    """Residents lie on the device: fewer of them leave no more room on the host."""
    cache = Cache(context_tokens=1024, pool_tokens=1 << 24, prefix_ram_bytes=50_000_000_000)
    model = with_settings(engine=Engine(device="cuda"), cache=cache)
    node = Node(True, 32 << 30, 1 << 50)
    context = next(need.nbytes for need in needs(model, 0, apart=True) if need.what == "context")
    assert largest_budget(model, [node], started=True) is None
    assert largest_budget(model, [node._replace(free_bytes=64 << 30)], started=True) == 80
    assert context < 50_000_000_000
    for larger in (model, with_settings(engine=ON_CUDA, cache=replace(cache, pool_tokens=1 << 30))):
        monkeypatch.setattr(devices, "here", lambda settings: node)
        with pytest.raises(UnavailableError, match=r"no budget of experts fits beside 50.0 GB of cached prompts"):
            refuse_shortage(larger, 0)
    assert next(need.nbytes for need in needs(larger, 0) if need.what == "context") > 50_000_000_000


def test_ranks_of_a_host_share_its_memory(monkeypatch):
    model = with_settings(parallel=Parallel(ranks=2))
    both = asked_of(model, 0, 1)
    assert both > 1.5 * asked_of(model, 0) - model.settings.memory.reserve_bytes
    monkeypatch.setattr(devices, "free_bytes", lambda on_cuda: both)
    refuse_shortage(model, 1)
    monkeypatch.setattr(devices, "free_bytes", lambda on_cuda: both - 1)
    with pytest.raises(UnavailableError, match="on each of 2 ranks"):
        refuse_shortage(model, 1)
    refuse_shortage(with_settings(parallel=Parallel(ranks=2, hosts=("a", "b"))), 1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (huge_slots, r"not enough memory: .*experts\.resident.*cache\.pool_tokens"),
        (huge_pool, "context pool of 1125899906842624 tokens: 576,460,752.3 GB"),
    ],
)
def test_an_allocation_that_fails_is_told_with_bytes_and_settings(model, words):
    opened = model()
    with pytest.raises(UnavailableError, match=words), allocating(opened, 0):
        build_rank(opened, Alone(), first_pairs(opened), lambda *_: None)


def test_an_allocation_that_fails_is_told_by_its_kind(caplog):
    with pytest.raises(UnavailableError, match="OSError: no memory") as told, allocating(with_settings(), 0):
        raise OSError(errno.ENOMEM, "no memory", "/secret/x")
    assert "/secret" not in str(told.value)
    assert "/secret/x" in caplog.text


def test_other_errors_pass():
    with pytest.raises(ValueError, match="a mistake"), allocating(with_settings(), 0):
        raise ValueError("a mistake")
    assert is_shortage(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_shortage(FileNotFoundError())


def test_this_machine_tells_its_memory():
    assert free_bytes(False) > 1 << 20


def test_a_full_page_cache_leaves_the_memory_free(tmp_path, monkeypatch):
    """What the system holds of files gives way: of 100 GB all but one are cache, and 90 are free."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 104857600 kB\nMemFree: 1048576 kB\nMemAvailable: 94371840 kB\nCached: 93323264 kB\n")
    monkeypatch.setattr(devices, "MEMINFO", meminfo)
    assert free_bytes(on_cuda=False) == 90 << 30
