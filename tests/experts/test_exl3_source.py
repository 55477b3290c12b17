"""Routed EXL3 experts from a real checkpoint: what the converter's own kernels compute, cut over ranks, refused when
they are something else."""

import math
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as changed
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels import exl3
from kernels.exl3_record import Exl3Record, Stored, header_of, stored_of
from kernels.experts import pick_outputs
from kernels.numerics import FP32, WEIGHTS_ONLY
from packers.exl3 import refuse_exports
from packers.shards import Checkpoint
from tided.errors import DataError, TensorError
from tided.experts.checkpoint import described, source_of
from tided.experts.exl3_source import Exl3Source
from tided.experts.pack import PackSource
from tided.experts.source import EveryRank

GOLDEN = Path(__file__).parents[1] / "golden" / "exl3-checkpoint"
D, INNER, EXPERTS = 256, 256, 8
WIDTHS = [(4, 4, 4), (4, 4, 6), (6, 6, 6), (6, 6, 8), (8, 8, 8)]  # half bits of gate, up, down
AGREES = 2.5e-3


def names(layer: int, expert: int) -> list[str]:
    """Layer 2 is the one behind the trunk."""
    stem = f"model.layers.{layer + 1}.mlp.experts.{expert}"
    return [f"{stem}.{part}_proj" for part in ("gate", "up", "down")]


def source(ranks: int = 1, rank: int = 0, path: Path = GOLDEN) -> Exl3Source:
    return Exl3Source(Checkpoint.open(path), names, Exl3Record(D, INNER, ranks), rank)


def read(one: Exl3Source, layer: int, expert: int) -> Tensor:
    """[1, bytes]: a slot, whatever it held before."""
    room = torch.full((1, one.slot_bytes(layer, expert)), 0xAA, dtype=torch.uint8)
    one.read(layer, expert, room.view(-1).numpy().data)
    return room


def computed(slots: Tensor, record: Exl3Record, x: Tensor, numerics=FP32) -> Tensor:
    outputs = torch.zeros(len(x), 1, record.hidden)
    pick_outputs(outputs, x, slots, record, torch.zeros(len(x), 1).long(), torch.ones(len(x), 1), math.inf, numerics)
    return outputs[:, 0]


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_expert_is_what_the_converters_own_kernels_compute(layer, ranks):
    expected = load_file(GOLDEN / "expected_experts.safetensors")
    x, wanted = expected[f"layer{layer + 1}.x"].float(), expected[f"layer{layer + 1}.y_f32"]
    for expert in range(EXPERTS):
        parts = [
            computed(read(one, layer, expert), one.record, x) for one in (source(ranks, rank) for rank in range(ranks))
        ]
        assert off(sum(parts), wanted[expert]) < AGREES, expert
        assert off(parts[0], wanted[expert]) < AGREES or ranks == 2
        assert (
            off(computed(read(source(), layer, expert), Exl3Record(D, INNER, 1), x, WEIGHTS_ONLY), wanted[expert])
            < 8e-3
        )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_record_tells_its_widths_and_holds_the_checkpoints_bytes(ranks):
    tensors = load_file(GOLDEN / "model.safetensors")
    for rank in range(ranks):
        one, part = source(ranks, rank), slice(rank * INNER // ranks, (rank + 1) * INNER // ranks)
        for layer, expert in [(0, 0), (0, 3), (1, 6), (2, 7)]:
            record = read(one, layer, expert)[0]
            wanted = WIDTHS[(expert + layer + 1) % 5] if layer < 2 else (8, 8, 8)
            assert stored_of(record[:8].numpy().tobytes()) == Stored(wanted, ("mul1",) * 3) == one.stored(layer, expert)
            for number, (name, found) in enumerate(
                zip(names(layer, expert), exl3.matrices(one.record, record), strict=True)
            ):
                whole = exl3.Exl3Matrix(*(tensors[f"{name}.{leaf}"] for leaf in ("trellis", "suh", "svh")), "mul1")
                cut = whole.rows(part) if number == 2 else whole.columns(part)
                assert torch.equal(found.trellis, cut.trellis)
                assert torch.equal(found.suh, cut.suh)
                assert torch.equal(found.svh, cut.svh)
            assert not record[one.record.nbytes(one.stored(layer, expert)) :].any(), "behind it are zeros"


def test_records_take_the_bytes_that_their_widths_give():
    record, sizes, whole = described(Checkpoint.open(GOLDEN), names, Exl3Record(D, INNER, 2), 2, EXPERTS)
    assert (
        whole.tolist() == described(Checkpoint.open(GOLDEN), names, Exl3Record(D, INNER, 1), 2, EXPERTS).whole.tolist()
    )
    assert record.experts == EXPERTS
    assert record.kinds == (("mul1", 4), ("mul1", 6), ("mul1", 8))
    assert sizes.tolist() == [
        [record.slot_bytes(source(2).stored(layer, e)) for e in range(EXPERTS)] for layer in range(2)
    ]
    used = D * INNER // 2 // 16 * 12 + 2 * (3 * D + 3 * INNER // 2) + 128
    assert sizes[1, 3] == -(-used // 4096) * 4096  # (2, 2, 2)


def test_a_released_record_has_its_published_bytes():
    """GLM-5.3 on two ranks."""
    record = Exl3Record(6144, 2048, 2)
    bytes_of = {bits: record.slot_bytes(Stored((2 * bits,) * 3, ("mcg",) * 3)) for bits in (2, 3, 4, 8)}
    assert bytes_of == {2: 4_763_648, 3: 7_122_944, 4: 9_482_240, 8: 18_919_424}


def test_one_pass_reads_the_records_of_all_ranks_once():
    parts = [source(2, rank) for rank in range(2)]
    every = EveryRank(parts)
    for layer, expert in [(0, 3), (1, 5), (2, 0)]:
        room = torch.full((every.slot_bytes(layer, expert),), 0xAA, dtype=torch.uint8)
        before = every.stats
        every.read(layer, expert, room.numpy().data)
        assert torch.equal(room, torch.cat([read(one, layer, expert)[0] for one in parts]))
        assert every.stats.reads == before.reads + 1, "an expert lies in one run"
        whole = sum(3 * bits for bits in every._sources[0].stored(layer, expert).half_bits) * D * INNER // 16 // 3
        assert every.stats.read_bytes - before.read_bytes < whole + 4096


def test_room_for_the_largest_takes_any_record_and_what_is_behind_stays():
    one = source(2)
    room = torch.full((read(one, 0, 3).numel() + 4096,), 0xAA, dtype=torch.uint8)
    one.read(0, 0, room.numpy().data)
    nbytes = one.slot_bytes(0, 0)
    assert torch.equal(room[:nbytes], read(one, 0, 0)[0])
    assert bool((room[nbytes:] == 0xAA).all())
    with pytest.raises(ValueError, match="bytes of room"):
        one.read(0, 0, memoryview(bytearray(nbytes - 1)))


def random_experts(path: Path, stored: Stored, signs: bool = False) -> Path:
    """A checkpoint of one expert; any words are a legal trellis."""
    draw, tensors = torch.Generator().manual_seed(4), {}
    sides = ((D, INNER), (D, INNER), (INNER, D))
    for name, (k, n), bits, book in zip(names(0, 0), sides, *stored, strict=True):
        words = torch.randint(-(1 << 15), 1 << 15, (k // 16, n // 16, 8 * bits), generator=draw)
        tensors[f"{name}.trellis"] = words.to(torch.int16)
        if book != "3inst":
            tensors[f"{name}.{book}"] = torch.zeros(1, dtype=torch.int32)
        for leaf, length in (("su", k), ("sv", n)):
            if signs:
                words = torch.randint(-(1 << 15), 1 << 15, (length // 16,), generator=draw)
                tensors[f"{name}.{leaf}"] = words.to(torch.int16)
            else:
                tensors[f"{name}.{leaf}h"] = torch.randn(length, generator=draw).half() / 8
    return written(path, tensors)


def written(path: Path, tensors: dict[str, Tensor], config: bytes = b"{}") -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_bytes(config)
    return path


MIXES = [
    Stored((2, 3, 5), ("mul1", "mul1", "mul1")),
    Stored((7, 10, 12), ("mul1", "mcg", "3inst")),
    Stored((14, 16, 6), ("3inst", "mul1", "mcg")),
]


@pytest.mark.parametrize("signs", [False, True], ids=["scales", "signs"])
@pytest.mark.parametrize("stored", MIXES, ids=str)
def test_any_widths_and_codebooks_are_what_their_dense_weights_are(tmp_path, stored, signs):
    path, x = random_experts(tmp_path, stored, signs), torch.randn(3, D, generator=torch.Generator().manual_seed(1))
    x /= 10 if signs else 1
    tensors, dense = load_file(path / "model.safetensors"), []
    for name, book in zip(names(0, 0), stored.codebooks, strict=True):
        scales = [exl3.signs(tensors[f"{name}.{s}"]) if signs else tensors[f"{name}.{s}h"] for s in ("su", "sv")]
        dense.append(exl3.dense(exl3.Exl3Matrix(tensors[f"{name}.trellis"], *scales, book)))
    gate, up, down = dense
    wanted = (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    parts = [computed(read(one, 0, 0), one.record, x) for one in (source(2, rank, path) for rank in range(2))]
    assert off(sum(parts), wanted) < 1e-5


def renamed(tmp_path: Path, change) -> Checkpoint:
    tensors = load_file(random_experts(tmp_path, MIXES[0]) / "model.safetensors")
    return Checkpoint.open(written(tmp_path, change(tensors)))


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("model.layers.1.mlp.experts.0.gate_proj.rank0.trellis", "rank-sliced export.*rank0.trellis"),
        ("model.layers.1.mlp.experts.0.gate_proj.perm", "permuted export.*gate_proj.perm"),
        ("model.layers.1.mlp.experts.0.channel_permutation", "permuted export.*channel_permutation"),
        ("model.layers.1.mlp.experts.0.down_proj.scale", "not EXL3's.*down_proj.scale"),
    ],
)
def test_exports_of_other_kinds_are_refused_by_name(tmp_path, added, said):
    checkpoint = renamed(tmp_path, lambda tensors: tensors | {added: torch.zeros(4)})
    with pytest.raises(DataError, match=said):
        refuse_exports(checkpoint)
    refuse_exports(Checkpoint.open(GOLDEN))


def test_a_permutation_that_only_the_configuration_tells_of_is_refused(tmp_path):
    random_experts(tmp_path, MIXES[0])
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"a": {"intermediate_permuted": true}, "perm": null}}'
    )
    with pytest.raises(DataError, match=r"permuted export.*quantization_config\.a\.intermediate_permuted"):
        refuse_exports(Checkpoint.open(tmp_path))


GATE = "model.layers.1.mlp.experts.0.gate_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("trellis", None, "trellis is missing"),
        ("suh", None, "suh is missing"),
        ("trellis", torch.zeros(16, 8, 16, dtype=torch.int16), "needs"),
        ("trellis", torch.zeros(16, 16, 36, dtype=torch.int16), r"2\.25 bits a weight do not exist"),
        ("trellis", torch.zeros(16, 256, dtype=torch.int16), "a trellis is I16"),
        ("svh", torch.zeros(128).half(), r"scales of 256 values are F16 \[256\]"),
        ("mcg", torch.zeros(1, dtype=torch.int32), "two markers"),
        ("mul1", torch.zeros(2, dtype=torch.int32), "a marker has one value"),
        ("bias", torch.zeros(256).half(), "bias"),
    ],
)
def test_tensors_that_are_no_such_matrix_are_named(tmp_path, name, tensor, said):
    def change(tensors):
        left = {key: value for key, value in tensors.items() if key != f"{GATE}.{name}"}
        return left if tensor is None else left | {f"{GATE}.{name}": tensor}

    with pytest.raises(TensorError, match=said):
        Exl3Source(renamed(tmp_path, change), names, Exl3Record(D, INNER, 1), 0).stored(0, 0)


def test_half_widths_need_the_codebook_that_has_them(tmp_path):
    with pytest.raises(TensorError, match=r"2\.5 bits a weight do not exist with the codebook 3inst"):
        source(path=random_experts(tmp_path, Stored((5, 4, 4), ("3inst", "mcg", "mcg")))).stored(0, 0)


def test_a_rank_gets_whole_blocks():
    with pytest.raises(ValueError, match="whole blocks of 128"):
        Exl3Record(256, 256, 4)
    with pytest.raises(ValueError, match="whole blocks"):
        Exl3Record(192, 256, 1)


def test_bytes_that_are_no_record_are_not_computed_with():
    slots = read(source(), 0, 0)
    slots[0, 0] = 9
    with pytest.raises(ValueError, match="no EXL3 expert"):
        computed(slots, Exl3Record(D, INNER, 1), torch.zeros(1, D))
    with pytest.raises(ValueError, match=r"no EXL3 expert: 2\.5"):
        stored_of(header_of(Stored((5, 4, 4), ("mcg", "mcg", "mcg"))))


def test_packs_give_the_checkpoints_records(tmp_path):
    from tided.engine.packing import pack_checkpoint, pack_header
    from tided.models.families import family_of

    checkpoint = Checkpoint.open(GOLDEN)
    paths = pack_checkpoint(GOLDEN, 2, None, tmp_path, lambda *_: None)
    assert [path.name for path in paths] == ["experts-rank-0-of-2.exl3", "experts-rank-1-of-2.exl3"]
    for rank in range(2):
        header = pack_header(checkpoint, family_of(checkpoint.config), rank, 2)
        packed, plain = PackSource(tmp_path, header, True), source(2, rank)
        for layer in range(2):
            for expert in range(EXPERTS):
                room = torch.zeros(plain.slot_bytes(layer, expert), dtype=torch.uint8)
                packed.read(layer, expert, room.numpy().data)
                assert torch.equal(room, read(plain, layer, expert)[0])
    with pytest.raises(DataError, match="stored otherwise than this checkpoint's"):
        PackSource(tmp_path, changed(header, matrices="24" * (len(header.matrices) // 2)), True)
    with pytest.raises(DataError, match="is missing"):
        PackSource(tmp_path, changed(header, rank=0, ranks=1), True)


@pytest.mark.parametrize("byte", [0, 1, 2, 3, 4, 5, 6, 127])
def test_a_record_of_a_pack_that_begins_otherwise_is_refused_at_its_read(tmp_path, byte):
    """By whoever reads it, checksums or not: a GPU finds no matrix by such a header, and computes zeros."""
    from tided.engine.packing import pack_checkpoint, pack_header
    from tided.models.families import family_of

    checkpoint = Checkpoint.open(GOLDEN)
    path = pack_checkpoint(GOLDEN, 2, None, tmp_path, lambda done, total: None)[1]
    header = pack_header(checkpoint, family_of(checkpoint.config), 1, 2)
    damaged = bytearray(path.read_bytes())
    damaged[header.offset(EXPERTS + 2) + byte] ^= 2
    path.write_bytes(damaged)
    packed = PackSource(tmp_path, header, False)
    for expert in range(EXPERTS):
        room = torch.zeros(header.nbytes(EXPERTS + expert), dtype=torch.uint8)
        if expert != 2:
            packed.read(1, expert, room.numpy().data)
            continue
        for _ in range(2):
            with pytest.raises(DataError, match="expert 2 of layer 1 is damaged: it begins with") as caught:
                packed.read(1, expert, room.numpy().data)
        assert f"{path.name}:{header.offset(EXPERTS + 2)}" in caught.value.where


def test_who_reads_is_chosen_by_the_record():
    assert isinstance(source_of(Checkpoint.open(GOLDEN), names, Exl3Record(D, INNER, 1), 0), Exl3Source)
