"""Times a model's linears in bf16 and in FP8 before the first step, for `precision_fp8: auto`.

`precision_policy.py` chooses the FP8 recipe by the GPU. The run uses it if it is faster than bf16.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron.distributed import run_on_all_ranks
from megatron.model import Stage
from megatron.mpu import ParallelGroups, Product
from megatron.mpu.fp8.transformer_engine import TransformerEngine
from megatron.mpu.products import PlainProduct, linear
from megatron.neox_arguments import NeoXArgs
from megatron.training.fp8 import fitting_linears, multiple_of, product_maker, weight_of
from megatron.training.precision_policy import PrecisionChoice, Recipe
from megatron.training.transformer_engine import choose_te_backend

_SECONDS, _TURNS = 2.0, 2  # seconds of the whole trial without compiling; how often each work is timed
_MOST_TOKENS = 16_384  # more tokens would need memory and not change the ratio

Clock = Callable[[Callable[[], object], float], float]
"""Takes work (a function) and the seconds to spend on timing it; returns the seconds of one call."""


def gpu_clock(work: Callable[[], object], budget: float) -> float:
    """Returns the mean seconds of one call of `work` on the current GPU. budget: seconds to spend on timing.

    Three calls before the timed ones compile and warm up.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(calls: int) -> float:
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / calls

    timed(3)
    return timed(max(3, min(1000, int(budget / timed(3)))))


def settle_precision(
    stage: Stage,
    args: NeoXArgs,
    groups: ParallelGroups,
    choice: PrecisionChoice,
    log: Callable[[str], None],
    clock: Clock = gpu_clock,
) -> NeoXArgs:
    """Returns the configuration with `precision_fp8: auto` replaced by the faster precision.

    The choice is logged with the measured times. Other values of the key are left as they are, and nothing is
    timed. choice: from `choose_precision`, with the recipe to try.
    All ranks choose alike. FP8 is off if some rank's GPU has no recipe to try. Otherwise the time of the
    slowest rank in each precision decides, because other ranks wait for it.
    """
    if args.precision_fp8 != "auto":
        return args
    disabled = [rank_choice for rank_choice in run_on_all_ranks(groups, lambda: choice) if rank_choice.recipe is None]
    if disabled:
        log(disabled[0].reason or "")
        return args.settle("precision_fp8", "off")
    recipe = choice.recipe
    assert recipe is not None
    ranks = run_on_all_ranks(groups, lambda: try_linears(stage, args, groups, recipe, clock))
    bf16, fp8 = (max(seconds) for seconds in zip(*ranks, strict=True))
    if bf16 == 0.0:
        log(f"precision_fp8: auto chose off: no linear's sizes are multiples of {multiple_of(recipe)}")
        return args.settle("precision_fp8", "off")
    timings = f"the linears of a micro-batch take {1000 * fp8:.2f} ms in {recipe}, {1000 * bf16:.2f} ms in bf16"
    if fp8 >= bf16:
        log(f"precision_fp8: auto chose off: {timings}; set precision_fp8: {recipe} to use it")
        return args.settle("precision_fp8", "off")
    log(f"{choice.reason}: {timings}")
    return args.settle("precision_fp8", recipe)


def try_linears(
    stage: Stage, args: NeoXArgs, groups: ParallelGroups, recipe: Recipe, clock: Clock = gpu_clock
) -> list[float]:
    """Returns [seconds in bf16, seconds in FP8] that a micro-batch spends in the linears that FP8 can
    compute.

    They include forward and backward; both are 0 if there are no such linears. Each weight shape is timed in
    both precisions, in turns, and counts as often as it occurs. If blocks are compiled, the timed products
    are compiled too, in the mode `block`. The run's random generators are not used.
    """
    linears, _ = fitting_linears(stage, args, recipe)
    weights = [weight_of(linear) for _, linear in linears]
    shapes = Counter((weight.shape, weight.requires_grad) for weight in weights)
    use_te, _ = choose_te_backend(args, recipe, groups.device)
    fp8 = product_maker(recipe, stage, args, groups, TransformerEngine() if use_te else None)("trial")
    steps = [_step(product, args.compile not in (False, "auto")) for product in (PlainProduct(), fp8)]
    totals = [0.0, 0.0]
    torch._dynamo.reset_code(_output.__code__)  # drop graphs of an earlier trial in this process
    with torch._dynamo.config.patch(recompile_limit=len(steps) * len(shapes)):  # one function, a graph for each
        for ((out, features), trained), number in shapes.items():
            operands = _operands(args, out, features, trained, groups.device)
            works = [partial(step, *operands) for step in steps]
            budget = _SECONDS / _TURNS / len(works) / len(shapes)
            turns = [[clock(work, budget) for work in works] for _ in range(_TURNS)]
            totals = [
                total + number * min(seconds) for total, seconds in zip(totals, zip(*turns, strict=True), strict=True)
            ]
            del operands, works
    if groups.device.type == "cuda":
        torch.cuda.empty_cache()
    return totals


def _step(product: Product, compiled: bool) -> Callable[[Tensor, Tensor, Tensor], object]:
    """Returns a function that computes the output and the gradients of a linear.

    The function takes input, weight and the output's gradient.
    """
    output = torch.compile(_output, fullgraph=True, dynamic=False) if compiled else _output

    def step(x: Tensor, weight: Tensor, grad: Tensor) -> object:
        inputs = [tensor for tensor in (x, weight) if tensor.requires_grad]
        return torch.autograd.grad(output(x, weight, product), inputs, grad)

    return step


def _output(x: Tensor, weight: Tensor, product: Product) -> Tensor:
    return linear(x, weight, None, product)


def _operands(
    args: NeoXArgs, out: int, features: int, trained: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns random bf16 tensors for a linear and a micro-batch: input, weight and the output's gradient.

    They are not zeros, because GPUs multiply zeros faster.
    """
    tokens = min(_MOST_TOKENS, args.seq_length * (args.train_micro_batch_size_per_gpu or 1))
    generator = torch.Generator(device).manual_seed(0)

    def random_matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)

    return (
        random_matrix(tokens, features).requires_grad_(),
        random_matrix(out, features).requires_grad_(trained),
        random_matrix(tokens, out),
    )
