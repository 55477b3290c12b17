"""The grammar that an answer is held to, from its shape and its tools."""

from tided.api.served import ServedModel
from tided.chat.fields import refuse
from tided.chat.grammar import Grammar
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


def guides_for(shape: AnswerShape, conversation: Conversation, start: Start, served: ServedModel) -> Guides:
    """What this answer must keep to. Raises RequestError for what cannot be enforced. Runs in a thread."""
    if shape.format is not None and conversation.continue_final and start == "content":
        refuse(shape.format.param, "a text that was begun cannot be held to a format; leave out its beginning")
    family, tokenizer = served.family, served.tokenizer
    text, param = _grammar(shape, conversation, start, family.grammar(tokenizer, served.grammars.error))
    if text is None:
        return FREE_GUIDES
    after = tokenizer.special_id(family.end_think) if start == "reasoning" else None
    barred = tuple(tokenizer.special_id(token) for token in family.barred_from_reasoning)
    return Guides(served.grammars.compile(text, param), after, barred)


def _grammar(
    shape: AnswerShape, conversation: Conversation, start: Start, grammar: AnswerGrammar
) -> tuple[str | None, str]:
    """(the grammar's text, the field that asks for it)."""
    names = shape.choice.names
    tools = [tool for tool in conversation.tools if names is None or tool.name in names]
    if shape.choice.mode == "required":
        return grammar.calls(tools, start, forced=True, single=shape.single), "tools"
    if shape.format is not None:
        return grammar.json(shape.format.schema, tools), shape.format.param
    if tools and (names is not None or any(tool.strict for tool in tools)):
        return grammar.calls(tools, start, forced=False, single=shape.single), "tools"
    return None, ""
