"""The operator's socket: one line in, one line out, in a directory that is nobody else's."""

import asyncio
import errno
import socket
import stat

import msgspec
import pytest

from tided.control import operator
from tided.control.operator import NAME, AskBudget, OperatorSocket, ask
from tided.errors import NotRunningError, RequestError, TideError


class Answer(msgspec.Struct):
    resident: int


async def served(directory, handler):
    return await OperatorSocket.open(directory, handler)


async def asked(directory, question):
    return await asyncio.to_thread(ask, directory, question)


async def test_a_question_comes_and_its_answer_goes(tmp_path):
    heard = []

    async def handler(question):
        heard.append(question)
        return Answer(7)

    (tmp_path / NAME).write_text("what an earlier run left")
    server = await served(tmp_path, handler)
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
    question = AskBudget(resident=40, apply=True)
    assert await asked(tmp_path, question) == {"resident": 7}
    assert heard == [question]
    await server.close()
    assert not (tmp_path / NAME).exists()
    with pytest.raises(NotRunningError, match="no server listens"):
        await asked(tmp_path, question)


async def test_a_refusal_is_told_in_its_own_words(tmp_path):
    async def handler(question):
        raise RequestError("the budget stays as it is: 3 experts")

    server = await served(tmp_path, handler)
    with pytest.raises(TideError, match="stays as it is: 3 experts"):
        await asked(tmp_path, AskBudget(resident=3))
    await server.close()


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (KeyError("/secret/x"), "the question failed: KeyError"),
        (ValueError("/secret/x"), "the question failed: ValueError"),
        (OSError(errno.EIO, "an error", "/secret/x"), "the question failed: OSError: an error"),
        (TimeoutError("/secret/x"), "the answer took too long"),
    ],
)
async def test_a_mistake_of_ours_is_told_by_its_kind_and_the_socket_lives(tmp_path, raised, words):
    async def handler(question):
        raise raised

    server = await served(tmp_path, handler)
    for _ in range(2):
        with pytest.raises(TideError, match=words) as refused:
            await asked(tmp_path, AskBudget())
        assert "/secret" not in str(refused.value)
    await server.close()


@pytest.mark.parametrize(
    "line", [b"\n", b'{"type":"budget","more":1}\n', b"\xff\xfe\n", b"[" * 5000 + b"\n", b'{"type":"stop"}\n']
)
async def test_what_is_no_question_is_refused(tmp_path, line):
    async def handler(question):
        pytest.fail("it was taken for one")

    server = await served(tmp_path, handler)

    def say() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection, operator._short(tmp_path / NAME) as name:
            connection.settimeout(20)
            connection.connect(name)
            connection.sendall(line)
            return operator._line(connection)

    reply = msgspec.json.decode(await asyncio.to_thread(say))
    assert reply["type"] == "refused"
    await server.close()


async def test_a_client_that_says_nothing_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(operator, "LINE_S", 0.05)

    async def handler(question):
        return Answer(1)

    server = await served(tmp_path, handler)
    with socket.socket(socket.AF_UNIX) as silent, operator._short(tmp_path / NAME) as name:
        silent.connect(name)
        assert await asked(tmp_path, AskBudget()) == {"resident": 1}
        silent.settimeout(20)
        assert b"refused" in await asyncio.to_thread(operator._line, silent)
    await server.close()


async def test_a_long_path_is_no_hindrance(tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)

    async def handler(question):
        return Answer(1)

    server = await served(deep, handler)
    assert await asked(deep, AskBudget()) == {"resident": 1}
    await server.close()
