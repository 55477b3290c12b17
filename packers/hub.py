"""A checkpoint in a hub's repository, read by ranges of bytes: nothing is fetched that is not asked for.

huggingface_hub finds addresses, names the commit and knows the user's token (HF_TOKEN, HF_ENDPOINT); the ranges are
ours. A transfer that breaks goes on where it broke, so no byte is fetched twice.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from packers.headers import LENGTH_BYTES, Shard, TensorInfo, header_length, shard_of, shown
from packers.shards import INDEX, SINGLE
from tided.errors import DataError, TensorError, UnavailableError

NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}(@[\w./-]{1,200})?")
SHA256, GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
PART_BYTES = 8 << 20  # a request
TRIES = 8  # failures in a row without a byte
LONGEST_WAIT_S = 30.0
TIMEOUT_S = 30.0  # for the next bytes
MAX_INDEX_BYTES = 100_000_000
MOST_DIGITS = 18
LISTED = "its listing says more or less than its file holds; try again later, or another revision"
REFUSED = {
    401: ("wants a token", "set HF_TOKEN, and accept the repository's terms"),
    403: ("is not open to this token", "accept the repository's terms with the account of HF_TOKEN"),
    404: ("is not there", "check the repository's name and revision"),
}


class Published(NamedTuple):
    """What the hub says of a file. `sha256`: of its bytes, where it is kept as a large file; `git`: the name of its
    blob, a SHA-1, where it is kept as a small one. Empty: not told."""

    size: int
    sha256: str = ""
    git: str = ""


class Repository:
    """One commit of a repository, read by any number of threads. `fetched_bytes` counts the bytes of all bodies.
    `tries`: failures in a row, without a byte between them, that are too many."""

    def __init__(
        self, name: str, commit: str, files: Mapping[str, Published], sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.name, self.commit, self.files = name, commit, files
        self.sizes: Mapping[str, int] = {file: said.size for file, said in files.items()}
        self.fetched_bytes = 0
        self.tries = TRIES
        self._sleep, self._count = sleep, threading.Lock()
        self._shards: dict[str, Shard] = {}

    @classmethod
    def open(cls, name: str, sleep: Callable[[float], object] = time.sleep) -> "Repository":
        """`listed`, and of a checkpoint: its index is read."""
        found = cls.listed(name, sleep)
        _ = found.weight_map
        return found

    @classmethod
    def listed(cls, name: str, sleep: Callable[[float], object] = time.sleep) -> "Repository":
        """`name`: owner/model, or owner/model@revision. Raises DataError for one that is not there or not open to the
        user, UnavailableError when the hub does not answer."""
        if not NAME.fullmatch(name):
            raise DataError("is no repository: owner/model or owner/model@revision", where=shown(name))
        model, _, revision = name.partition("@")
        info = _about(model, revision or None)
        if not GIT.fullmatch(str(info.sha)):
            raise DataError("the hub names no commit of it", where=model)
        return cls(model, str(info.sha), dict(_published(info)), sleep)

    def names(self) -> Iterator[str]:
        return iter(self.weight_map)

    def tensor(self, name: str) -> TensorInfo:
        """Where it lies in its file; reads that file's header once. Raises TensorError where there is none."""
        file = self.weight_map.get(name)
        shard = self.shard(file) if file else None
        for info in shard.tensors if shard else ():
            if info.name == name:
                return info
        raise TensorError(f"tensor {shown(name)} is missing", where=self.name)

    def read(self, file: str, begin: int, end: int, part_bytes: int = 0) -> Iterator[bytes]:
        """The bytes [begin, end) of a file, in parts as they come, asked for by `part_bytes` (0: PART_BYTES) at a time.
        Raises UnavailableError when they do not."""
        part_bytes = part_bytes or PART_BYTES
        failures = 0
        while begin < end:
            came = 0
            try:
                for part in self._part(file, begin, min(end, begin + part_bytes)):
                    came += len(part)
                    with self._count:
                        self.fetched_bytes += len(part)
                    yield part
                failures = 0
            except _Broken as broken:
                failures = 1 if came else failures + 1
                if failures > self.tries:
                    raise UnavailableError(
                        f"{broken} ({failures} times in a row)",
                        where=f"{self.name}/{file}",
                        hint="run the same command again later: it goes on where it was",
                    ) from broken
                self._sleep(min(LONGEST_WAIT_S, max(broken.wait_s, 0.25 * 2**failures)))
            begin += came

    @cached_property
    def weight_map(self) -> Mapping[str, str]:
        """Tensor -> its file. Raises DataError for a repository without a checkpoint."""
        if INDEX in self.sizes:
            raw = b"".join(self.read(INDEX, 0, min(self.sizes[INDEX], MAX_INDEX_BYTES)))
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                return dict(msgspec.json.decode(raw, type=_Index).weight_map)
            raise DataError("is no index of a checkpoint", where=f"{self.name}/{INDEX}")
        if SINGLE in self.sizes:
            return {tensor.name: SINGLE for tensor in self.shard(SINGLE).tensors}
        raise DataError("holds no safetensors checkpoint", where=self.name)

    def shard(self, file: str) -> Shard:
        """What the file's header says, which is read once. Raises as `read_shard`."""
        if file not in self._shards:
            path, size = Path(file), self.sizes.get(file, 0)
            prefix = b"".join(self.read(file, 0, min(LENGTH_BYTES, size)))
            length = header_length(Path(self.name) / path, size, prefix)
            header = b"".join(self.read(file, LENGTH_BYTES, LENGTH_BYTES + length))
            self._shards[file] = shard_of(path, size, header)
        return self._shards[file]

    def _part(self, file: str, begin: int, end: int) -> Iterator[bytes]:
        """At most [begin, end), fewer when the connection breaks without saying so. Raises _Broken, and DataError for
        what another try does not mend."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import HTTPError
        from huggingface_hub.utils import build_hf_headers, get_session

        headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        url = hf_hub_url(self.name, file, revision=self.commit)
        left = end - begin
        try:
            with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
                self._check(response, file, begin)
                for part in response.iter_raw():
                    yield part[:left]
                    left -= len(part)
                    if left <= 0:
                        return
        except HTTPError as error:
            raise _Broken(f"the transfer broke: {error or type(error).__name__}") from error
        if left:
            raise _Broken("the transfer ended early")

    def _check(self, response: Any, file: str, begin: int) -> None:
        where, status = f"{self.name}/{file}", response.status_code
        if status in REFUSED:
            what, hint = REFUSED[status]
            raise DataError(what, where=where, hint=hint)
        if status == 416:
            raise DataError(f"the hub's file ends before byte {begin}", where=where, hint=LISTED)
        if status == 200:
            raise DataError("the hub sends whole files only, not ranges", where=where)
        if status != 206:
            wait = response.headers.get("Retry-After", "")
            raise _Broken(f"the hub answers {status}", float(wait) if _is_number(wait) else 0.0)
        said = response.headers.get("Content-Range", "")
        if not said.startswith(f"bytes {begin}-"):
            raise DataError("the hub sends another range than was asked for", where=where)
        total = said.rpartition("/")[2]
        if _is_number(total) and int(total) != self.sizes.get(file, int(total)):
            raise DataError(f"the hub's file is {total} bytes long, not {self.sizes[file]}", where=where, hint=LISTED)


def _is_number(text: str) -> bool:
    """Digits that `int` reads, and few enough of them: a superscript is a digit too."""
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS


class _Broken(Exception):
    """Another try may do. `wait_s`: not before that."""

    def __init__(self, what: str, wait_s: float = 0.0) -> None:
        super().__init__(what)
        self.wait_s = wait_s


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _published(info: Any) -> Iterator[tuple[str, Published]]:
    for file in info.siblings or ():
        if file.size is not None:
            large, small = file.lfs.sha256 if file.lfs else "", file.blob_id or ""
            sha256 = large if SHA256.fullmatch(large) else ""
            yield file.rfilename, Published(file.size, sha256, small if not file.lfs and GIT.fullmatch(small) else "")


def _about(model: str, revision: str | None) -> Any:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return HfApi().model_info(model, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        what, hint = REFUSED[404]
        raise DataError(what, where=model, hint=f"{hint}; a private one wants HF_TOKEN") from error
    except (HTTPError, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in REFUSED:
            what, hint = REFUSED[status]
            raise DataError(what, where=model, hint=hint) from error
        said = str(error).partition("\n")[0] or type(error).__name__
        raise UnavailableError(f"the hub does not answer: {said}", where=model, hint="try again later") from error
