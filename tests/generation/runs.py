"""Generation on ranks of the worker pool: models from golden checkpoints and from tiny runs."""

import importlib
import io
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.generation import Batcher, Completion, Event, Model, Request, SamplingParams, complete, load_model
from megatron.generation.samples import GeneratedSample, Prompt, generate_samples
from megatron.launch import process_info
from megatron.mpu import init_model_parallel
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import build_tokenizer
from tests.checkpointing.golden import GOLDEN, RUNS, golden_args
from tests.pool import run_ranks

TOKENIZER = str(GOLDEN / "dataset" / "tokenizer.json")
QUIET = logging.getLogger("tests.quiet")
# The ways of the golden models over ranks.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"model_parallel_size": 1, "pipe_parallel_size": 0}),
    "tp2": (2, {"model_parallel_size": 2, "pipe_parallel_size": 0}),
    "tp2+sp": (2, {"model_parallel_size": 2, "pipe_parallel_size": 1, "sequence_parallel": True}),
    "pp2": (2, {"model_parallel_size": 1, "pipe_parallel_size": 2}),
    "dp2": (2, {"model_parallel_size": 1, "pipe_parallel_size": 1}),
    "tp2 x pp2": (4, {"model_parallel_size": 2, "pipe_parallel_size": 2}),
}


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    tokens = np.load(GOLDEN / "ckpt_neox" / "fixed_input_2x65.npy").reshape(-1)
    return [tokens[i : i + n].tolist() for i, n in enumerate(lengths)]


GOLDEN_PROMPTS = prompts([1, 6, 17, 32])


def model_of(args: NeoXArgs) -> Model:
    """`load_model` on this rank."""
    process = process_info()
    args = args.for_world(process.world_size)
    return load_model(args, init_model_parallel(args, process, QUIET), build_tokenizer(args), QUIET)


def golden_model(run: str, changes: Mapping[str, Any]) -> Model:
    return model_of(golden_args(run, load=str(RUNS[run] / "ckpt"), vocab_file=TOKENIZER, **changes))


def greedy(rank: int, world_size: int, runs: Sequence[str],
           changes: Mapping[str, Any]) -> list[tuple[list[Completion], Tensor]]:  # fmt: skip
    """For the pool: of each run, 32 tokens after `GOLDEN_PROMPTS`, first log-probs `[rows, vocab]`."""
    outputs = []
    for run in runs:
        model = golden_model(run, changes)
        completions = complete(
            model, GOLDEN_PROMPTS, SamplingParams(), maximum_tokens=32, seeds=range(len(GOLDEN_PROMPTS))
        )
        vocab = model.tokenizer.vocab_size
        requests = [Request(prompt, maximum_tokens=1, logprobs=vocab) for prompt in GOLDEN_PROMPTS]
        first_logprobs = [dict(events[0].logprobs[0].top) for events in answers(Batcher(model), requests)]
        outputs.append((completions, torch.tensor([[row[i] for i in range(vocab)] for row in first_logprobs])))
    return outputs


def answers(batcher: Batcher, requests: Sequence[Request], late_requests: Sequence[Request] = ()) -> list[list[Event]]:
    """The events of each; the late ones come one by one while the first run."""
    events: dict[int, list[Event]] = {}
    ids, left = [batcher.add(request) for request in requests], list(late_requests)
    while batcher.busy or left:
        for event in batcher.step():
            events.setdefault(event.id, []).append(event)
        if left:
            ids.append(batcher.add(left.pop(0)))
    return [events[id] for id in ids]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def sampled(rank: int, world_size: int, run: str, changes: Mapping[str, Any]) -> list[GeneratedSample]:
    """For the pool: `sample` of a golden run with the configuration's temperature."""
    model = golden_model(run, {"maximum_tokens": 24, **changes})
    sample_prompts = [Prompt(str(i), tokens) for i, tokens in enumerate(prompts([3, 9, 1, 30, 12]))]
    return generate_samples(model, sample_prompts, QUIET)


def written(rank: int, world_size: int, values: Mapping[str, Any], count: int) -> list[Completion]:
    """For the pool: sampled tokens of a checkpoint that one of our runs wrote."""
    model = model_of(NeoXArgs.from_dict(values))
    return complete(model, prompts([5, 11]), SamplingParams(1.0), maximum_tokens=count, seeds=[0, 1])


def command(rank: int, world_size: int, argv: Sequence[str], script: str = "generate.py",
            stdin_text: str | None = None) -> tuple[int, str, str]:  # fmt: skip
    """For the pool: runs a script without a process group; returns exit code, stdout, stderr.

    stdin_text: the content of a pipe that is the standard input of rank 0.
    """
    if stdin_text is not None and rank == 0:
        reader, writer = os.pipe()
        os.write(writer, stdin_text.encode())
        os.close(writer)
        sys.stdin = open(reader)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = importlib.import_module(script.removesuffix(".py").replace("/", ".")).main(argv)
    sys.stdout.flush()
    return code, out.getvalue(), err.getvalue()


def run_script(*argv: object, ranks: int = 1, script: str = "generate.py",
               stdin_text: str | None = None) -> tuple[int, str, str]:  # fmt: skip
    """`command` on ranks of the pool; what it is on rank 0."""
    return run_ranks(command, ranks, [str(word) for word in argv], script, stdin_text, init=False, timeout=600)[0]
