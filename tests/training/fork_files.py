"""Configurations as users of the geodesic fork write them, made from its shape (no file of the fork is copied)."""

NEOX_7B = """\
pipe_parallel_size: 1
model_parallel_size: 1
num_layers: 32
hidden_size: 4096
num_attention_heads: 32
seq_length: 2048
max_position_embeddings: 2048
pos_emb: rotary
rotary_pct: 0.25
no_weight_tying: true
gpt_j_residual: true
output_layer_parallelism: column
norm: layernorm
activation: gelu
attention_config: [[["flash"], 32]]
scaled_upper_triang_masked_softmax_fusion: true
init_method: small_init
output_layer_init_method: wang_init
te_columnparallel: false
te_rowparallel: false
te_layernorm_mlp: true
te_mha: true
te_fp8_format: hybrid
te_fp8_wgrad: true
te_fp8_amax_history_len: 1
te_fp8_amax_compute_algo: most_recent
te_fp8_margin: 0
te_fp8_mha: false
precision: bfloat16
fp32_allreduce: true
zero_optimization: {stage: 1, allgather_partitions: true, allgather_bucket_size: 1260000000, overlap_comm: true,
  reduce_scatter: true, reduce_bucket_size: 1260000000, contiguous_gradients: true, cpu_offload: false}
optimizer: {type: Adam, params: {lr: 0.00012, betas: [0.9, 0.95], eps: 1.0e-8}}
min_lr: 0.000012
train_micro_batch_size_per_gpu: 8
gradient_accumulation_steps: 2
data_impl: mmap
checkpoint_activations: true
checkpoint_num_layers: 1
partition_activations: true
synchronize_each_layer: true
gradient_clipping: 1.0
weight_decay: 0.1
hidden_dropout: 0
attention_dropout: 0
train_iters: 143000
lr_decay_iters: 143000
distributed_backend: nccl
lr_decay_style: cosine
warmup: 0.01
checkpoint_factor: 1000000
extra_save_iters: [0]
eval_interval: 1000000
eval_iters: 0
split: "100,0,0"
log_interval: 1
steps_per_print: 10
wall_clock_breakdown: true
data_path: /projects/site/data/corpus/corpus_text_document
vocab_file: /projects/site/tokenizers/tokenizer.json
tokenizer_type: HFTokenizer
save: /projects/site/checkpoints/run
load: /projects/site/checkpoints/base
tensorboard_dir: /projects/site/tensorboard
log_dir: /projects/site/logs
launcher: slurm
deepspeed_slurm: true
no_ssh_check: true
finetune: true
no_save_optim: true
checkpoint_validation_with_forward_pass: false
use_wandb: false
wandb_project: pretraining
wandb_team: group
wandb_run_name: run
wandb_host: https://api.wandb.ai
"""
NATIVE = NEOX_7B + "te_backend: native\n"
PLAIN = "".join(line + "\n" for line in NEOX_7B.splitlines() if not line.startswith("te_"))
LONG = NEOX_7B.replace("seq_length: 2048", "seq_length: 16384").replace("embeddings: 2048", "embeddings: 16384")
OLMO = """\
num_layers: 32
hidden_size: 4096
num_attention_heads: 32
seq_length: 4096
max_position_embeddings: 65536
norm: rmsnorm
rms_norm_epsilon: 1.0e-6
norm_placement: olmo3
use_qk_layernorm: true
use_separate_qk_norms: true
use_bias_in_norms: false
use_bias_in_attn_linear: false
use_bias_in_mlp: false
activation: swiglu
intermediate_size: 11008
mlp_multiple_of: 1
pos_emb: rotary
rotary_pct: 1.0
rotary_emb_base: 500000
no_weight_tying: true
bf16: {enabled: true}
optimizer: {type: Adam, params: {lr: 0.0001, betas: [0.9, 0.95], eps: 1.0e-8}}
zero_optimization: {stage: 1}
train_micro_batch_size_per_gpu: 1
gradient_clipping: 0.5
train_iters: 100
eval_iters: 0
split: "100,0,0"
data_path: /projects/site/data/x_text_document
vocab_file: /projects/site/tokenizer.json
tokenizer_type: HFTokenizer
launcher: slurm
deepspeed_slurm: true
no_save_optim: true
"""
ASCENT = "ga_dataset: /projects/site/data/forget_text_document\nga_mode: interleaved\nga_interleave_ratio: 1\n"
FORK_FILES: dict[str, tuple[str, str]] = {
    "neox_7b": (NEOX_7B, "trained"),
    "neox_7b_native": (NATIVE, "trained"),
    "neox_7b_plain": (PLAIN, "trained"),
    "neox_7b_16k": (LONG, "trained"),
    "neox_7b_checks": (
        PLAIN.replace("forward_pass: false", "forward_pass: true").replace("clipping: 1.0", "clipping: 0.5"),
        "trained",
    ),
    "neox_7b_dashes": (PLAIN.replace("train_iters", "train-iters").replace("num_layers", "num-layers"), "trained"),
    "olmo": (OLMO, "trained"),
    "neox_7b_eval_tasks": (NATIVE + "eval_tasks: [piqa, wmdp_bio]\n", "trained"),
    "neox_7b_ascent": (NATIVE + ASCENT, "later"),
    "neox_7b_difference": (NATIVE + ASCENT + "gd_mode: true\ngd_retain_dataset: /projects/site/data/keep\n", "later"),
}
"""Text and what becomes of it, by name."""
