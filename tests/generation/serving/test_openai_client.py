"""tools/serve.py as the official `openai` client sees it; numbers against transformers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from torch import Tensor

from tests.generation.serving.server import END, FOLDER, NAME, POSITIONS, Server, make_model, serving

PROMPT = "The quick brown fox"
LIMITS = {"serve_max_requests": 200, "serve_max_body_bytes": 65536}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serving")
    make_model(path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, **LIMITS) as running:
        yield running
        running.idle()
    assert "Traceback" not in running.results[0][2]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[transformers.LlamaForCausalLM, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / NAME, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(FOLDER)


@torch.no_grad()
def logprobs(reference: tuple[Any, Any], tokens: list[int]) -> Tensor:
    """Returns transformers' log-probabilities, `[len(tokens), vocab]`; row i follows i + 1 tokens."""
    return reference[0](torch.tensor([tokens])).logits[0].log_softmax(-1)


def greedy(reference: tuple[Any, Any], tokens: list[int], count: int) -> list[int]:
    sequence = list(tokens)
    for _ in range(count):
        sequence.append(int(logprobs(reference, sequence)[-1].argmax()))
    return sequence[len(tokens) :]


def test_completions_and_their_logprobs(client: openai.OpenAI, reference: tuple[Any, Any]) -> None:
    prompt = reference[1](PROMPT)["input_ids"]
    expected = greedy(reference, prompt, 12)
    reply = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3,
                                      extra_body={"return_token_ids": True})  # fmt: skip
    choice = reply.choices[0]
    assert choice.logprobs is not None and reply.usage is not None
    assert choice.model_extra == {"token_ids": expected, "prompt_token_ids": prompt}
    assert (choice.text, choice.finish_reason) == (reference[1].decode(expected), "length")
    names = [reference[1].decode([token]) for token in expected]  # a blank stays, bytes of a character are no text
    assert choice.logprobs.tokens == names and any("\N{REPLACEMENT CHARACTER}" not in name for name in names)
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (len(prompt), len(prompt) + 12)
    rows = logprobs(reference, prompt + expected)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.tensor(choice.logprobs.token_logprobs), rows.max(-1).values, rtol=0, atol=1e-4)
    for top_logprobs, row in zip(choice.logprobs.top_logprobs or [], rows, strict=True):
        assert max(top_logprobs.values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert len(top_logprobs) <= 3 and sorted(top_logprobs.values(), reverse=True) == list(top_logprobs.values())


def test_echo_scores_the_prompt(client: openai.OpenAI, reference: tuple[Any, Any]) -> None:
    prompt = reference[1](PROMPT)["input_ids"]
    reply = client.completions.create(model=NAME, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    echoed = reply.choices[0].logprobs
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (PROMPT, "length")
    assert echoed is not None and echoed.token_logprobs is not None and echoed.token_logprobs[0] is None
    rows = logprobs(reference, prompt)[:-1]
    expected = rows.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(echoed.token_logprobs[1:]), expected, rtol=0, atol=1e-4)
    request: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": 4, "echo": True, "temperature": 0}
    streamed = "".join(piece.choices[0].text for piece in client.completions.create(**request, stream=True))
    assert streamed == PROMPT + reference[1].decode(greedy(reference, prompt, 4))


@pytest.mark.more
def test_lm_eval_scores_and_writes_through_it(server: Server, folder: Path) -> None:
    """lm-eval's `local-completions` equals its `hf` backend, which reads the model's folder."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    address, model = f"{server.address}/v1/completions", str(folder / NAME)
    client = LocalCompletionsAPI(model=NAME, base_url=address, tokenizer=model, num_concurrent=2, max_length=POSITIONS)
    reference = HFLM(pretrained=model, device="cpu", dtype="float32")
    pairs = [
        ("The quick brown", " fox"),
        ("", "A longer text by itself"),
        ("The quick brown fox", " is seldom so quick"),
    ]
    instances = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    scores = client.loglikelihood(instances)
    for (score, greedy_), (expected, expected_greedy) in zip(scores, reference.loglikelihood(instances), strict=True):
        assert score == pytest.approx(expected, abs=1e-3) and greedy_ == expected_greedy
    options = {"until": ["\n"], "max_gen_toks": 12}
    instances = [Instance("generate_until", {}, (text, options), number) for number, text in enumerate(["A", PROMPT])]
    assert client.generate_until(instances) == reference.generate_until(instances)


def test_chat_streamed_and_complete(client: openai.OpenAI, reference: tuple[Any, Any]) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {
        "role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}],
    }]  # fmt: skip
    messages.append({"role": "tool", "tool_call_id": "c1", "content": "Nine coins."})
    merged_messages = [messages[0], {"role": "user", "content": "Who are you?"}, messages[2]]
    prompt = reference[1].apply_chat_template(
        merged_messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    expected = greedy(reference, prompt, 10)
    request: dict[str, Any] = {
        "model": NAME,
        "messages": messages,
        "temperature": 0,
        "max_completion_tokens": 10,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"return_token_ids": True},
    }
    completion = client.chat.completions.create(**request)
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content) == ("assistant", reference[1].decode(expected))
    assert completion.usage.prompt_tokens == len(prompt) and choice.model_extra["prompt_token_ids"] == prompt
    content = choice.logprobs.content
    rows = logprobs(reference, prompt + expected)[len(prompt) - 1 : -1]
    actual = torch.tensor([[top.logprob for top in entry.top_logprobs] for entry in content])
    torch.testing.assert_close(actual, rows.topk(2).values, rtol=0, atol=1e-4)
    assert [entry.logprob for entry in content] == [entry.top_logprobs[0].logprob for entry in content]
    pieces = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert len(pieces) > 5, "as they come"
    *parts, last = (piece.choices[0] for piece in pieces if piece.choices)
    assert parts[0].delta.role == "assistant" and last.finish_reason == "length"
    assert "".join(part.delta.content or "" for part in (*parts, last)) == choice.message.content
    streamed = [entry.token for part in (*parts, last) for entry in part.logprobs.content]
    assert streamed == [entry.token for entry in content]
    assert pieces[-1].choices == [] and pieces[-1].usage == completion.usage


def test_seeds_choices_and_stops(client: openai.OpenAI) -> None:
    def write(**options: Any) -> list[str]:
        choices = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20, **options).choices
        assert [choice.index for choice in choices] == list(range(len(choices)))
        return [choice.text for choice in choices]

    texts = write(n=3, seed=5)
    assert texts == write(n=3, seed=5) and len(set(texts)) == 3
    assert write(seed=5) == texts[:1]
    assert write(seed=6) != texts[:1] and write() != write()
    assert write(top_p=0) == write(temperature=0) == write(temperature=1.3, extra_body={"top_k": 1})
    text = texts[0]
    stop = text[len(text) // 2 :][:2]
    assert write(seed=5, stop=[stop, "never seen at all"])[0] == text[: text.index(stop)]
    two_prompts = client.completions.create(model=NAME, prompt=[PROMPT, "A"], n=2, seed=5, max_tokens=20)
    assert [choice.text for choice in two_prompts.choices][:2] == texts[:2] and len(two_prompts.choices) == 4
    assert client.completions.create(model=NAME, prompt="", max_tokens=1).usage.prompt_tokens == 1  # type: ignore[union-attr]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).model_extra == {"dtype": "float32", "max_model_len": POSITIONS}
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4' here.* 'tiny-llama'"):
        client.models.retrieve("gpt-4")


def test_two_hundred_at_once(server: Server) -> None:
    """All are answered, each as it would be alone."""

    async def ask() -> list[str]:
        async with server.clients() as client:
            requests = [client.completions.create(model=NAME, prompt=f"Number {i % 20}", max_tokens=8, temperature=0)
                        for i in range(200)]  # fmt: skip
            return [reply.choices[0].text for reply in await asyncio.gather(*requests)]

    texts = asyncio.run(ask())
    assert texts == texts[:20] * 10
    with server.client() as client:
        single = client.completions.create(model=NAME, prompt="Number 7", max_tokens=8, temperature=0)
    assert single.choices[0].text == texts[7]
    load = server.idle()
    assert load["free_blocks"] == load["total_blocks"]


def test_clients_that_go_away_free_their_cache(server: Server) -> None:
    """50 of 60 leave, streaming or not, with thousands of tokens to come. The rest is answered."""
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": POSITIONS - 100, "temperature": 0}
    initial_load = server.idle()

    async def ask() -> list[str]:
        async with server.clients() as client:
            leaving = [asyncio.create_task(_endless(client, body, stream=i % 2 == 0)) for i in range(50)]
            assert (await _loaded(server, 50))["free_blocks"] < initial_load["free_blocks"]
            short_body: Any = {**body, "max_tokens": 20}
            staying = [asyncio.create_task(client.completions.create(**short_body)) for _ in range(10)]
            for task in leaving:
                task.cancel()
            return [reply.choices[0].text for reply in await asyncio.gather(*staying)]

    texts = asyncio.run(ask())
    for _ in range(20):  # 2000 steps of the server at most, fewer than those that left had before them
        server.post("/v1/completions", {**body, "max_tokens": 100, "ignore_eos": True})
        if (load := server.get("/health"))["free_blocks"] == initial_load["total_blocks"]:
            break
    assert load["running"] + load["waiting"] == 0 and load["free_blocks"] == initial_load["total_blocks"]
    single = server.post("/v1/completions", {**body, "max_tokens": 20})[1]
    assert texts == [single["choices"][0]["text"]] * 10


async def _loaded(server: Server, count: int) -> dict[str, Any]:
    """Returns the reply of `/health` once `count` texts run or wait."""
    while (load := await asyncio.to_thread(server.get, "/health"))["running"] + load["waiting"] < count:
        await asyncio.sleep(0.02)
    return load


async def _endless(client: openai.AsyncOpenAI, body: dict[str, Any], stream: bool) -> None:
    reply: Any = await client.completions.create(**body, stream=stream)
    if stream:
        async for _ in reply:
            pass
    raise AssertionError("it came to an end")


CALL = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"of": "a lantern"}'}}
REFUSED: list[tuple[str, Any, int, str, str]] = [
    ("completions", b"{", 400, "", "the body is not a JSON object"),
    ("completions", b"[1]", 400, "", "the body is not a JSON object"),
    ("completions", b'{"model": "\xff"}', 400, "", "the body is not a JSON object"),
    ("completions", {"prompt": "a"}, 400, "model", "model: is required"),
    ("completions", {}, 400, "prompt", "prompt: is required"),
    ("completions", {"model": "gpt-4", "prompt": "a"}, 404, "model", "there is no model 'gpt-4' here"),
    ("completions", {"prompt": 3}, 400, "prompt", "prompt: expected a text"),
    ("completions", {"prompt": [1, 99999]}, 400, "prompt", "prompt: 99999 is not a token id; token ids are 0 to"),
    ("completions", {"prompt": [[]]}, 400, "prompt", "prompt: "),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature", "greater than or equal to 0"),
    ("completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature", "temperature: "),
    ("completions", {"prompt": "a", "stop": [""]}, 400, "stop", "stop.0: "),
    ("completions", {"prompt": "a", "stop": ["x"] * 17}, 400, "stop", "stop: "),
    ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", "suffix: not supported"),
    ("completions", {"prompt": "a", "logit_bias": {"1": 101}}, 400, "logit_bias", "less than or equal to 100"),
    ("completions", {"prompt": "a", "logit_bias": {"a": 1}}, 400, "logit_bias", "valid integer"),
    ("completions", {"prompt": "a", "logit_bias": {"380": 1}}, 400, "logit_bias", "380 is not a token id"),
    ("completions", {"prompt": "a", "min_tokens": 5, "max_tokens": 4}, 400, "min_tokens", "5 is more than the 4"),
    ("completions", {"prompt": "a", "best_of": 3}, 400, "best_of", "best_of: not supported"),
    ("completions", {"prompt": "a", "temprature": 0}, 400, "temprature", "temprature: not supported"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "is allowed only with echo: true"),
    ("completions", {"prompt": "a", "max_tokens": 5000}, 400, "prompt", "the model has 4096 positions; the prompt has"),
    ("completions", {"prompt": "a " * 5000}, 400, "prompt", "the model has 4096 positions; the prompt has"),
    ("completions", {"prompt": "a", "n": 200, "max_tokens": 1}, 400, "n", "n: "),
    ("completions", {"prompt": ["a"] * 201, "max_tokens": 1}, 400, "", "201 texts (prompts times n), above "),
    ("chat/completions", {"messages": []}, 400, "messages", "messages: "),
    ("chat/completions", {"messages": "Hi"}, 400, "messages", "messages: "),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages", "message 0 has no content"),
    ("chat/completions", {"tools": [{"type": "function"}]}, 400, "tools", "tools: this server does not parse"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, 400, "response_format", "not supported"),
    ("chat/completions", {"top_logprobs": 2}, 400, "top_logprobs", "logprobs: true"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages",
     "message 0: part 0 of its content is of type image_url"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a", "audio": 1}]}, 400, "messages", "audio"),
    ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, 400, "messages",
     "message 0 (assistant) is not in "),
]  # fmt: skip


def test_refused(server: Server) -> None:
    for path, body, status, param, message in REFUSED:
        if isinstance(body, dict) and param != "model":
            chat = {"messages": [{"role": "user", "content": "a"}]} if path.startswith("chat") else {}
            body = {"model": NAME, **chat, **body}
        actual_status, reply, headers = server.post(f"/v1/{path}", body)
        assert actual_status == status, (body, reply)
        assert set(reply["error"]) == {"message", "type", "param", "code"}
        assert reply["error"]["param"] == (param or None), (body, reply)
        assert message in reply["error"]["message"], (body, reply)
        assert headers["x-should-retry"] == "false"


def test_what_changes_nothing_is_taken(server: Server) -> None:
    body = {"model": NAME, "prompt": "a", "max_tokens": 1, "user": "me", "logit_bias": None, "best_of": 1, "suffix": ""}
    assert server.post("/v1/completions", body)[0] == 200
    chat = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tools": [], "store": True}
    assert server.post("/v1/chat/completions", chat | {"response_format": {"type": "text"}})[0] == 200


def test_ends_biases_and_least_lengths(client: openai.OpenAI, reference: tuple[Any, Any]) -> None:
    """Every end of generation_config.json; OpenAI's `logit_bias`, vLLM's `ignore_eos` and `min_tokens`."""
    prompt = reference[1](PROMPT)["input_ids"]

    def write(bias: dict[int, float], **options: Any) -> tuple[list[int], str, str]:
        extra = {"return_token_ids": True, **options}
        reply = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, temperature=0,
                                          logit_bias={str(i): v for i, v in bias.items()},
                                          extra_body=extra)  # fmt: skip
        choice = reply.choices[0]
        assert choice.model_extra is not None
        return choice.model_extra["token_ids"], choice.finish_reason, choice.text

    unbiased = greedy(reference, prompt, 6)
    for end in (0, END):
        assert write({end: 100}) == ([end], "stop", "")
        assert write({end: 100}, ignore_eos=True)[:2] == ([end] * 6, "length")
        assert write({end: 100}, min_tokens=4)[:2] == ([*unbiased[:4], end], "stop")
    banned = [first_token := unbiased[0]]
    banned.append(int(logprobs(reference, prompt)[-1].index_fill(0, torch.tensor([first_token]), -torch.inf).argmax()))
    assert write({first_token: -100})[0][0] == banned[1] != first_token
    stop = reference[1].decode(unbiased)[:1]
    stopped, stopped_later = write({}, stop=[stop]), write({}, stop=[stop], min_tokens=3)
    assert (stopped[0], stopped[1:]) == (unbiased[: len(stopped[0])], ("stop", "")) and len(stopped[0]) < 3
    assert (
        stopped_later[0] == unbiased[: len(stopped_later[0])]
        and len(stopped_later[0]) > 3
        and stopped_later[2].startswith(stop)
    )


def test_a_flood_is_turned_away(server: Server) -> None:
    """Beyond serve_max_requests: 429, at once, and those before are answered."""
    short = {"model": NAME, "prompt": "a", "max_tokens": 2, "temperature": 0}

    async def flood() -> tuple[Any, list[Any]]:
        async with server.clients() as client:
            flood_body = {
                **short,
                "prompt": ["a"] * 199,
                "max_tokens": POSITIONS - 100,
                "extra_body": {"ignore_eos": True},
            }
            flooding = asyncio.create_task(_endless(client, flood_body, stream=False))
            await _loaded(server, 199)
            last = asyncio.create_task(client.completions.create(**short))  # type: ignore[call-overload]
            await _loaded(server, 200)
            with pytest.raises(openai.RateLimitError) as refused:
                await client.completions.create(**short)  # type: ignore[call-overload]
            flooding.cancel()
            return await last, [refused.value.code, refused.value.response.headers["retry-after"]]

    short_reply, refused = asyncio.run(flood())
    assert short_reply.choices[0].finish_reason == "length" and refused == ["queue_full", "2"]
    server.idle()
    status, reply, _ = server.post("/v1/completions", {**short, "prompt": ["a"] * 200})
    assert status == 200 and {choice["text"] for choice in reply["choices"]} == {short_reply.choices[0].text}


def test_other_bodies_paths_methods_and_names(server: Server) -> None:
    status, reply, _ = server.post("/v1/completions", {"model": NAME, "prompt": "x" * 100_000})
    assert status == 413 and "65536 bytes (serve_max_body_bytes)" in reply["error"]["message"]
    assert server.post("/v1/embeddings", {})[0] == 404
    status, reply, headers = server.post("/v1/completions", None)
    assert status == 405 and headers["allow"] == "POST" and reply["error"]["type"] == "invalid_request_error"
    body = {"model": NAME, "prompt": "a"}
    status, reply, _ = server.post("/v1/completions", body, host="evil.example")
    assert status == 403 and "evil.example" in reply["error"]["message"]
    assert server.post("/v1/completions", body, **{"content-type": "text/plain"})[0] == 415
