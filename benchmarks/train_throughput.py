"""Speed of a training step: our engines, bare torch and transformers, on one shape, in one process.

The contestants take turns in rounds, each after a measurement of the largest matrix product rate the device
gives at that moment, and are compared within a round: what else the machine does then falls on all alike.
With `--only` and one name there is one model in memory, whose peak is told; `make gpu` measures so.
docs/benchmarks.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor, nn

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.reading.files import parse_overrides
from megatron.process import run_command
from megatron.process.command_parser import CommandParser

if TYPE_CHECKING:
    from megatron.data import Batch
    from megatron.mpu import ParallelGroups

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 4, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 4096, "seq": 512, "micro_batch": 2},
    "micro": {"layers": 4, "hidden": 128, "heads": 4, "ffn": 512, "vocab": 1024, "seq": 128, "micro_batch": 2},
    "rehearsal": {"layers": 3, "hidden": 64, "heads": 2, "ffn": 128, "vocab": 512, "seq": 64, "micro_batch": 2},
    "1.4B": {"layers": 24, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 50304, "seq": 2048, "micro_batch": 8},
    # Blocks of a 7B model, as many as fit on one GPU with all their optimizer state.
    "7B-8layers": {
        "layers": 8,
        "hidden": 4096,
        "heads": 32,
        "ffn": 11008,
        "vocab": 32000,
        "seq": 4096,
        "micro_batch": 4,
    },
    # Of OLMoE 1B-7B's 16; the feed-forward width is an expert's.
    "OLMoE-6layers": {
        "layers": 6,
        "hidden": 2048,
        "heads": 16,
        "ffn": 1024,
        "vocab": 50304,
        "seq": 4096,
        "micro_batch": 4,
    },
}
# NeoX's architecture as Pythia has it, Llama's, and that with OLMoE's experts.
STYLES: dict[str, dict[str, Any]] = {
    "neox": {"norm": "layernorm", "rotary_pct": 0.25, "gpt_j_residual": True, "activation": "gelu"},
    "llama": {
        "norm": "rmsnorm",
        "rms_norm_epsilon": 1e-6,
        "activation": "swiglu",
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
    },
}
STYLES["olmoe"] = {
    **STYLES["llama"],
    "use_qk_layernorm": True,
    "use_separate_qk_norms": True,
    "moe_num_experts": 64,
    "moe_top_k": 8,
    "moe_router_type": "topk",
    "moe_aux_loss_coeff": 0.0,  # transformers has none either, unless asked for the router's logits
}
BARE = "bare torch"
CONTESTANTS = ("bare", "native", "deepspeed", "transformers")
Step = Callable[[], Tensor]  # one optimizer step; its loss, still on the device


class Round(NamedTuple):
    """The measurements of a contestant in one round.

    seconds: of one step; on a CPU it is CPU time, so other programs do not count. ceiling: FLOP/s of a large
    matrix product, measured just before the steps.
    """

    seconds: float
    ceiling: float


class ThroughputRow(NamedTuple):
    """A contestant's medians over rounds.

    tokens: per second. *_flops: FLOP/s. of_ceiling: share of the round's ceiling. beside_bare: speed divided
    by the bare loop's; None without the bare loop. peak_bytes: peak memory of the GPU, or of this process on
    a CPU; None if other contestants used it too.
    """

    name: str
    seconds: float
    tokens: float
    model_flops: float
    neox_flops: float
    of_ceiling: float
    beside_bare: float | None
    peak_bytes: int | None


def keys_of(options: argparse.Namespace, zero: int) -> dict[str, Any]:
    """Returns the configuration keys for the command-line options and ZeRO stage `zero`."""
    values: dict[str, Any] = {
        **STYLES[options.style],
        "pos_emb": "rotary",
        "no_weight_tying": True,
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "num_attention_heads": options.heads,
        "intermediate_size": options.ffn,
        "seq_length": options.seq,
        "max_position_embeddings": options.seq,
        "padded_vocab_size": options.vocab,
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": options.micro_batches,
        "precision": {"bf16": "bfloat16", "fp32": "fp32"}[options.precision],
        "attention_backend": options.backend,
        "compile": "block" if options.compile else False,
        "zero_optimization": {"stage": zero},
        "distributed_backend": "nccl" if options.device == "cuda" else "gloo",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
        "weight_decay": 0.1,
        "gradient_clipping": 1.0,
    }
    if options.kv_heads is not None:
        values["num_kv_heads"] = options.kv_heads
    if options.documents is not None:
        values |= {"reset_attention_mask": True, "reset_position_ids": True}
    for key, value, _ in parse_overrides(options.set, "--set"):
        section, _, name = key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[name] = value
    return values


def settings(options: argparse.Namespace, zero: int, engine: str = "auto") -> NeoXArgs:
    """Returns the configuration for the command-line options. Raises ConfigError."""
    values = {**keys_of(options, zero), "engine": engine}
    if engine == "deepspeed" and values["zero_optimization"]["stage"] == 3:
        values["compile"] = "auto"  # off: its hooks stand within blocks
    return NeoXArgs.from_dict(values).for_world(1)


def random_batch(args: NeoXArgs, device: torch.device, documents: int | None) -> Batch:
    """Returns a batch of random tokens, all of which are predicted.

    documents: mean length of the documents in a row. Attention then separates them, and their first tokens
    are not predicted.
    """
    from megatron.data.batch import collate

    assert args.train_micro_batch_size_per_gpu is not None and args.padded_vocab_size is not None
    shape, random = (args.train_micro_batch_size_per_gpu, args.seq_length + 1), np.random.default_rng(1)
    windows = random.integers(0, args.padded_vocab_size, shape)
    if documents is None:
        return collate(windows).to(device)
    begins = random.random(shape) < 1 / documents
    begins[:, 0] = True
    return collate(windows, begins=begins, reset_attention_mask=True, reset_position_ids=True).to(device)


def engine_step(args: NeoXArgs, groups: ParallelGroups, batch: Batch) -> Step:
    """Returns a step of the training engine, as train.py runs it, on a fixed batch and without logging."""
    from megatron.training.setup import build_engine

    engine = build_engine(args, groups)
    assert args.gradient_accumulation_steps is not None
    batches = [batch] * args.gradient_accumulation_steps
    return lambda: engine.train_step(list(batches), args.lr).loss


def plain_step(model: nn.Module, dtype: torch.dtype, args: NeoXArgs, loss: Step) -> Step:
    """Returns a training step without an engine: backward, gradient clipping and fused AdamW.

    loss: runs forward and returns the loss. 16-bit weights get fp32 master copies, as in the engine."""
    params = [param for param in model.parameters() if param.requires_grad]
    masters = params if dtype == torch.float32 else [nn.Parameter(p.detach().float()) for p in params]
    optimizer = torch.optim.AdamW(masters, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True)

    def step() -> Tensor:
        value = loss()
        value.backward()
        if masters is not params:
            for master, param in zip(masters, params, strict=True):
                assert param.grad is not None
                master.grad, param.grad = param.grad.float(), None
        nn.utils.clip_grad_norm_(masters, args.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        if masters is not params:
            with torch.no_grad():
                torch._foreach_copy_(list[Tensor](params), list[Tensor](masters))
        return value.detach()

    return step


def bare_step(args: NeoXArgs, groups: ParallelGroups, batch: Batch, dtype: torch.dtype) -> Step:
    """Returns a training step of this project's model in a plain PyTorch loop, without an engine."""
    from megatron.model import build_stage, freeze, init_stage
    from megatron.model.init import stage_parameters
    from megatron.mpu import HeadInput
    from megatron.objectives import LANGUAGE_MODELLING
    from megatron.training.compile_blocks import compile_blocks

    stage, weight = build_stage(args, groups), LANGUAGE_MODELLING.weight(batch)
    freeze(stage_parameters(stage), args)
    compile_blocks(stage, args)
    init_stage(stage, args, groups)
    stage.to(dtype).train()

    def loss(head: HeadInput) -> Tensor:
        return LANGUAGE_MODELLING.loss_sum(head, batch, None)[0] / weight

    return plain_step(stage, dtype, args, lambda: stage(None, batch, loss))


def transformers_step(args: NeoXArgs, style: str, batch: Batch, dtype: torch.dtype) -> tuple[Step, int]:
    """Returns a plain training step of transformers' model of the same shape, and its number of parameters.

    With the key `lora` set, peft adds the adapters."""
    import transformers as hf

    shape: dict[str, Any] = {
        "vocab_size": args.padded_vocab_size,
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_attention_heads,
        "intermediate_size": args.ffn_size,
        "max_position_embeddings": args.seq_length,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    model: Any
    with batch.tokens.device:
        if style == "neox":
            rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": args.rotary_pct}
            model = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**shape, use_parallel_residual=True, rope_parameters=rope))
        elif style == "olmoe":
            experts: dict[str, Any] = {"num_experts": args.moe_num_experts, "num_experts_per_tok": args.moe_top_k}
            experts["experts_implementation"] = "grouped_mm"
            model = hf.OlmoeForCausalLM(hf.OlmoeConfig(**shape, **experts))
        else:
            model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**shape, "num_key_value_heads": args.kv_heads}))
    model.set_attn_implementation("sdpa")
    blocks = model.base_model.layers
    if args.lora is not None:
        from peft import LoraConfig, get_peft_model

        lora = {"r": args.lora["r"], "lora_alpha": args.lora["alpha"], "lora_dropout": args.lora["dropout"]}
        lora_config = LoraConfig(**lora, use_dora=args.lora["dora"], target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora_config)
    model.to(dtype).train()
    if args.compile:
        for block in blocks:
            block.compile()
    # Its loss shifts the labels itself.
    step = plain_step(model, dtype, args, lambda: model(input_ids=batch.tokens, labels=batch.tokens).loss)
    return step, sum(param.numel() for param in model.parameters())


def contestants(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Step], NeoXArgs, str]:
    """Returns the training step of each contestant by name, the configuration, and the attention backend."""
    import math

    from megatron.launch import process_info
    from megatron.model import layer_params
    from megatron.model.attention import choose_backends
    from megatron.model.build_specs import attention_spec
    from megatron.mpu import init_model_parallel

    args = settings(options, options.zero[0])
    groups = init_model_parallel(args, process_info(env={}), logging.getLogger("benchmark"))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.precision]
    batch, steps = random_batch(args, device, options.documents), dict[str, Step]()
    if "bare" in options.only:
        steps[BARE] = bare_step(args, groups, batch, dtype)
    if "native" in options.only:
        steps["native"] = engine_step(settings(options, 0, "native"), groups, batch)
    for stage in options.zero if "deepspeed" in options.only else ():
        steps[f"DeepSpeed, ZeRO {stage}"] = engine_step(settings(options, stage, "deepspeed"), groups, batch)
    if "transformers" in options.only:
        steps["transformers"], count = transformers_step(args, options.style, batch, dtype)
        num_params = sum(math.prod(spec.shape) for specs in layer_params(args).values() for spec in specs)
        if count != num_params:
            raise RuntimeError(f"our model has {num_params:,} parameters, transformers' {count:,}; their shapes differ")
    attention = attention_spec(args, 0)
    assert attention is not None
    kernels = choose_backends(args, device, [attention])
    return steps, args, kernels[args.attention_backend].name


def clock_of(device: torch.device) -> Callable[[], float]:
    """Returns the clock for a device: wall time on a GPU, this process's CPU time on a CPU."""
    return time.perf_counter if device.type == "cuda" else time.process_time


def wait(device: torch.device) -> None:
    """Waits until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the present FLOP/s of one large square matrix product, the best of several tries."""
    size, repeats = (8192, 10) if device.type == "cuda" else (1024, 1)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best, clock = 0.0, clock_of(device)
    for _ in range(4):
        wait(device)
        start = clock()
        for _ in range(repeats):
            a @ b
        wait(device)
        best = max(best, 2.0 * size**3 * repeats / (clock() - start))
    return best


def measure(
    steps: dict[str, Step], device: torch.device, dtype: torch.dtype, rounds: int, count: int
) -> Iterator[dict[str, list[Round]]]:
    """Times `count` steps of each contestant in each round, after two warm-up steps.

    Yields all measurements so far, by contestant, after each round."""
    rounds_by_name: dict[str, list[Round]] = {name: [] for name in steps}
    for name, step in steps.items():
        first_loss, second_loss = float(step()), float(step())
        # Near log(vocabulary), and lower on the second sight of the same batch.
        if not second_loss < first_loss:
            raise RuntimeError(f"{name} does not learn: its loss went from {first_loss} to {second_loss}")
    names, clock = list(steps), clock_of(device)
    for turn in range(rounds):
        first_up = turn % len(names)  # nobody always follows the same one
        for name in names[first_up:] + names[:first_up]:
            step = steps[name]
            gc.collect()
            ceiling = matmul_ceiling(device, dtype)
            step()  # warm caches again
            wait(device)
            start = clock()
            for _ in range(count):
                step()
            wait(device)
            rounds_by_name[name].append(Round((clock() - start) / count, ceiling))
        yield rounds_by_name


def peak_bytes(device: torch.device) -> int:
    """Returns the peak bytes allocated on the GPU, or the peak resident bytes of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def summary(rounds_by_name: dict[str, list[Round]], args: NeoXArgs, peak: int | None) -> list[ThroughputRow]:
    """Returns a row of medians for each contestant. Ratios to bare torch are taken within a round.

    peak: peak bytes if there is only one contestant, else None."""
    from megatron.training.metrics.flops import model_flops, neox_flops

    tokens, flops, neox = args.train_batch_size * args.seq_length, model_flops(args), neox_flops(args, 3)
    rows = []
    for name, rounds in rounds_by_name.items():
        seconds = statistics.median(turn.seconds for turn in rounds)
        share = statistics.median(flops / turn.seconds / turn.ceiling for turn in rounds)
        pairs = zip(rounds, rounds_by_name.get(BARE, ()), strict=False)
        ratios = [bare.seconds / round_.seconds for round_, bare in pairs]
        speed_of_bare = statistics.median(ratios) if ratios else None
        rows.append(
            ThroughputRow(name, seconds, tokens / seconds, flops / seconds, neox / seconds, share, speed_of_bare, peak)
        )
    return rows


def table(rows: list[ThroughputRow]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| | ms a step | tokens/s | model TFLOP/s | NeoX's TFLOP/s | of ceiling | speed beside bare torch |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.seconds * 1e3:.1f} | {row.tokens:,.0f} | {row.model_flops / 1e12:.4g} | "
            f"{row.neox_flops / 1e12:.4g} | {row.of_ceiling:.1%} | "
            f"{'' if row.beside_bare is None else f'{row.beside_bare:.3f}'} |"
        )
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line, and sets missing options from the shape."""
    has_gpu = torch.cuda.is_available()
    parser = CommandParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--shape", choices=SHAPES, help="default: 1.4B on a GPU, tiny on a CPU; the next change it")
    for key in SHAPES["tiny"]:
        parser.add_argument(f"--{key.replace('_', '-')}", type=int)
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step, engines only (1)")
    parser.add_argument("--kv-heads", type=int, help="grouped queries, --style llama only")
    parser.add_argument("--style", choices=STYLES, default="neox")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=CONTESTANTS, help="default: all of them")
    parser.add_argument("--documents", type=int, metavar="MEAN", help="rows of documents of this mean length")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more keys of our model and engine")
    parser.add_argument("--backend", default="auto", help="attention_backend of our model (auto)")
    parser.add_argument("--compile", action="store_true", help="compile every block, also those of transformers")
    parser.add_argument("--zero", type=int, nargs="+", help="ZeRO stages of DeepSpeed; default: 1 on a GPU, 0 1 else")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (5)")
    parser.add_argument("--steps", type=int, help="steps a turn; default: 5 on a GPU, 2 on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not has_gpu:
        parser.error("--device cuda: torch finds no GPU")
    if options.kv_heads is not None and options.style != "llama":
        parser.error("--kv-heads needs --style llama: GPT-NeoX in transformers has no grouped queries")
    if options.documents is not None and "transformers" in options.only:
        parser.error("--documents needs --only bare native deepspeed: transformers does not separate documents")
    if options.micro_batches != 1 and {"bare", "transformers"} & set(options.only):
        parser.error("--micro-batches needs --only native deepspeed: bare and transformers take one a step")
    on_gpu = options.device == "cuda"
    for key, value in SHAPES[options.shape or ("1.4B" if on_gpu else "tiny")].items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    options.precision = options.precision or ("bf16" if on_gpu else "fp32")
    options.zero = options.zero or ([1] if on_gpu else [0, 1])
    options.steps = options.steps or (5 if on_gpu else 2)
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    # Read when DeepSpeed is first imported, which is why our imports stand in functions.
    os.environ.setdefault("DS_ACCELERATOR", options.device)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.precision]
    try:
        steps, args, attention = contestants(options, device)
    except ConfigError as problem:
        sys.stderr.write(f"train_throughput.py: {problem}\n")
        return 1
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    shape = {key: getattr(options, key) for key in SHAPES["tiny"]}
    print(
        f"{machine}, torch {torch.__version__}, {options.precision}, {options.style}, attention {attention}, "
        f"{'compiled blocks' if args.compile else 'eager'}\n" + ", ".join(f"{k} {v}" for k, v in shape.items()),
        flush=True,
    )
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "machine": machine, "torch": torch.__version__, "shape": shape,
        "style": options.style, "precision": options.precision, "attention": attention,
        "compile": bool(args.compile), "documents": options.documents, "set": options.set,
    }  # fmt: skip
    rows: list[ThroughputRow] = []
    for rounds_by_name in measure(steps, device, dtype, options.rounds, options.steps):
        rows = summary(rounds_by_name, args, peak_bytes(device) if len(steps) == 1 else None)
        report["rounds"] = len(next(iter(rounds_by_name.values())))
        report["ceiling_flops"] = statistics.median(turn.ceiling for turns in rounds_by_name.values() for turn in turns)
        if options.json is not None:
            options.json.write_text(json.dumps({**report, "rows": [row._asdict() for row in rows]}, indent=1) + "\n")
    ceiling = f"matmul ceiling {report['ceiling_flops'] / 1e12:.4g} TFLOP/s"
    print(f"{table(rows)}\n\n{ceiling}; medians of {options.rounds} rounds")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_command(main)
