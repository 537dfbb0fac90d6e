"""Several adapters behind one server, by the name of a model: each writes what peft does, all in one
batch."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from tests.generation.serving.server import NAME, Server, greedy_texts, make_adapters, make_model, serving
from tests.marks import with_more

PROMPTS = (
    "The lantern", "A storm came over the hills that night and nobody in the village slept until the morning bells",
)  # fmt: skip
TOKENS = 10
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "wide": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "use_dora": True},
}


class Served(NamedTuple):
    """expected: the text of each prompt by the name of a model."""

    folder: Path
    expected: dict[str, list[str]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("adapters")
    expected = {NAME: greedy_texts(make_model(folder), PROMPTS, TOKENS)}
    for seed, (name, form) in enumerate(FORMS.items()):
        expected[name] = greedy_texts(make_adapters(folder, name, seed, **form), PROMPTS, TOKENS)
    assert len({tuple(texts) for texts in expected.values()}) == 3
    return Served(folder, expected)


def test_what_cannot_be_chosen_in_a_batch_is_refused(served: Served) -> None:
    """First, while no other server holds the ranks."""
    make_adapters(served.folder, "copies", r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    for adapters, message in (
        ([f"one={served.folder / 'copies'}"], "one .*lm_head"),
        ([f"one={served.folder / 'plain'}", str(served.folder / "wide")], "name all"),
    ):
        with pytest.raises(AssertionError, match=message), serving(served.folder, adapter=adapters):
            pass


LAYOUTS = {"one process": {}, "tp2": {"model_parallel_size": 2}, "pp2": {"pipe_parallel_size": 2}}


@pytest.fixture(scope="module", params=with_more(LAYOUTS, "tp2", product=["pp2"]))
def server(served: Served, request: pytest.FixtureRequest) -> Iterator[Server]:
    layout = LAYOUTS[request.param]
    adapters = [f"{name}={served.folder / name}" for name in FORMS]
    with serving(served.folder, 2 if layout else 1, adapter=adapters, **layout) as running:
        yield running


def test_each_name_answers_by_its_adapters(served: Served, server: Server) -> None:
    """Twice, the second time with prompts that are cached."""
    names = [*served.expected] * 2
    with server.client() as client, ThreadPoolExecutor(len(names) * len(PROMPTS)) as pool:

        def ask(name: str, prompt: str) -> tuple[str, str]:
            completion = client.completions.create(model=name, prompt=prompt, max_tokens=TOKENS, temperature=0)
            return completion.model, completion.choices[0].text

        for _ in range(2):
            questions = [(name, prompt) for name in names for prompt in PROMPTS]
            answers = list(pool.map(lambda question: ask(*question), questions))
            for (name, prompt), (model, text) in zip(questions, answers, strict=True):
                assert (model, text) == (name, served.expected[name][PROMPTS.index(prompt)])
        assert [model.id for model in client.models.list()] == [NAME, *FORMS]
        assert client.models.retrieve("wide").id == "wide"
        with pytest.raises(openai.NotFoundError, match="no model 'other' here.* 'tiny-llama' or 'plain'"):
            client.completions.create(model="other", prompt="x")
