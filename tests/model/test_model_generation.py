"""Greedy text equals transformers': our reading of GPT-NeoX's checkpoints against the exports of GPT-NeoX's converter."""

from __future__ import annotations

import pytest
import torch

from megatron.tokenizer import HFTokenizer
from tests.checkpointing.golden import RUNS
from tests.generation.runs import LAYOUTS, TOKENIZER, greedy, prompts
from tests.pool import run_ranks

EXPORTED = ("neox_pp2_mp2", "neox_pp1_mp1", "llama_pp1_mp1")


@pytest.fixture(scope="module")
def references() -> dict[str, list[list[int]]]:
    """32 greedy tokens of transformers, one prompt at a time, cut at the end of document."""
    from transformers import GPTNeoXForCausalLM, LlamaForCausalLM

    eod = HFTokenizer(TOKENIZER).eod
    found: dict[str, list[list[int]]] = {}
    for run in EXPORTED:
        kind = LlamaForCausalLM if run.startswith("llama") else GPTNeoXForCausalLM
        model = kind.from_pretrained(RUNS[run] / "hf_step3", dtype=torch.float32).eval()
        found[run] = []
        for prompt in prompts([1, 6, 17, 32]):
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=None, max_new_tokens=32,
                eos_token_id=eod, pad_token_id=eod,
            )[0, len(prompt) :].tolist()  # fmt: skip
            found[run].append(out[: out.index(eod)] if eod in out else out)
        assert len({tuple(tokens) for tokens in found[run]}) > 1, "the prompt must matter"
        assert max(len(tokens) for tokens in found[run]) == 32
        assert len({token for tokens in found[run] for token in tokens}) > 4, "one repeated token would show little"
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_text_equals_transformers(name: str, references: dict[str, list[list[int]]]) -> None:
    ranks, layout = LAYOUTS[name]
    for everyone in run_ranks(greedy, ranks, EXPORTED, layout):
        for run, completions in zip(EXPORTED, everyone, strict=True):
            assert [c.tokens for c in completions] == references[run], run
            assert [c.finished for c in completions] == [len(tokens) < 32 for tokens in references[run]]
