"""Small fields that every route shares: the model's name, the salt of the prompt cache, the stop string in the text."""

import hashlib

import pytest
from scripted_engine import data, gather, said

USER = [{"role": "user", "content": "hi"}]
ROUTES = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_another_name_is_served_unless_the_profile_wants_the_models_own(serve, engine, path):
    engine.script("</think>x")
    body = ROUTES[path]
    easy = await serve()
    assert (await easy.ask({**body, "model": "gpt-x"}, path=path))[0] == 200
    strict = await serve(strict_model=True, model_aliases=("claude-tidelm",))
    for name in ("deepseek", "claude-tidelm", None):
        assert (await strict.ask({**body, "model": name}, path=path))[0] == 200, name
    before = len(engine.answers)
    status, reply = await strict.ask({**body, "model": "gpt-x"}, path=path)
    assert status == 404
    assert len(engine.answers) == before
    if path == "/v1/messages":
        assert reply["error"]["type"] == "not_found_error"
    else:
        assert (reply["error"]["code"], reply["error"]["param"]) == ("model_not_found", "model")


async def test_counting_asks_for_the_name_too(serve):
    strict = await serve(strict_model=True)
    body = {"messages": USER, "model": "gpt-x"}
    assert (await strict.ask(body, path="/v1/messages/count_tokens"))[0] == 404
    assert (await strict.ask({**body, "model": "deepseek"}, path="/v1/messages/count_tokens"))[0] == 200


@pytest.mark.parametrize("path", ROUTES)
async def test_a_salt_reaches_the_engine_and_changes_no_prompt(server, engine, path):
    engine.script("</think>x")
    prompts = []
    for fields, salt in (({}, ""), ({"cache_salt": "tenant 7"}, "tenant 7"), ({"cache_salt": None}, "")):
        assert (await server.ask({**ROUTES[path], **fields}, path=path))[0] == 200
        assert engine.request.cache_salt == salt
        prompts.append(engine.request.prompt_ids)
    assert prompts[0] == prompts[1] == prompts[2]
    for wrong in (7, "x" * 257):
        status, reply = await server.ask({**ROUTES[path], "cache_salt": wrong}, path=path)
        assert status == 400
        assert reply["error"]["message"].startswith("cache_salt: ")


@pytest.mark.parametrize("pieces", [["a ST", "OP", " more"], ["a STOP"], list("a STOP!")])
async def test_a_stop_string_is_shown_where_it_is_asked_for(server, engine, pieces):
    engine.play = lambda answer: [answer.start().say("</think>"), *map(answer.say, pieces)]
    for path, text_of in (
        ("/v1/chat/completions", lambda choice: choice["message"]["content"]),
        ("/v1/completions", lambda choice: choice["text"].removeprefix("</think>")),
    ):
        for shows, text in ((True, "a STOP"), (False, "a ")):
            fields = {"stop": ["STOP"], "include_stop_str_in_output": shows}
            _, reply = await server.ask({**ROUTES[path], **fields}, path=path)
            assert text_of(reply["choices"][0]) == text
            assert (reply["choices"][0]["finish_reason"], reply["choices"][0]["stop_reason"]) == ("stop", "STOP")
    chunks = data(await server.stream(said("hi", stop=["STOP"], include_stop_str_in_output=True)))
    assert gather(chunks)["content"] == "a STOP"


async def test_keys_do_not_find_each_others_prompts_unless_the_profile_says_so(serve, engine, tmp_path):
    engine.script("</think>x")
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    server, shared = await serve(api_keys_file=str(keys)), await serve(api_keys_file=str(keys), shared_cache=True)

    async def salt(asked, key, **fields):
        for path, body in ROUTES.items():
            assert (await asked.ask({**body, **fields}, path=path, headers={"x-api-key": key}))[0] == 200
        [found] = {answer.request.cache_salt for answer in engine.answers[-len(ROUTES) :]}
        return found

    salts = [await salt(server, key, cache_salt=own) for key in ("one", "two") for own in ("", "a", "b")]
    assert len(set(salts)) == len(salts)
    assert await salt(server, "one", cache_salt="a") == salts[1]
    assert [await salt(shared, key, cache_salt="a") for key in ("one", "two")] == ["a", "a"]
    # What is sent to other ranks is not what a key is known by.
    assert not any(hashlib.sha256(b"one").hexdigest()[:8] in salt for salt in salts)
    keys.write_text("one\n")
    alone = await serve(api_keys_file=str(keys))
    assert await salt(alone, "one") == ""
