"""Greedy text of every HuggingFace family, and of GPT-NeoX's checkpoints, against `transformers.generate`."""

import math
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

from megatron.data import Batch
from megatron.generation import Model, SamplingParams, complete, for_inference
from megatron.model.inference import inference_mode
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import CharLevelTokenizer, HFTokenizer
from tests.checkpointing.golden import RUNS
from tests.generation.runs import GOLDEN_PROMPTS, LAYOUTS, TOKENIZER, greedy
from tests.marks import with_more
from tests.model.stages import Weights, groups_of, make_stage
from tests.pool import run_ranks

VOCAB, PADDED = 90, 96
TOKENS, POSITIONS = 16, 64
# Of each kind of cache, positions and windows (narrower than the texts; LongRoPE's long factors begin
# within them), and the others.
FAMILIES = ("gpt 2", "qwen 2 windows", "gemma 3", "gemma 4", "phi 3 long", "ministral 3", "cohere 2", "mixtral",
            "gpt oss", "deepseek 3", "qwen 3 next", "qwen 3.5", "kimi linear", "lfm 2", "mamba",
            "mamba 2")  # fmt: skip
OTHER_FAMILIES = ("gpt_neox", "llama 3", "mistral", "qwen 3 windows", "olmo 1", "olmo 2 GQA", "olmo 3", "gemma 2",
                  "granite", "glm 4", "starcoder 2", "apertus", "seed oss", "smollm 3 windows", "olmoe",
                  "deepseek 2", "deepseek 3 halves", "youtu", "minicpm 3", "glm 4 moe", "glm 4 moe lite", "dots 1",
                  "qwen 2 moe windows", "qwen 3 moe windows", "qwen 3.5 moe", "gemma 1", "arcee", "cwm", "ernie 4.5",
                  "exaone 4", "glm", "helium", "stablelm parallel", "nemotron", "minimax m2", "solar open", "flex olmo",
                  "exaone moe", "ernie 4.5 moe", "hunyuan", "hunyuan moe", "granite moe", "falcon",
                  "ministral", "lfm 2 moe", "granite 4")  # fmt: skip
PROMPTS = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
           for n in (1, 20, POSITIONS - TOKENS)]  # fmt: skip
EXPORTED = ("neox_pp2_mp2", "neox_pp1_mp1", "llama_pp1_mp1")
CLOSE = 1e-4  # two best logits nearer than this may change places


class VocabTokenizer(CharLevelTokenizer):
    vocab_size = VOCAB


class Reference(NamedTuple):
    """A family's model and transformers' texts. gaps: between the two best logits of each token."""

    keys: dict[str, Any]
    weights: Weights
    texts: list[list[int]]
    gaps: list[Tensor]


@cache
def references(families: tuple[str, ...]) -> dict[str, Reference]:
    from megatron.checkpointing.families.convert import from_hf
    from tests.checkpointing.family_models import collected, on_disk, random_model

    found_references = {}
    for family in families:
        # A tied head likes to say the last token again; transformers' cached steps of Mamba 2 have no limits.
        changes: dict[str, Any] = {"time_step_limit": (0.0, math.inf)} if family == "mamba 2" else {}
        model = random_model(family, max_position_embeddings=POSITIONS, tie_word_embeddings=False, **changes)
        with torch.no_grad():  # so that the next token depends on more than what all texts have in common
            model.get_input_embeddings().weight.mul_(8.0)
        texts, gaps = [], []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS,
                                 pad_token_id=0, return_dict_in_generate=True, output_logits=True)  # fmt: skip
            texts.append(out.sequences[0, len(prompt) :].tolist())
            best = torch.cat(out.logits).topk(2).values
            gaps.append(best[:, 0] - best[:, 1])
        assert max(len(set(text)) for text in texts) > 4, f"texts of {family} must be lively"
        config, state = on_disk(model)
        keys, tensors = from_hf(config, state.__getitem__, padded_vocab_size=PADDED)
        found_references[family] = Reference(keys, collected(tensors), texts, gaps)
    return found_references


def written(rank: int, world_size: int, models: list[tuple[dict[str, Any], Weights]],
            layout: dict[str, Any]) -> list[list[list[int]]]:  # fmt: skip
    """For the pool: the texts of every model, of which the third begins when another has ended."""
    texts = []
    for keys, weights in models:
        args = for_inference(NeoXArgs.from_dict({**keys, **layout, "seq_length": 16}).for_world(world_size))
        groups = groups_of(args, world_size) if world_size > 1 else ParallelGroups.single()
        model = Model(args, groups, VocabTokenizer(), make_stage(args, weights, groups), torch.float32)
        done = complete(model, PROMPTS, SamplingParams(), maximum_tokens=TOKENS, seeds=range(3), stop_token_ids=(),
                        maximum_rows=2)  # fmt: skip
        texts.append([completion.tokens for completion in done])
    return texts


@pytest.mark.parametrize("name", with_more(["one process", "tp2 x pp2"], product=["tp2 x pp2"]))
@pytest.mark.parametrize("families", [FAMILIES, pytest.param(OTHER_FAMILIES, marks=pytest.mark.product)],
                         ids=["some", "others"])  # fmt: skip
def test_greedy_text_equals_transformers(families: tuple[str, ...], name: str) -> None:
    ranks, layout = LAYOUTS[name]
    expected = references(families)
    models = [(family_reference.keys, family_reference.weights) for family_reference in expected.values()]
    for everyone in run_ranks(written, ranks, models, layout):
        for (family, reference), texts in zip(expected.items(), everyone, strict=True):
            for text, expected_text, gaps in zip(texts, reference.texts, reference.gaps, strict=True):
                assert len(text) == TOKENS
                differing = [i for i in range(TOKENS) if text[i] != expected_text[i]]
                assert not differing or float(gaps[differing[0]]) < CLOSE, (family, differing[0])


def test_experts_take_all_tokens_of_texts() -> None:
    """Whatever they may take in training: what is dropped would hang on the other texts of a batch."""
    reference = references(FAMILIES)["mixtral"]
    limited = {**reference.keys, "moe_expert_capacity_factor": 0.5}
    assert run_ranks(written, 1, [(limited, reference.weights)], {})[0] == [reference.texts]
    args = NeoXArgs.from_dict({**limited, "seq_length": 16}).for_world(1)
    stage = make_stage(args, reference.weights)  # as of a run
    batch = Batch(torch.tensor([PROMPTS[1]]), torch.zeros(1, 20), torch.ones(1, 20))
    with torch.no_grad():
        trained = stage.train()(None, batch)
        with inference_mode(stage):
            inferred = stage(None, batch)
        assert torch.equal(stage(None, batch), trained)
        expected = make_stage(for_inference(args), reference.weights)(None, batch)
    assert torch.equal(inferred, expected) and (trained - expected).abs().max() > 0.1


@pytest.fixture(scope="module")
def exported() -> dict[str, tuple[list[list[int]], Tensor]]:
    """transformers' tokens for exported folders, up to the end of document, and first log-probabilities."""
    tokenizer, outputs = HFTokenizer(TOKENIZER), {}
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.eod}
    for run in EXPORTED:
        model = transformers.AutoModelForCausalLM.from_pretrained(RUNS[run] / "hf_step3", dtype=torch.float32).eval()
        texts, logprobs = [], []
        for prompt in GOLDEN_PROMPTS:
            ids = torch.tensor([prompt])
            generated = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32, **ends
            )
            out = generated[0, len(prompt) :].tolist()
            texts.append(out[:-1] if out[-1] == tokenizer.eod else out)
            with torch.no_grad():
                logprobs.append(model(ids).logits[0, -1].log_softmax(-1)[: tokenizer.vocab_size])
        assert len({tuple(text) for text in texts}) > 2, "the prompt must matter"
        assert sorted(map(len, texts))[1] == 32
        outputs[run] = texts, torch.stack(logprobs)
    return outputs


@pytest.mark.parametrize("name", with_more(LAYOUTS, product=LAYOUTS.keys() - {"one process", "tp2+sp", "pp2"}))
def test_greedy_text_of_golden_checkpoints(name: str, exported: dict[str, tuple[list[list[int]], Tensor]]) -> None:
    ranks, layout = LAYOUTS[name]
    for everyone in run_ranks(greedy, ranks, EXPORTED, layout):
        for run, (completions, logprobs) in zip(EXPORTED, everyone, strict=True):
            texts, expected = exported[run]
            assert [completion.tokens for completion in completions] == texts, run
            assert [completion.finished for completion in completions] == [len(text) < 32 for text in texts]
            # Other kernels and orders of summation in fp32, through four layers.
            torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-5)
