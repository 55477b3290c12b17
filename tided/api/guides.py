"""The grammar that an answer is held to, from its shape and its tools."""

from collections.abc import Callable
from functools import partial

from tided.api.served import ServedModel
from tided.chat.fields import refuse
from tided.chat.grammar import Allowance, Grammar
from tided.chat.grammar_terms import AnswerGrammar
from tided.chat.messages import Conversation, Start
from tided.chat.shape import AnswerShape
from tided.engine.types import Guide


class Guides:
    """Opens a guide for each answer; `None` grammar: the answer is free."""

    def __init__(self, grammar: Grammar | None, after: int | None, banned: tuple[int, ...]) -> None:
        self.grammar, self._after, self._banned = grammar, after, banned

    def open(self) -> Guide | None:
        return None if self.grammar is None else self.grammar.open(self._after, self._banned)


FREE_GUIDES = Guides(None, None, ())


def guides_for(
    shape: AnswerShape, conversation: Conversation, start: Start, served: ServedModel, alive: Callable[[], None]
) -> Guides:
    """What this answer must keep to. Raises RequestError for what cannot be enforced. Runs in a thread; `alive` ends
    the work by raising."""
    if shape.format is not None and conversation.continue_final and start == "content":
        refuse(shape.format.param, "a text that was begun cannot be held to a format; leave out its beginning")
    family, tokenizer, allowance = served.family, served.tokenizer, Allowance(alive)
    usable = partial(served.grammars.error, param="tools", allowance=allowance)
    text, param = _grammar(shape, conversation, start, family.grammar(tokenizer, usable))
    if text is None:
        return FREE_GUIDES
    after = tokenizer.special_id(family.end_think) if start == "reasoning" else None
    barred = tuple(tokenizer.special_id(token) for token in family.barred_from_reasoning)
    return Guides(served.grammars.compile(text, param, allowance), after, barred)


def _grammar(
    shape: AnswerShape, conversation: Conversation, start: Start, grammar: AnswerGrammar
) -> tuple[str | None, str]:
    """(the grammar's text, the field that asks for it)."""
    tools = shape.callable(conversation.tools)
    if shape.choice.mode == "required":
        return grammar.calls(tools, start, forced=True, single=shape.single), "tools"
    if shape.format is not None:
        return grammar.json(shape.format.schema, tools), shape.format.param
    if shape.bound(tools):
        return grammar.calls(tools, start, forced=False, single=shape.single), "tools"
    return None, ""
