"""Cached latents in FP8: the bytes by the published layout, and how far they may be from what was stored."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.latent_rows import pack, row_bytes, unpack


def rows(count: int, latent: int, rope: int, seed: int = 0):
    found = torch.randn(count, latent + rope, generator=torch.Generator().manual_seed(seed))
    return found * torch.logspace(-3, 3, count).unsqueeze(1)


def test_a_row_of_the_released_model_has_656_bytes():
    assert row_bytes(512, 64) == 656
    assert pack(rows(3, 512, 64), 512).shape == (3, 656)


def test_a_row_is_codes_then_scales_then_the_rotated_key():
    """Read by hand, byte by byte."""
    given = rows(2, 512, 64)
    raw = bytes(pack(given, 512)[1].tolist())
    scales = struct.unpack("<4f", raw[512:528])
    for group in range(4):
        latent = given[1, 128 * group : 128 * (group + 1)]
        assert scales[group] == pytest.approx(float(latent.abs().max()) / 448)
        codes = [_e4m3(byte) for byte in raw[128 * group : 128 * (group + 1)]]
        assert max(map(abs, codes)) == 448
        for code, value in zip(codes, latent.tolist(), strict=True):
            assert abs(code * scales[group] - value) <= max(abs(value) / 16, scales[group] / 1024) * 1.0001
    key = [struct.unpack("<f", bytes([0, 0, *raw[i : i + 2]]))[0] for i in range(528, 656, 2)]
    assert key == given[1, 512:].bfloat16().tolist()


def _e4m3(byte: int) -> float:
    sign, exponent, mantissa = (-1 if byte & 128 else 1), byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(512, 64), (64, 16), (192, 32)]), st.integers(0, 1000))
def test_what_is_read_is_near_what_was_kept(dims, seed):
    latent, rope = dims
    kept = rows(5, latent, rope, seed)
    read = unpack(pack(kept, latent), latent)
    most = torch.stack([part.abs().amax(1) for part in kept[:, :latent].split(128, 1)], 1) / 448
    bound = torch.maximum(kept[:, :latent].abs() / 16, most.repeat_interleave(128, 1)[:, :latent] / 1024)
    assert bool(((read[:, :latent] - kept[:, :latent]).abs() <= bound * 1.0001).all())
    assert torch.equal(read[:, latent:], kept[:, latent:].bfloat16().float())


def test_a_row_packed_again_is_the_same_and_has_the_bytes_it_has_alone():
    kept = rows(7, 512, 64)
    packed = pack(kept, 512)
    assert torch.equal(torch.cat([pack(row.unsqueeze(0), 512) for row in kept]), packed)
    assert torch.equal(pack(unpack(packed, 512), 512), packed)
    assert torch.equal(unpack(packed.view(7, 1, 656), 512)[:, 0], unpack(packed, 512))


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38])
def test_groups_of_nothing_and_of_extremes_stay_numbers(value):
    kept = torch.full((1, 512 + 64), value)
    read = unpack(pack(kept, 512), 512)
    assert bool(torch.isfinite(read[:, :512]).all())
    torch.testing.assert_close(read[:, :512], kept[:, :512], rtol=1e-6, atol=1e-37)
