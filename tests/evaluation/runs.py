"""Evaluation on ranks of the worker pool, beside lm-eval's own `hf` backend on the same model and tasks."""

import io
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import lm_eval.evaluator  # here, so that the pool's ranks need not import it again
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from megatron.evaluation import evaluate
from megatron.evaluation.harness import load_tasks_on_rank0
from megatron.evaluation.language_model import NeoXLM
from megatron.evaluation.model_operations import model_operations
from megatron.evaluation.progress import EvaluationProgress
from megatron.evaluation.results import EvaluationResults
from megatron.evaluation.task_loading import SHIPPED
from megatron.generation import Model, load_model
from megatron.generation.from_huggingface import hf_model_keys
from megatron.launch import process_info
from megatron.mpu import ParallelGroups, init_model_parallel
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import build_tokenizer

QUIET = logging.getLogger("tests.quiet")
POSITIONS = 160
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}), "tp2": (2, {"model_parallel_size": 2}), "pp2": (2, {"pipe_parallel_size": 2}),
    "tp2 x pp2": (4, {"model_parallel_size": 2, "pipe_parallel_size": 2}), "dp2": (2, {}),
    "zero 3": (2, {"zero_optimization": {"stage": 3}}),
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if not loop.last or add_generation_prompt %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def documents() -> list[str]:
    return [json.loads(line)["text"] for name in ("perplexity", "cloze")
            for line in (SHIPPED / f"{name}.jsonl").read_text().splitlines()]  # fmt: skip


def make_model(folder: Path, bos: bool = False, seed: int = 0) -> str:
    """A random llama of 4 layers and a tokenizer trained on `documents`; bos: it begins texts with one."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = ["<|endoftext|>", "<s>"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents(), trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=names[0], bos_token=names[1] if bos else None)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, max_position_embeddings=POSITIONS, bos_token_id=1 if bos else None, eos_token_id=0,
        initializer_range=0.3,  # so that tokens differ in likelihood
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_tasks(folder: Path) -> str:
    """Tasks as users write them: YAML over JSON lines, few-shot, a group, text to be written."""
    lines = [{"question": text[:40], "choices": [text[40:60], "blue", " and so on"], "answer": 0}
             for text in documents()]  # fmt: skip
    (folder / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:12]))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/own.jsonl}}}}\ntest_split: test\n"
    (folder / "own_choice.yaml").write_text(
        f"task: own_choice\n{data}fewshot_split: test\nnum_fewshot: 1\noutput_type: multiple_choice\n"
        'doc_to_text: "Q: {{question}}\\nA:"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\n'
        "metric_list: [{metric: acc}, {metric: acc_norm}]\nmetadata: {version: 1.0}\n"
    )
    (folder / "own_text.yaml").write_text(
        f'task: own_text\n{data}output_type: generate_until\ndoc_to_text: "{{{{question}}}}"\n'
        'doc_to_target: "{{choices[0]}}"\ngeneration_kwargs: {until: ["e", "\\n"], max_gen_toks: 12}\n'
        "metric_list: [{metric: exact_match}]\nmetadata: {version: 1.0}\n"
    )
    (folder / "own_group.yaml").write_text(
        "group: own_group\ntask: [own_choice]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
        "metadata: {version: 1.0}\n"
    )
    return str(folder)


def reference(folder: str, tasks: Sequence[str], own_folder: str, **settings: Any) -> EvaluationResults:
    """lm-eval's `simple_evaluate` with its `hf` backend."""
    results = lm_eval.evaluator.simple_evaluate(
        model="hf", model_args={"pretrained": folder, "dtype": "float32", "device": "cpu"}, tasks=list(tasks),
        task_manager=TaskManager(include_path=[str(SHIPPED), own_folder], include_defaults=False), batch_size=8,
        bootstrap_iters=0, **settings,
    )  # fmt: skip
    assert results is not None
    return EvaluationResults(dict(results))


def configuration(folder: str, tasks: Sequence[str], changes: Mapping[str, Any]) -> NeoXArgs:
    return NeoXArgs.from_dict({**hf_model_keys(folder), "eval_tasks": list(tasks), **changes})


def loaded(folder: str, **changes: Any) -> Model:
    """A HuggingFace folder or its checkpoint, in this process alone."""
    args = configuration(folder, ["x"], {"precision": "fp32", **changes}).for_world(1)
    return load_model(args, ParallelGroups.single(), build_tokenizer(args), QUIET)


def language_model(model: Model) -> NeoXLM:
    operations = model_operations(model)
    return NeoXLM(model, lambda name, *args: operations[name](*args), EvaluationProgress(QUIET))


def instances(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, args, i, metadata=("t", i, 1)) for i, args in enumerate(arguments)]


def scores(rank: int, world_size: int, folder: str, tasks: Sequence[str],
           changes: Mapping[str, Any]) -> EvaluationResults | None:  # fmt: skip
    """For the pool: `evaluate` of a HuggingFace folder with our model, samples included."""
    process = process_info()
    args = configuration(folder, tasks, {"eval_log_samples": True, **changes}).for_world(world_size)
    groups, tokenizer = init_model_parallel(args, process, QUIET), build_tokenizer(args)
    loaded_tasks = load_tasks_on_rank0(args, groups, tokenizer, QUIET)
    model = load_model(args, groups, tokenizer, QUIET)
    return evaluate(model, loaded_tasks, QUIET)


def on_terminal(rank: int, world_size: int, argv: Sequence[str]) -> list[str]:
    """For the pool: eval.py as typed at a terminal; the lines that are left standing there."""
    import eval as script

    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with redirect_stdout(terminal), redirect_stderr(terminal):
        assert script.main(argv) == 0
    return [_standing(line) for line in terminal.getvalue().split("\n")]


def _standing(line: str) -> str:
    """Returns the visible text of a line that was written over after each carriage return."""
    visible: list[str] = []
    for part in line.split("\r"):
        visible[: len(part)] = part
    return "".join(visible).rstrip()


def lm_eval_command(rank: int, world_size: int, argv: Sequence[str]) -> None:
    """For the pool: `lm_eval` as typed."""
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *argv]
    cli_evaluate()


def answers(evaluation: EvaluationResults) -> dict[tuple[str, int], list[Any]]:
    """Returns the answers to each document: (log-likelihood, greedy) pairs, log-likelihoods, or text."""
    return {(task, row["doc_id"]): [answer for request in row["resps"] for answer in request]
            for task, rows in evaluation.results["samples"].items() for row in rows}  # fmt: skip
