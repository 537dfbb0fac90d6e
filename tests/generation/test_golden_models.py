"""Greedy text equals transformers': our reading of GPT-NeoX's checkpoints against what its converter
exported."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron.tokenizer import HFTokenizer
from tests.checkpointing.golden import RUNS
from tests.generation.runs import GIVEN, LAYOUTS, TOKENIZER, greedy
from tests.pool import run_ranks
from tests.training.runs import cells

EXPORTED = ("neox_pp2_mp2", "neox_pp1_mp1", "llama_pp1_mp1")
FIRST = ["one process", "tp2+sp", "pp2"]


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[list[list[int]], Tensor]]:
    """Of transformers, one prompt at a time: greedy tokens up to the end of document, and log-probabilities
    of the first."""
    tokenizer, by_run = HFTokenizer(TOKENIZER), {}
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.eod}
    for run in EXPORTED:
        model = AutoModelForCausalLM.from_pretrained(RUNS[run] / "hf_step3", dtype=torch.float32).eval()
        texts, logprobs = [], []
        for prompt in GIVEN:
            ids = torch.tensor([prompt])
            how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 32}
            out = model.generate(ids, **how, **ends)[0, len(prompt) :].tolist()
            texts.append(out[:-1] if out[-1] == tokenizer.eod else out)
            with torch.no_grad():
                logprobs.append(model(ids).logits[0, -1].log_softmax(-1)[: tokenizer.vocab_size])
        assert len({tuple(text) for text in texts}) > 2, "the prompt must matter"
        assert sorted(map(len, texts))[1] == 32
        by_run[run] = texts, torch.stack(logprobs)
    return by_run


@pytest.mark.parametrize("name", cells(FIRST, product=[name for name in LAYOUTS if name not in FIRST]))
def test_greedy_text_equals_transformers(name: str, references: dict[str, tuple[list[list[int]], Tensor]]) -> None:
    ranks, layout = LAYOUTS[name]
    for everyone in run_ranks(greedy, ranks, EXPORTED, layout):
        for run, (completions, logprobs) in zip(EXPORTED, everyone, strict=True):
            texts, expected = references[run]
            assert [completion.tokens for completion in completions] == texts, run
            assert [completion.finished for completion in completions] == [len(text) < 32 for text in texts]
            # Other kernels and orders of summation in fp32, through four layers.
            torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-5)
