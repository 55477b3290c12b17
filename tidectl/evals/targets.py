"""Who scores: the server that runs, over HTTP, or the engine in this process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tidectl import http
from tidectl.waiting import Item, Show
from tided.engine.types import Fidelity, TokenLogprob
from tided.errors import DataError, UsageError
from tided.settings import Settings

CHECKED = "Tides rise, tides fall: 12 + 30 = 42 — où ça?"


class Start(NamedTuple):
    """How the engine is started for some cases. `share` of the experts resident, in percent; None: as it is. `edit`: of
    the model's weights, a file; empty: as it is."""

    share: float | None = None
    edit: str = ""


class Scored(NamedTuple):
    told: list[TokenLogprob]
    substituted: float | None


class Held(NamedTuple):
    """What a started engine has: experts resident and in all, the edit's sha256, changes of the set so far."""

    residents: int
    experts: int
    overlay: str
    generation: int

    @property
    def share(self) -> float:
        return 100 * self.residents / self.experts


class Scorer(Protocol):
    def score(self, ids: Sequence[int], fidelity: Fidelity) -> Scored:
        """Every token but the first."""
        ...

    def held(self) -> Held: ...


class Target(Protocol):
    """`tokenizer`: the directory of the model's tokenizer.json and config.json. `context_tokens`: most of one text."""

    name: str
    tokenizer: Path
    context_tokens: int

    def started(self, start: Start, show: Show) -> AbstractContextManager[Scorer]: ...


class Server:
    """A server that runs. It is not started anew: its budget and its weights are what they are."""

    def __init__(self, url: str, key: str, tokenizer: Path | None, top: int) -> None:
        self.url, self.key, self._top = url, key, top
        health = http.health(url)
        self.name = str(health.get("model", ""))
        self.context_tokens = int(health.get("max_context", 0)) - 1
        if health.get("engine") != "tidelm" or self.context_tokens < 1:
            raise UsageError(f"{url} is no TideLM server that serves", hint="see `tidectl status`")
        found = tokenizer or running_checkpoint(url)
        if found is None:
            hint = "--tokenizer DIR names a directory with its tokenizer.json and config.json"
            raise UsageError("the tokenizer of that server's model is not known here", where=url, hint=hint)
        self.tokenizer = found
        self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        from tided.chat.tokenizer import Tokenizer

        theirs = http.post(self.url, self.key, "/tokenize", {"prompt": CHECKED}).get("tokens")
        if theirs != Tokenizer.open(self.tokenizer).encode_text(CHECKED):
            raise DataError("the server's model has another tokenizer", where=str(self.tokenizer))

    @contextmanager
    def started(self, start: Start, show: Show) -> Iterator[Scorer]:
        yield self

    def held(self) -> Held:
        health = http.health(self.url)
        overlay = (health.get("overlay") or {}).get("sha256", "")
        return Held(int(health["residents"]), int(health["experts"]), overlay, int(health["generation"]))

    def score(self, ids: Sequence[int], fidelity: Fidelity) -> Scored:
        body = {
            "prompt": list(ids),
            "max_tokens": 0,
            "temperature": 0,
            "prompt_logprobs": self._top,
            "adapt": False,
            "fidelity": fidelity,
        }
        reply = http.post(self.url, self.key, "/v1/completions", body)
        [choice] = reply["choices"]
        told = [_read(token_id, one, self._top) for token_id, one in zip(ids, choice["prompt_logprobs"], strict=True)]
        stats = choice.get("x_engine_stats") or reply.get("x_engine_stats") or {}
        return Scored([one for one in told if one is not None], stats.get("substituted_weight_share"))


def _read(token_id: int, told: dict[str, dict[str, Any]] | None, top: int) -> TokenLogprob | None:
    """What `prompt_logprobs` says of one token."""
    if told is None:
        return None
    own = told[str(token_id)]
    ranked = sorted((one["rank"], -one["logprob"], int(name)) for name, one in told.items() if one["rank"] <= top)
    likeliest = [(name, -minus) for _, minus, name in ranked]
    return TokenLogprob(token_id, own["logprob"], likeliest, own["rank"])


def running_checkpoint(url: str) -> Path | None:
    """The directory of the model that this machine serves at `url`."""
    from contextlib import suppress

    from tidectl import runner
    from tidectl.running import running_url
    from tidectl.state import state_dir
    from tided.errors import TideError
    from tided.profile import load

    with suppress(TideError, OSError):
        run = runner.status(state_dir()).run
        here = running_url()
        if run is not None and here is not None and http.base_url(here) == url:
            return Path(load(Path(run.profile)).model.path)
    return None


class Offline:
    """The engine in this process, one rank, started for each budget; the set of a first start, which never changes."""

    def __init__(self, settings: Settings, tokens: int, top: int) -> None:
        from tided.engine.offline_scores import expert_count

        self._settings, self._top = settings, top
        self.name, self.tokenizer = settings.model.served_name, Path(settings.model.path)
        self.context_tokens = tokens
        self.least, self.experts = expert_count(settings)

    def residents(self, share: float) -> int:
        """Of all experts, as many as the model can do with at least."""
        return min(max(round(share / 100 * self.experts), self.least), self.experts)

    @contextmanager
    def started(self, start: Start, show: Show) -> Iterator[Scorer]:
        from tided.engine.offline_scores import scoring, settings_at

        resident = None if start.share is None else self.residents(start.share)
        settings = settings_at(edited(self._settings, start.edit), resident, self.context_tokens)

        def progress(what: str, done: int, total: int) -> None:
            show([Item(what, f"{done} of {total}" if total > 1 else "", done=done, total=total)])

        with scoring(settings, progress) as engine:
            overlay = engine.overlay_sha256
            held = Held(settings.experts.resident, self.experts, overlay, 0)
            yield _InProcess(engine.score, held, self._top)


class _InProcess:
    def __init__(
        self,
        score: Callable[[Sequence[int], Fidelity, int], tuple[list[TokenLogprob], dict[str, Any]]],
        held: Held,
        top: int,
    ) -> None:
        self._score, self._held, self._top = score, held, top

    def held(self) -> Held:
        return self._held

    def score(self, ids: Sequence[int], fidelity: Fidelity) -> Scored:
        told, stats = self._score(ids, fidelity, self._top)
        return Scored(told, stats.get("substituted_weight_share"))


def edited(settings: Settings, file: str) -> Settings:
    """With this edit in place of the profile's own; none where `file` is empty. Where it goes is the family's."""
    import json

    from msgspec.structs import replace

    from tided.chat.families import GLM53, family_of

    if not file:
        return settings
    config = json.loads((Path(settings.model.path) / "config.json").read_text(encoding="utf-8"))
    where = {"ablation": file, "overlay": ""} if family_of(config) is GLM53 else {"overlay": file, "ablation": ""}
    return replace(settings, model=replace(settings.model, **where))


def stock(settings: Settings) -> Settings:
    """Without any edit."""
    from msgspec.structs import replace

    return replace(settings, model=replace(settings.model, overlay="", ablation=""))
