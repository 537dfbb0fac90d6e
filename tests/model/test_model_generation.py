"""Greedy text equals transformers': our reading of GPT-NeoX's checkpoints against what its converter
exported."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.tokenizer import HFTokenizer
from tests.checkpointing.golden import RUNS
from tests.generation.runs import GIVEN, LAYOUTS, TOKENIZER, greedy
from tests.marks import with_more
from tests.pool import run_ranks

EXPORTED = ("neox_pp2_mp2", "neox_pp1_mp1", "llama_pp1_mp1")


class Reference(NamedTuple):
    """Of transformers, one prompt at a time: greedy tokens up to the end of document, and log-probabilities
    of the first."""

    texts: list[list[int]]
    logprobs: Tensor


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    from transformers import GPTNeoXForCausalLM, LlamaForCausalLM

    tokenizer = HFTokenizer(TOKENIZER)
    by_run = {}
    for run in EXPORTED:
        kind = LlamaForCausalLM if run.startswith("llama") else GPTNeoXForCausalLM
        model = kind.from_pretrained(RUNS[run] / "hf_step3", dtype=torch.float32).eval()
        texts, logprobs = [], []
        for prompt in GIVEN:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32,
                eos_token_id=tokenizer.eod, pad_token_id=tokenizer.eod,
            )[0, len(prompt) :].tolist()  # fmt: skip
            texts.append(out[:-1] if out[-1] == tokenizer.eod else out)
            with torch.no_grad():
                logprobs.append(model(ids).logits[0, -1].log_softmax(-1)[: tokenizer.vocab_size])
        assert len({tuple(text) for text in texts}) > 2, "the prompt must matter"
        assert sorted(map(len, texts))[1] == 32
        by_run[run] = Reference(texts, torch.stack(logprobs))
    return by_run


@pytest.mark.parametrize("name", with_more(LAYOUTS, "tp2 x pp2"))
def test_greedy_text_equals_transformers(name: str, references: dict[str, Reference]) -> None:
    ranks, layout = LAYOUTS[name]
    for everyone in run_ranks(greedy, ranks, EXPORTED, layout):
        for run, (completions, logprobs) in zip(EXPORTED, everyone, strict=True):
            texts = references[run].texts
            assert [completion.tokens for completion in completions] == texts, run
            assert [completion.finished for completion in completions] == [len(text) < 32 for text in texts]
            # Other kernels and orders of summation in fp32, through four layers.
            torch.testing.assert_close(logprobs, references[run].logprobs, rtol=1e-4, atol=1e-5)
