"""A trace: what a router wanted, token after token, and which tokens belong to one request.

Synthetic ones come from `traffic`, recorded ones from `bench/record_routing.py`. On disk a trace is one safetensors
file: experts and weights [tokens, layers, top_k] (weights as bytes, 255 is 1), and the requests in its metadata.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tided.errors import DataError
from tided.tide.demand import Grid, RouterShape

FORMAT = "tide-trace-1"


class Span(msgspec.Struct, frozen=True):
    """Tokens [first, first + prompt + answer) are one request."""

    first: int
    prompt: int
    answer: int
    topic: str


@dataclass(frozen=True)
class Trace:
    """experts int16 and weights float32 [tokens, layers, top_k]: the true picks, and their routing weights, which sum
    to 1 a token and layer. `base` [layers, experts]: what a seed knows of this traffic before it comes."""

    shape: RouterShape
    experts: npt.NDArray[np.int16]
    weights: npt.NDArray[np.float32]
    requests: list[Span]
    base: Grid

    @property
    def switches(self) -> list[int]:
        """Indices of requests whose topic is not that of the request before."""
        topics = [request.topic for request in self.requests]
        return [at for at in range(1, len(topics)) if topics[at] != topics[at - 1]]

    def flat(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """The picks of some tokens as layer * experts + expert [count, layers * top_k]."""
        picks = self.experts[first : first + count].astype(np.int64)
        offsets = np.arange(self.shape.layers, dtype=np.int64) * self.shape.experts
        return (picks + offsets[:, None]).reshape(count, -1)

    def weight(self, first: int, count: int) -> npt.NDArray[np.float64]:
        """[count, layers * top_k], in the order of `flat`."""
        return self.weights[first : first + count].astype(np.float64).reshape(count, -1)


def shuffled(trace: Trace, seed: int) -> Trace:
    """The control: every token's experts get other names, drawn anew for each token and layer. As many picks of the
    same weights, but neither popularity nor memory: no policy can do better than chance."""
    rng = np.random.default_rng(seed)
    tokens, layers, top_k = trace.experts.shape
    noise = rng.random((tokens, layers, trace.shape.experts), dtype=np.float32)
    experts = np.argpartition(noise, top_k, axis=2)[:, :, :top_k].astype(np.int16)
    return Trace(trace.shape, experts, trace.weights, trace.requests, np.ones_like(trace.base))


def save(trace: Trace, path: Path) -> None:
    # Rounded so that a row still sums to 255: the largest takes what rounding left.
    coarse = np.rint(trace.weights * 255).astype(np.int64)
    largest = coarse.argmax(axis=2)[..., None]
    rest = 255 - coarse.sum(axis=2, keepdims=True)
    np.put_along_axis(coarse, largest, np.take_along_axis(coarse, largest, 2) + rest, 2)
    tensors = {
        "experts": trace.experts.astype(np.uint8 if trace.shape.experts <= 256 else np.int16),
        "weights": coarse.astype(np.uint8),
        "base": trace.base.astype(np.float32),
    }
    requests = msgspec.json.encode(trace.requests).decode()
    save_file(tensors, path, metadata={"format": FORMAT, "requests": requests})


def load(path: Path) -> Trace:
    """Raises DataError for a file that is no trace."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in ("experts", "weights", "base")}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
        requests = msgspec.json.decode(metadata["requests"], type=list[Span])
        return _checked(tensors["experts"], tensors["weights"], tensors["base"], requests)
    except (OSError, SafetensorError, ValueError, KeyError, msgspec.DecodeError) as e:
        raise DataError(f"is no trace of a router: {e}", where=str(path)) from e


def _checked(
    experts: npt.NDArray[np.generic], weights: npt.NDArray[np.generic], base: npt.NDArray[np.generic], spans: list[Span]
) -> Trace:
    if experts.ndim != 3 or experts.shape != weights.shape or base.ndim != 2 or len(base) != experts.shape[1]:
        raise ValueError(f"shapes {experts.shape}, {weights.shape} and {base.shape} do not fit")
    shape = RouterShape(base.shape[0], base.shape[1], experts.shape[2])
    picks = experts.astype(np.int16)
    if picks.size and not (picks.min() >= 0 and picks.max() < shape.experts):
        raise ValueError("it names experts that the model does not have")
    at = 0
    for span in spans:
        if span.first != at or span.prompt < 0 or span.answer < 0:
            raise ValueError(f"a request begins at token {span.first}, not at {at}")
        at += span.prompt + span.answer
    if at != len(picks):
        raise ValueError(f"its requests have {at} tokens, the picks {len(picks)}")
    shares: npt.NDArray[np.float32] = weights.astype(np.float32) / np.float32(255)
    return Trace(shape, picks, shares, spans, base.astype(np.float64))
