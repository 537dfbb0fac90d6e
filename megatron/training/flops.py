"""FLOPs of an optimizer step: of the model as it is, and as GPT-NeoX counts them, so that logged numbers compare.

seq_length: tokens of a sample where a curriculum cuts them (a mean); None: all. row_length: tokens of the rows they are
read in, which attention spans (a mean); None: as many.
"""

from __future__ import annotations

from megatron.neox_arguments import NeoXArgs


def model_flops(args: NeoXArgs, seq_length: float | None = None, row_length: float | None = None) -> float:
    """Matrix products of one iteration of the global batch, forward and backward (twice the forward).

    Grouped queries, the width of gated MLPs and the padded vocabulary count as they are; attention counts the causal
    half of its square, packed documents or not; recomputation does not count.
    """
    seq = seq_length or args.seq_length
    hidden, query, kv = args.hidden_size, args.num_attention_heads * args.head_dim, args.kv_heads * args.head_dim
    attention = hidden * (query + 2 * kv) + query * hidden
    mlp = args.ffn_size * hidden * (3 if args.is_gated else 2)
    scores_and_values = (row_length or seq) * query  # two products of half a square each
    multiplications = args.num_layers * (attention + mlp + scores_and_values) + hidden * args.padded_vocab_size
    return 3.0 * 2.0 * args.train_batch_size * seq * multiplications


def neox_flops(
    args: NeoXArgs, factor: int, seq_length: float | None = None, row_length: float | None = None
) -> float:
    """NeoX's formula for one iteration of the global batch; factor 3 forward and backward, 4 with recomputation.

    It ignores grouped queries, the width of gated MLPs and the causal half of attention, and its share of the head
    is right for factor 4 alone.
    """
    layers, hidden, seq = args.num_layers, args.hidden_size, seq_length or args.seq_length
    brackets = 1.0 + (row_length or seq) / (6.0 * hidden) + args.padded_vocab_size / (16.0 * layers * hidden)
    return 24.0 * factor * args.train_batch_size * seq * layers * hidden**2 * brackets


def readable_flops(value: float) -> str:
    """As NeoX's log line writes it, `12.3TFLOPS`."""
    for unit in ("", "KFLOPS", "MFLOPS", "GFLOPS", "TFLOPS", "PFLOPS", "EFLOPS", "ZFLOPS"):
        if abs(value) < 1000.0:
            return f"{value:3.1f}{unit}"
        value /= 1000.0
    return f"{value:.1f}Yi"
