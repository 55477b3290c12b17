"""Device memory that other processes of this host map, by CUDA's own calls (`libcuda`, a stable interface): torch lends
whole tensors by pickles, and its symmetric memory (`torch.distributed._symmetric_memory`) is in alpha, takes handles
of files that containers often forbid, and refuses two ranks on one device.

All calls are of the calling thread's device. Memory that is lent is not given back before the process ends: a peer may
still read it."""

import ctypes
from functools import lru_cache

import torch

from tided.errors import UnavailableError

HANDLE_BYTES = 64
GRAIN_BYTES = 2 << 20  # a lent allocation shares its pages with no other
LAZY_PEER_ACCESS = 1
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class Handle(ctypes.Structure):
    """CUipcMemHandle, given by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


def lend(nbytes: int) -> tuple[int, bytes]:
    """Address of new memory of zeros, and what another process opens it by. Raises UnavailableError."""
    torch.cuda.synchronize()  # makes the device's context this thread's, should it be the first call
    address, handle = ctypes.c_uint64(), Handle()
    size = ctypes.c_size_t(-(-nbytes // GRAIN_BYTES) * GRAIN_BYTES)
    _call("cuMemAlloc_v2", ctypes.byref(address), size)
    _call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), size)
    _call("cuCtxSynchronize")
    _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return address.value, bytes(handle.reserved)


def borrow(handle: bytes) -> int:
    """Where a peer's memory lies for this process. Raises UnavailableError."""
    address = ctypes.c_uint64()
    its = Handle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), its, ctypes.c_uint(LAZY_PEER_ACCESS))
    return address.value


def why_apart(mine: int, uuid: str) -> str:
    """What keeps the device `mine` from the memory of the one with that identity, and from atomics on it; "" where
    nothing does."""
    other = next((number for number in range(torch.cuda.device_count()) if identity(number) == uuid), None)
    if other is None:
        return "this process does not see that device (CUDA_VISIBLE_DEVICES)"
    if other == mine:
        return ""
    if not torch.cuda.can_device_access_peer(mine, other):
        return f"device {mine} has no peer access to device {other}"
    found = ctypes.c_int()
    _call("cuDeviceGetP2PAttribute", ctypes.byref(found), ctypes.c_int(NATIVE_ATOMICS), mine, other)
    return "" if found.value else f"the link between devices {mine} and {other} has no atomics (NVLink has)"


def identity(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


@lru_cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnavailableError(f"CUDA's driver cannot be loaded: {error}") from error


def _call(name: str, *arguments: object) -> None:
    driver = _driver()
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise UnavailableError(f"{name}: {(text.value or b'').decode() or f'error {code}'}")
