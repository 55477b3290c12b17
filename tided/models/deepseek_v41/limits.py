"""What of a profile this model cannot be served with, whatever its tensors hold: without torch, so that a profile is
checked within milliseconds."""

from collections.abc import Iterator
from typing import NamedTuple

from tided.settings import Settings


class Refusal(NamedTuple):
    key: str
    what: str
    hint: str


def refusals(settings: Settings, draft_tokens: int) -> Iterator[Refusal]:
    """Compressed rows are rounded to the model's own formats, and every rank's heads need all of them. `draft_tokens`:
    of one proposal; 0 where there is no drafter."""
    cache, draft = settings.cache, settings.engine.draft
    if settings.model.ablation:
        what = "'model.ablation': this model takes no projection at run time"
        yield Refusal("model.ablation", what, "a file of edited weights goes to model.overlay")
    if cache.dtype != "bf16":
        yield Refusal("cache.dtype", f"cache.dtype = {cache.dtype!r}: this model has its own", 'leave it "bf16"')
    if draft.isdigit() and int(draft) > draft_tokens > 0:
        what = f"engine.draft = {draft!r}: this drafter proposes {draft_tokens} tokens"
        yield Refusal("engine.draft", what, "set fewer")
    if cache.split:
        what = "cache.split = true: every rank of this model keeps all of a context"
        yield Refusal("cache.split", what, "leave it out")
