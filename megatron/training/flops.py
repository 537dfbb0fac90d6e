"""FLOPs of a step as GPT-NeoX counts them, so that logged numbers compare."""

from __future__ import annotations

from megatron.neox_arguments import NeoXArgs


def neox_flops(args: NeoXArgs, factor: int) -> float:
    """NeoX's formula for one iteration of the global batch; factor 3 forward and backward, 4 with recomputation.

    It ignores grouped queries, the width of gated MLPs and the causal half of attention.
    """
    layers, hidden, seq = args.num_layers, args.hidden_size, args.seq_length
    brackets = 1.0 + seq / (6.0 * hidden) + args.padded_vocab_size / (16.0 * layers * hidden)
    return 24.0 * factor * args.train_batch_size * seq * layers * hidden**2 * brackets


def readable_flops(value: float) -> str:
    """As NeoX's log line writes it, `12.3TFLOPS`."""
    for unit in ("", "KFLOPS", "MFLOPS", "GFLOPS", "TFLOPS", "PFLOPS", "EFLOPS", "ZFLOPS"):
        if abs(value) < 1000.0:
            return f"{value:3.1f}{unit}"
        value /= 1000.0
    return f"{value:.1f}Yi"
