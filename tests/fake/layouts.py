"""The layouts that are run on fake CUDA, and small models for them. Imports no torch."""

from dataclasses import dataclass, field
from typing import Any

SEQ, MICRO_BATCH, LAYERS, HIDDEN, VOCAB = 192, 2, 2, 256, 512
MODEL: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 8, "intermediate_size": 512, "seq_length": SEQ,
    "max_position_embeddings": SEQ, "padded_vocab_size": VOCAB, "pos_emb": "rotary", "norm": "rmsnorm",
    "activation": "swiglu", "compat_ffn_width": "none", "use_bias_in_attn_linear": False, "use_bias_in_mlp": False,
    "no_weight_tying": True, "train_micro_batch_size_per_gpu": MICRO_BATCH, "gradient_accumulation_steps": 1,
    "precision": "bfloat16", "compile": False, "distributed_backend": "nccl",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One rank of one layout.

    values: configuration keys beside `MODEL`'s. documents: for each step the document starts of its rows;
    none: one step of whole rows. pairs: rows, or documents, are chosen and rejected answers. prefixes: for
    each step how many tokens of the one before each document of its rows begins with. inference: after the
    step, texts are scored and generated. validates: every batch is scored after its step. native: the step is
    the native engine's, with its optimizer; else all but the update, by hand. planned: the report is that of
    `planning.dry_run`. mistake: a name of
    `mistakes.MISTAKES`. capability: CUDA's, of the GPU.
    """

    world: int = 1
    rank: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    documents: list[list[list[int]]] = field(default_factory=list)
    pairs: bool = False
    prefixes: list[list[int]] = field(default_factory=list)
    inference: bool = False
    validates: bool = False
    native: bool = False
    planned: bool = False
    mistake: str = ""
    capability: tuple[int, int] = (9, 0)


TP2: dict[str, Any] = {"model_parallel_size": 2}
SP2: dict[str, Any] = {**TP2, "sequence_parallel": True}
PP2: dict[str, Any] = {"pipe_parallel_size": 2}
RECOMPUTE: dict[str, Any] = {"checkpoint_activations": True, "checkpoint_num_layers": 1}
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
DPO: dict[str, Any] = {"train_impl": "dpo", "dataset_impl": "pairwise", "pack_impl": "unpacked",
                       "pos_train_data_paths": ["chosen"], "neg_train_data_paths": ["rejected"]}  # fmt: skip
PACKED_DPO: dict[str, Any] = {**DPO, "pack_impl": "best_fit"}
COMPILE: dict[str, Any] = {"compile": "block"}
WINDOW: dict[str, Any] = {"sliding_window_width": 32}
GQA: dict[str, Any] = {"num_kv_heads": 2}
PACKED: dict[str, Any] = {"reset_attention_mask": True, "reset_position_ids": True}
# Pairs in two rows, for steps that differ in everything: chosen and rejected in turn, and what these share.
PAIRS = [[[0, 100], [0, 70]], [[0, 40, 60, 120], [0, 191]], [[0, 64, 128, 160], [0, 10, 20, 100]]]
PREFIXES = [[0, 20, 0, 1], [0, 39, 0, 0, 0, 5], [0, 1, 0, 2, 0, 3, 0, 4]]
SHARED: dict[str, Any] = {"documents": PAIRS, "prefixes": PREFIXES, "pairs": True}
BIG: dict[str, Any] = {"model_parallel_size": 8, "pipe_parallel_size": 4, "sequence_parallel": True, "num_layers": 8,
                       "checkpoint_activations": True}  # fmt: skip
LLAMA_13B: dict[str, Any] = {
    "num_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "intermediate_size": 13824,
    "padded_vocab_size": 32000, "seq_length": 4096, "max_position_embeddings": 4096,
    "train_micro_batch_size_per_gpu": 1, "checkpoint_activations": True, "checkpoint_num_layers": 1,
}  # fmt: skip
