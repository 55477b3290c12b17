"""A checkpoint in a hub's repository, read by ranges of bytes: nothing is fetched that is not asked for.

huggingface_hub finds addresses, names the commit and knows the user's token (HF_TOKEN, HF_ENDPOINT); the ranges are
ours. A transfer that breaks goes on where it broke, so no byte is fetched twice.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from packers.headers import LENGTH_BYTES, Shard, TensorInfo, header_length, shard_of, shown
from packers.shards import INDEX, SINGLE
from tided.errors import DataError, TensorError, UnavailableError

NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}(@[\w./-]{1,200})?")
PART_BYTES = 8 << 20  # a request
TRIES = 8  # failures in a row without a byte
LONGEST_WAIT_S = 30.0
TIMEOUT_S = 30.0  # for the next bytes
MAX_INDEX_BYTES = 100_000_000
REFUSED = {
    401: ("wants a token", "set HF_TOKEN, and accept the repository's terms"),
    403: ("is not open to this token", "accept the repository's terms with the account of HF_TOKEN"),
    404: ("is not there", "check the repository's name and revision"),
}


class Repository:
    """One commit of a repository. `fetched_bytes` counts the bytes of all bodies."""

    def __init__(self, name: str, commit: str, sizes: Mapping[str, int], sleep: Callable[[float], None]) -> None:
        self.name, self.commit, self.sizes = name, commit, sizes
        self.fetched_bytes = 0
        self._sleep = sleep
        self._shards: dict[str, Shard] = {}
        self._files: Mapping[str, str] = {}

    @classmethod
    def open(cls, name: str, sleep: Callable[[float], None] = time.sleep) -> "Repository":
        """`name`: owner/model, or owner/model@revision. Raises DataError for one that is not there or not open to the
        user, UnavailableError when the hub does not answer."""
        if not NAME.fullmatch(name):
            raise DataError("is no repository: owner/model or owner/model@revision", where=shown(name))
        model, _, revision = name.partition("@")
        info = _about(model, revision or None)
        sizes = {file.rfilename: file.size for file in info.siblings or () if file.size is not None}
        found = cls(model, str(info.sha), sizes, sleep)
        found._files = found._where()
        return found

    def names(self) -> Iterator[str]:
        return iter(self._files)

    def tensor(self, name: str) -> TensorInfo:
        """Where it lies in its file; reads that file's header once. Raises TensorError where there is none."""
        file = self._files.get(name)
        shard = self._shard(file) if file else None
        for info in shard.tensors if shard else ():
            if info.name == name:
                return info
        raise TensorError(f"tensor {shown(name)} is missing", where=self.name)

    def read(self, file: str, begin: int, end: int) -> Iterator[bytes]:
        """The bytes [begin, end) of a file, in parts as they come. Raises UnavailableError when they do not."""
        failures = 0
        while begin < end:
            came = 0
            try:
                for part in self._part(file, begin, min(end, begin + PART_BYTES)):
                    came += len(part)
                    self.fetched_bytes += len(part)
                    yield part
                failures = 0
            except _Broken as broken:
                failures = 1 if came else failures + 1
                if failures > TRIES:
                    raise UnavailableError(
                        f"{broken} ({failures} times in a row)",
                        where=f"{self.name}/{file}",
                        hint="run the same command again later: it goes on where it was",
                    ) from broken
                self._sleep(min(LONGEST_WAIT_S, max(broken.wait_s, 0.25 * 2**failures)))
            begin += came

    def _where(self) -> Mapping[str, str]:
        if INDEX in self.sizes:
            raw = b"".join(self.read(INDEX, 0, min(self.sizes[INDEX], MAX_INDEX_BYTES)))
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                return dict(msgspec.json.decode(raw, type=_Index).weight_map)
            raise DataError("is no index of a checkpoint", where=f"{self.name}/{INDEX}")
        if SINGLE in self.sizes:
            return {tensor.name: SINGLE for tensor in self._shard(SINGLE).tensors}
        raise DataError("holds no safetensors checkpoint", where=self.name)

    def _shard(self, file: str) -> Shard:
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
        if status == 200:
            raise DataError("the hub sends whole files only, not ranges", where=where)
        if status != 206:
            wait = response.headers.get("Retry-After", "")
            raise _Broken(f"the hub answers {status}", float(wait) if wait.isdigit() else 0.0)
        if not response.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
            raise DataError("the hub sends another range than was asked for", where=where)


class _Broken(Exception):
    """Another try may do. `wait_s`: not before that."""

    def __init__(self, what: str, wait_s: float = 0.0) -> None:
        super().__init__(what)
        self.wait_s = wait_s


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _about(model: str, revision: str | None) -> Any:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return HfApi().model_info(model, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        what, hint = REFUSED[404]
        raise DataError(what, where=model, hint=f"{hint}; a private one wants HF_TOKEN") from error
    except (HTTPError, OSError) as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        raise UnavailableError(f"the hub does not answer: {said}", where=model, hint="try again later") from error
