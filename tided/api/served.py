"""The model that is served, as the API knows it: its text format, its tokens, its limits."""

from dataclasses import dataclass

from tided.chat.families import Family
from tided.chat.grammar import Grammars
from tided.chat.tokenizer import Tokenizer
from tided.errors import RequestError
from tided.settings import Settings


@dataclass(frozen=True)
class ServedModel:
    """`context_tokens`: the most that one request may hold. `tenant`: whose prompts are found in the prompt cache;
    empty: everybody's. `asker`: of whose requests these are; empty: the server is open."""

    family: Family
    tokenizer: Tokenizer
    grammars: Grammars
    settings: Settings
    context_tokens: int
    tenant: str = ""
    asker: str = ""

    @classmethod
    def of(cls, family: Family, tokenizer: Tokenizer, settings: Settings) -> "ServedModel":
        """Raises DataError for a tokenizer without the family's special tokens."""
        tokenizer.require(family.required_specials)
        return cls(
            family=family,
            tokenizer=tokenizer,
            grammars=Grammars(tokenizer, family.stop_tokens[0]),
            settings=settings,
            context_tokens=min(settings.cache.context_tokens, settings.cache.pool_tokens),
        )

    @property
    def sees(self) -> bool:
        """Whether images are taken."""
        return self.settings.vision.rank >= 0

    @property
    def names(self) -> list[str]:
        """What clients may call the model, its own name first."""
        return list(dict.fromkeys((self.settings.model.served_name, *self.settings.server.model_aliases)))

    def check_model(self, name: str | None) -> None:
        """Raises RequestError where the profile wants the model to be called by its name."""
        if self.settings.server.strict_model and name is not None and name not in self.names:
            raise unknown_model(self.settings.model.served_name)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(map(self.tokenizer.special_id, self.family.stop_tokens))


def unknown_model(served_name: str) -> RequestError:
    return RequestError(f"The model served here is {served_name}.", status=404, code="model_not_found", param="model")
