"""Counts the FLOPs of an optimizer step: exactly for this model, and by GPT-NeoX's formula, to compare
logs."""

from megatron.data import rows_per_sample
from megatron.model import block_specs, layer_params, lowest_trained, prediction_specs, trained_parameters
from megatron.model.layer_products import head_products, mixing_products, weight_products
from megatron.model.trainable import head_parameter
from megatron.neox_arguments import NeoXArgs


def model_flops(args: NeoXArgs, seq_length: float | None = None, row_length: float | None = None) -> float:
    """Returns the FLOPs of matrix products in one iteration of the global batch, forward and backward.

    seq_length, row_length: mean tokens per sample and per row (which attention spans), if a curriculum
        shortens them; None: `args.seq_length`, and as many per row.

    - Backward is twice the forward if all weights are trained. Frozen weights have no gradient, and there is
      no backward below the lowest trained layer.
    - Grouped queries, gated MLPs and the padded vocabulary count at their real sizes. Only the experts that a
      token is routed to count.
    - Attention counts as the causal half of its square, packed documents or not; Mamba 2 as the causal half
      of each chunk. Mamba's scan counts as three products with its state.
    - Recomputation does not count. Each block of multi-token prediction counts with its output layer.
    """
    seq = seq_length or args.seq_length
    trained, lowest, specs = trained_parameters(args), lowest_trained(args), layer_params(args)
    multiplications = 0.0
    predictions = prediction_specs(args)
    for block in (*block_specs(args), *predictions):
        layer, scores_and_values = block.index, mixing_products(block.mixer, row_length or seq)
        sizes = {(layer, spec.name): weight_products(spec, args) for spec in specs[layer]}
        forward, trained_size = sum(sizes.values()), sum(size for name, size in sizes.items() if name in trained)
        multiplications += forward + scores_and_values + trained_size
        multiplications += forward + 2 * scores_and_values if layer >= lowest else 0
    head = args.num_layers + 4
    head_layer, name = head_parameter(args)
    head_trained = not trained.isdisjoint(
        {(head_layer, name), (head_layer, name.replace(".weight", ".modules_to_save"))}
    )
    multiplications += head_products(args) * (1 + head_trained + (lowest < head))
    multiplications += head_products(args) * len(predictions) * (2 + head_trained)
    return 2.0 * args.train_batch_size * rows_per_sample(args) * seq * multiplications


def neox_flops(
    args: NeoXArgs, factor: float, seq_length: float | None = None, row_length: float | None = None
) -> float:
    """Returns the FLOPs of one iteration of the global batch by GPT-NeoX's formula.

    factor: 3 for forward and backward, 4 if all blocks are recomputed. seq_length, row_length: as in
    `model_flops`.

    The formula ignores grouped queries, the width of gated MLPs, experts and the causal half of attention.
    Its share for the head is right only with factor 4. With Mamba it counts all blocks as Mamba blocks. For
    models with blocks that GPT-NeoX lacks, `model_flops` counts instead.
    """
    kinds = set(args.attention_config)
    is_newer = args.kv_lora_rank is not None or args.mtp_num_layers is not None
    if kinds - {"global", "flash", "mamba"} or is_newer:
        return model_flops(args, seq_length, row_length) * factor / 3.0
    if "mamba" in kinds:
        return _neox_mamba_flops(args, factor, seq_length or args.seq_length)
    layers, hidden, seq = args.num_layers, args.hidden_size, seq_length or args.seq_length
    brackets = 1.0 + (row_length or seq) / (6.0 * hidden) + args.padded_vocab_size / (16.0 * layers * hidden)
    return 24.0 * factor * args.train_batch_size * rows_per_sample(args) * seq * layers * hidden**2 * brackets


def _neox_mamba_flops(args: NeoXArgs, factor: float, seq: float) -> float:
    """Returns the FLOPs of one iteration of the global batch by GPT-NeoX's formula for Mamba models.

    It counts the scan, projections and convolution of each layer, and the head. seq: tokens per sample.
    """
    hidden, inner, state = args.hidden_size, args.mamba_inner_size, args.mamba_state_dim or 16
    rank = args.mamba_dt_rank or -(-hidden // 16)
    layer = inner * (11 * state + 4 * rank + 1) + 6 * inner * hidden + 2 * inner * args.mamba_conv_kernel
    tokens = args.train_batch_size * rows_per_sample(args) * seq
    return tokens * (factor * args.num_layers * layer + 6.0 * hidden * args.padded_vocab_size)


def readable_flops(value: float) -> str:
    """Returns FLOPs per second as text in the form of GPT-NeoX's log line, such as `12.3TFLOPS`."""
    for unit in ("", "KFLOPS", "MFLOPS", "GFLOPS", "TFLOPS", "PFLOPS", "EFLOPS", "ZFLOPS"):
        if abs(value) < 1000.0:
            return f"{value:3.1f}{unit}"
        value /= 1000.0
    return f"{value:.1f}Yi"
