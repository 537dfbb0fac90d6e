"""Chooses the linears and experts of a stage that multiply in FP8, and sets their FP8 matrix products."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch

from megatron.model import Stage
from megatron.model.head import Head, TiedHead
from megatron.model.moe.experts import Experts
from megatron.model.weight_map import block_specs
from megatron.mpu import Linear, ParallelGroups, Product
from megatron.mpu.fp8 import (
    DelayedProduct,
    DelayedScaling,
    Formats,
    GroupedScaledProduct,
    MXProduct,
    RowwiseProduct,
    TensorwiseProduct,
)
from megatron.mpu.fp8.transformer_engine import EngineDelayedProduct, EngineProduct, TransformerEngine
from megatron.neox_arguments import ModelArgs
from megatron.training.precision_policy import PrecisionChoice, Recipe
from megatron.training.transformer_engine import choose_te_backend

GROUPED_PRODUCTS: dict[Recipe, type[RowwiseProduct | MXProduct]] = {"rowwise": RowwiseProduct, "mxfp8": MXProduct}
_GROUPED_GPUS = {"rowwise": (9, 10), "mxfp8": (10,)}  # the major compute capabilities of torch's kernels
_E4M3 = Formats(torch.float8_e4m3fn, torch.float8_e4m3fn)


def use_fp8(
    stage: Stage, choice: PrecisionChoice, args: ModelArgs, groups: ParallelGroups, log: Callable[[str], None]
) -> None:
    """Make linears and experts in the blocks `args.fp8_blocks` multiply in FP8, and log one line.

    Without a recipe it only logs why. Linears and experts whose sizes are not multiples of
    `multiple_of(recipe)` stay in bf16; the line names them. Routers, embedding and attention's own products
    always stay in bf16, the output layer by default, and experts with recipes other than rowwise and mxfp8.

    Raises ConfigError if those blocks have linears, but none has sizes that the recipe can multiply, and for
    a GPU that has no kernel for experts.
    """
    if choice.recipe is None:
        if choice.reason is not None:
            log(choice.reason)
        return
    fitting, unfit = fitting_linears(stage, args, choice.recipe)
    if not fitting and unfit:
        fix = f"no linear has input and output sizes that are multiples of {multiple_of(choice.recipe)}; write off"
        raise args.error("precision_fp8", fix)
    use_te, backend = choose_te_backend(args, choice.recipe, groups.device)
    make = product_maker(choice.recipe, stage, args, groups, TransformerEngine() if use_te else None)
    for name, linear in fitting:
        linear.product = make(name)
    unfit += use_grouped_fp8(stage, args, choice.recipe, groups.device)
    blocks = args.fp8_blocks
    line = f"{choice.reason}{backend}; blocks {blocks.start} to {blocks.stop - 1} of {args.num_layers}, counted from 0"
    if not args.output_layer_in_bf16 and not args.score_head:
        line += " and the output layer"
    if not args.te_fp8_wgrad:
        line += ", weight gradients in bf16"
    if args.moe_num_experts > 1:
        line += "; routers in bf16" if choice.recipe in GROUPED_PRODUCTS else "; experts and routers in bf16"
    if unfit:
        unfit_names = ", ".join(f"{n} x {name}" for name, n in unfit.items())
        line += f"; in bf16, as their sizes are not multiples of {multiple_of(choice.recipe)}: {unfit_names}"
    log(line)


def use_grouped_fp8(stage: Stage, args: ModelArgs, recipe: Recipe, device: torch.device) -> Counter[str]:
    """Makes the experts of `args.fp8_blocks` multiply in FP8, if the recipe has grouped products.

    Returns counts, by name and shape, of experts whose sizes do not fit. Raises ConfigError for a GPU without
    a kernel for them.
    """
    unfit = Counter[str]()
    if recipe not in GROUPED_PRODUCTS:
        return unfit
    first_index = block_specs(args)[0].index
    blocks = [stage.layers[str(spec.index)] for spec in stage.blocks if spec.index - first_index in args.fp8_blocks]
    for experts in (module for block in blocks for module in block.modules() if isinstance(module, Experts)):
        shape = [experts.w1.shape[0] // experts.number, experts.hidden]
        if any(size % multiple_of(recipe) for size in shape):
            unfit[f"experts {shape}"] += 1
            continue
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in _GROUPED_GPUS[recipe]:
            actual = ".".join(map(str, torch.cuda.get_device_capability(device)))
            fix = (
                f"experts need compute capability {' or '.join(f'{n}.x' for n in _GROUPED_GPUS[recipe])}, but this GPU"
            )
            raise args.error("precision_fp8", f"{recipe}: {fix} has {actual}; write precision_fp8: tensorwise")
        experts.product = GroupedScaledProduct(GROUPED_PRODUCTS[recipe](args.te_fp8_wgrad))
    return unfit


def multiple_of(recipe: Recipe) -> int:
    """Returns the number that a linear's input and output sizes must be multiples of for this FP8 recipe."""
    return MXProduct.multiple if recipe == "mxfp8" else TensorwiseProduct.multiple


def fitting_linears(
    stage: Stage, args: ModelArgs, recipe: Recipe
) -> tuple[list[tuple[str, Linear | TiedHead]], Counter[str]]:
    """Returns ((name, linear) of each of `fp8_linears` whose sizes fit the recipe, counts of the others by
    name and shape)."""
    fitting, unfit = list[tuple[str, Linear | TiedHead]](), Counter[str]()
    for name, linear in fp8_linears(stage, args):
        shape = weight_of(linear).shape
        if any(size % multiple_of(recipe) for size in shape):
            unfit[f"{name.partition('.')[2]} {list(shape)}"] += 1
        else:
            fitting.append((name, linear))
    return fitting, unfit


def weight_of(linear: Linear | TiedHead) -> torch.Tensor:
    """Returns the weight of a linear or of a tied head, `[out, in]`."""
    return linear.projection()[0] if isinstance(linear, TiedHead) else linear.weight


def fp8_linears(stage: Stage, args: ModelArgs) -> Iterator[tuple[str, Linear | TiedHead]]:
    """Yields (name, linear) for each linear of this stage that FP8 is meant for.

    They are the linears of the blocks `args.fp8_blocks`, and the output layer unless `output_layer_in_bf16`
    is set. Mamba's `x_proj`, which makes the time steps, B and C, is left out and stays in bf16.
    """
    first_index = block_specs(args)[0].index
    for spec in stage.blocks:
        if spec.index - first_index in args.fp8_blocks:
            for name, module in stage.layers[str(spec.index)].named_modules(prefix=str(spec.index)):
                if isinstance(module, Linear) and not name.endswith("mixer.x_proj"):
                    yield name, module
    last = str(stage.specs[-1].index)
    head = stage.layers[last]
    if not args.output_layer_in_bf16 and isinstance(head, Head):
        yield f"{last}.final_linear", head.final_linear
    elif not args.output_layer_in_bf16 and isinstance(head, TiedHead):
        yield f"{last}.word_embeddings", head


def product_maker(
    recipe: Recipe, stage: Stage, args: ModelArgs, groups: ParallelGroups, engine: TransformerEngine | None = None
) -> Callable[[str], Product]:
    """Returns a function that takes the name of a linear and returns the object that computes its FP8
    products.

    With the recipe `te` every linear gets an object of its own, registered in `stage.delayed_scaling`. With
    other recipes all linears share one object without state. engine: Transformer-Engine, if it computes;
    None: torch.
    """
    in_fp8 = args.te_fp8_wgrad
    formats = Formats(gradient=torch.float8_e4m3fn) if args.te_fp8_format == "e4m3" else Formats()
    if recipe == "te":
        scaling = DelayedScaling(
            groups, formats, in_fp8, args.te_fp8_amax_history_len, args.te_fp8_amax_compute_algo, args.te_fp8_margin,
            DelayedProduct if engine is None else partial(EngineDelayedProduct, engine=engine),
        )  # fmt: skip
        stage.delayed_scaling = scaling
        return scaling.add
    shared_product: Product
    if engine is not None:
        shared_product = EngineProduct(engine, _E4M3 if recipe == "mxfp8" else formats, in_fp8, recipe == "mxfp8")
    elif recipe == "mxfp8":
        shared_product = MXProduct(in_fp8)
    else:
        shared_product = RowwiseProduct(in_fp8) if recipe == "rowwise" else TensorwiseProduct(formats, in_fp8)
    return lambda name: shared_product
