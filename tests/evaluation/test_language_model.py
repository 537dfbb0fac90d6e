"""Rules of single requests are those of lm-eval's `hf` backend: tokens, contexts, lengths, stop strings."""

import logging
import re
import time
from dataclasses import replace
from typing import Any

import pytest
from lm_eval.models.huggingface import HFLM

from megatron.evaluation.language_model import NeoXLM
from megatron.evaluation.progress import EvaluationProgress
from megatron.neox_arguments import ConfigError
from tests.evaluation.runs import POSITIONS, instances, language_model, loaded, make_model

LONG = "The bees dance to tell the others where flowers are, and nobody knows who taught them. " * 12
PAIRS = [
    ("The sun rises in the", " east"),
    ("The sun rises in the ", "east"),  # the space belongs to the continuation
    ("The sun rises in the", " west, they say"),
    ("The sun rises in the", " west"),
    ("", "Once upon a time"),
    ("", "<|endoftext|> and on"),  # begins with what stands before every text
    ("<|endoftext|>A document", " begins"),
    ("<s>A document", " begins"),  # has its BOS already, where there is one
    ("Größe, naïve, 東京", " 🦊 fox"),
    ("A line\nand another\n", "\nend"),
    (LONG, " honey"),
    (LONG[:300], LONG[300:700]),
    ("a", "b"),
]
TEXTS = ["A short text.", "", LONG, "x", "東京 is a city."]
WISHES: list[tuple[str, dict[str, Any]]] = [
    ("The sun", {"until": ["e", "\n"], "max_gen_toks": 8}),
    ("The sun", {"until": ".", "max_gen_toks": 20, "do_sample": False}), (LONG, {"until": [], "max_gen_toks": 5}),
    ("Once upon", {"max_gen_toks": 30, "temperature": 0.0}), ("Größe", {"until": ["zzz"], "max_new_tokens": 12}),
    ("The sun", {"max_gen_toks": 20, "repetition_penalty": 1.5}),
]  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "with BOS"])
def models(request, tmp_path_factory) -> tuple[NeoXLM, HFLM]:
    folder = make_model(tmp_path_factory.mktemp("model"), bos=request.param)
    return language_model(loaded(folder)), HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=4)


def test_continuations(models):
    """Two of the pairs are longer than the model."""
    neox_lm, hf_lm = models
    num_too_long = neox_lm.num_too_long
    scores, expected = (lm.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True) for lm in models)
    assert [value for value, _ in scores] == pytest.approx([value for value, _ in expected], rel=1e-5, abs=1e-4)
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    assert neox_lm.max_length == hf_lm.max_length == POSITIONS
    assert (neox_lm.eot_token_id, neox_lm.prefix_token_id) == (hf_lm.eot_token_id, hf_lm.prefix_token_id)
    assert neox_lm.num_too_long - num_too_long == 2


@pytest.mark.parametrize("overlong", ["skip", "refuse"])
def test_questions_longer_than_the_model_are_skipped_or_refused(models, overlong, monkeypatch):
    neox_lm, _ = models
    monkeypatch.setattr(
        neox_lm, "model", replace(neox_lm.model, args=neox_lm.model.args.replace(eval_overlong=overlong))
    )
    old_counts = (neox_lm.num_too_long, neox_lm.num_skipped)
    requests = instances("generate_until", [("The sun", {"max_gen_toks": 8}), (LONG, {"max_gen_toks": 5})])
    if overlong == "refuse":
        with pytest.raises(ConfigError, match="eval_overlong: refuse: .* 1 "):
            neox_lm.generate_until(requests)
        return
    generated = neox_lm.generate_until(requests)
    assert generated[0] and generated[1] == ""
    assert (neox_lm.num_too_long, neox_lm.num_skipped) == (old_counts[0] + 1, old_counts[1] + 1)


def test_whole_texts(models):
    logprobs, expected = (lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(t,) for t in TEXTS]))
                          for lm in models)  # fmt: skip
    assert logprobs == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_written_texts(models):
    generated, expected = (lm.generate_until(instances("generate_until", WISHES)) for lm in models)
    assert generated == expected
    assert "e" not in generated[0] and "." not in generated[1]


def test_what_cannot_be_asked_is_said(models):
    neox_lm, _ = models
    for kwargs, facts in (({"num_beams": 3}, "generation_kwargs: num_beams: "),
                          ({"max_gen_toks": POSITIONS}, f" {POSITIONS} ")):  # fmt: skip
        with pytest.raises(ValueError, match=facts):
            neox_lm.generate_until(instances("generate_until", [("a", kwargs)]))
    with pytest.raises(ValueError, match="t: document 1 has an empty question and an empty choice"):
        neox_lm.loglikelihood(instances("loglikelihood", [("a", "b"), ("", "")]))


def test_an_empty_question_is_asked_all_the_same(models):
    neox_lm, _ = models
    scores = neox_lm.loglikelihood(instances("loglikelihood", [("   ", "word"), ("", "word"), ("text", "")]))
    assert scores[2] == (0.0, True), "nothing is certain"
    assert all(value < 0.0 for value, _ in scores[:2])
    assert isinstance(neox_lm.generate_until(instances("generate_until", [("", {"max_gen_toks": 3})]))[0], str)


def test_sampled_texts_repeat_and_differ_from_each_other(models):
    neox_lm, _ = models
    wish = ("The sun", {"until": [], "max_gen_toks": 20, "do_sample": True, "temperature": 1.5})
    first_run, second_run = (neox_lm.generate_until(instances("generate_until", [wish, wish])) for _ in range(2))
    assert first_run == second_run and first_run[0] != first_run[1]


def test_a_log_without_a_terminal_hears_of_it(caplog):
    logger = logging.getLogger("tests.progress")
    with caplog.at_level(logging.INFO), EvaluationProgress(logger, interval_s=0.05) as progress:
        progress.expect(400)
        progress.update(180)
        for _ in range(1000):
            if len(caplog.records) > 2:
                break
            time.sleep(0.1)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) > 2
    assert all(re.match(r"Running evaluation harness:  45%\|#+\d? +\| 180/400 \[", line) for line in lines), lines
