"""Checks across keys: each contradiction is refused with its key, and its neighbour is accepted."""

import pytest

from megatron.neox_arguments import NeoXArgs, load

ADAM = {"type": "Adam", "params": {"lr": 0.1}}
PATHS = {"train_data_paths": ["t"], "valid_data_paths": ["v"], "test_data_paths": ["s"]}
BLEND = PATHS | {"train_data_paths": ["t", "u"]}
CURRICULUM = {
    "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 32,
    "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 8},
}  # fmt: skip
PAIRS = {
    "dataset_impl": "pairwise", "pack_impl": "unpacked", "train_impl": "dpo", "pos_train_data_paths": ["p"],
    "neg_train_data_paths": ["n"],
}  # fmt: skip
ROTARY = {"pos_emb": "rotary"}
CASES = [
    # refused, accepted, start of the message
    ({"hidden_size": 66}, {"hidden_size": 68}, "hidden_size: 66 is not a multiple of num_attention_heads 4 (program)"),
    ({"num_kv_heads": 3}, {"num_kv_heads": 2}, "num_kv_heads: 3 does not divide num_attention_heads 4"),
    ({"seq_length": 33}, {"seq_length": 31}, "seq_length: 33 is more than max_position_embeddings 32 (program)"),
    ({"pos_emb": "rotary", "rotary_pct": 0.2}, {"pos_emb": "rotary", "rotary_pct": 0.25}, "rotary_pct: 3 of 16"),
    (
        {"model_parallel_size": 3, "intermediate_size": 96},
        {"model_parallel_size": 2},
        "model_parallel_size: 3 does not divide num_attention_heads",
    ),
    (
        {"model_parallel_size": 4, "num_kv_heads": 2},
        {"model_parallel_size": 2, "num_kv_heads": 2},
        "model_parallel_size: 4 is more than num_kv_heads 2 (program); use at most 2",
    ),
    (
        {"model_parallel_size": 2, "padded_vocab_size": 101},
        {"model_parallel_size": 2, "padded_vocab_size": 102},
        "padded_vocab_size: 101 is not a multiple of model_parallel_size 2",
    ),
    ({"pipe_parallel_size": 3}, {"pipe_parallel_size": 2}, "pipe_parallel_size: 3 stages for num_layers 2 (program)"),
    (
        {"pipe_parallel_size": 2, "zero_optimization": {"stage": 2}},
        {"pipe_parallel_size": 1, "zero_optimization": {"stage": 2}},
        "pipe_parallel_size: 2 stages work with ZeRO 0 and 1 only, not with zero_optimization.stage 2 (program)",
    ),
    (
        {"sequence_parallel": True, "model_parallel_size": 2, "seq_length": 31},
        {"sequence_parallel": True, "seq_length": 31},
        "sequence_parallel: model_parallel_size 2 does not divide seq_length 31 (program)",
    ),
    (
        {"pipe_partition_method": "best"},
        {"pipe_partition_method": "uniform"},
        "pipe_partition_method: expected uniform",
    ),
    (
        {"optimizer": ADAM, "min_lr": 0.2},
        {"optimizer": ADAM, "min_lr": 0.1},
        "min_lr: 0.2 is more than optimizer.params",
    ),
    (
        {"lr_decay_iters": 5, "lr_decay_fraction": 0.5},
        {"lr_decay_fraction": 0.5},
        "lr_decay_fraction: lr_decay_iters is",
    ),
    ({"lr_decay_style": "wsd"}, {"lr_decay_style": "wsd", "lr_wsd_decay_iters": 2}, "lr_decay_style: wsd needs"),
    ({"lr_wsd_decay_iters": 2}, {}, "lr_wsd_decay_iters: only lr_decay_style wsd reads it, not linear (default)"),
    (
        {"lr_decay_style": "wsd", "lr_wsd_decay_iters": 10, "train_iters": 10, "warmup": 0.1},
        {"lr_decay_style": "wsd", "lr_wsd_decay_iters": 9, "train_iters": 10, "warmup": 0.1},
        "lr_wsd_decay_iters: 10 and the warm-up (1) do not fit into lr_decay_iters 10 (derived)",
    ),
    (
        {"save": "x"},
        {"save": "x", "extra_save_iters": []},
        "save: needs checkpoint_factor, extra_save_iters or save_interval_in_mins",
    ),
    ({"checkpoint_factor": 2.5}, {"checkpoint_factor": 2.0}, "checkpoint_factor: expected a whole number"),
    (
        {"checkpoint_factor": 1, "checkpoint_scale": "log"},
        {"checkpoint_factor": 1.5, "checkpoint_scale": "log"},
        "checkpoint_factor: expected more than 1",
    ),
    ({"extra_save_iters": [-1]}, {"extra_save_iters": [0]}, "extra_save_iters: expected iterations from 0 on"),
    (PATHS | {"data_path": "d"}, PATHS, "data_path: train_data_paths is set too (program)"),
    (
        {"train_data_paths": ["t"]},
        {"train_data_paths": ["t"], "eval_iters": 0},
        "train_data_paths: needs valid_data_paths too",
    ),
    (PATHS | {"train_data_paths": []}, BLEND, "train_data_paths: expected at least one path, got none"),
    (
        BLEND | {"train_data_weights": [7, 2, 1]},
        BLEND | {"train_data_weights": [7, 3]},
        "train_data_weights: expected a weight for each of 2 paths (program), got 3",
    ),
    (
        {"data_path": "x", "train_label_data_paths": ["l"]},
        PATHS | {"train_label_data_paths": ["l"]},
        "train_label_data_paths: belongs to train_data_paths, which is not set; set it instead of data_path",
    ),
    (
        BLEND | {"train_label_data_paths": ["l"]},
        BLEND | {"train_label_data_paths": ["l", "m"]},
        "train_label_data_paths: expected one for each of the 2 train_data_paths (program), got 1",
    ),
    (
        PATHS | {"valid_reward_data_paths": ["r"]},
        PATHS | {"valid_reward_data_paths": ["r"], "pack_impl": "unpacked"},
        "valid_reward_data_paths: a sample has one reward; set pack_impl: unpacked (now packed (default))",
    ),
    ({"drop_last": True, "pack_impl": "best_fit"}, {"drop_last": True}, "drop_last: cuts packed documents; remove it"),
    (
        {"compat_group_texts_batch": 1000},
        {"compat_group_texts_batch": 1000, "drop_last": True},
        "compat_group_texts_batch: only drop_last reads it",
    ),
    (
        {"compat_pack_impl": True, "pack_impl": "best_fit"},
        {"compat_pack_impl": True, "pack_impl": "unpacked"},
        "compat_pack_impl: only pack_impl: pack_until_overflow and unpacked read it",
    ),
    (
        {"compat_pack_impl": True, "pack_impl": "unpacked", "truncate_documents": 5},
        {"pack_impl": "unpacked", "truncate_documents": 5},
        "truncate_documents: GPT-NeoX has none for whole documents",
    ),
    (
        BLEND | {"train_data_weights": [1, 0]},
        BLEND | {"train_data_weights": [1, 1e-9]},
        "train_data_weights: expected numbers above 0, got [1.0, 0.0]",
    ),
    (
        {"test_data_weights": [1]},
        PATHS | {"test_data_weights": [1]},
        "test_data_weights: weighs test_data_paths, which is not set",
    ),
    (
        BLEND | {"valid_data_weights": [1], "weight_by_num_documents": True},
        BLEND | {"weight_by_num_documents": True, "weighted_sampler_alpha": 0.3},
        "valid_data_weights: weight_by_num_documents (program) sets it; remove one",
    ),
    (
        {"data_path": "d", "weight_by_num_documents": True},
        PATHS | {"weight_by_num_documents": True},
        "weight_by_num_documents: weighs the sets of train_data_paths, which is not set",
    ),
    (BLEND | {"weighted_sampler_alpha": 0.3}, BLEND, "weighted_sampler_alpha: only weight_by_num_documents: true"),
    (
        BLEND | {"compat_weight_by_num_documents": True},
        BLEND | {"compat_weight_by_num_documents": True, "weight_by_num_documents": True},
        "compat_weight_by_num_documents: only weight_by_num_documents: true reads it",
    ),
    (
        BLEND | {"weight_by_num_documents": True, "weighted_sampler_alpha": -1},
        BLEND | {"weight_by_num_documents": True, "weighted_sampler_alpha": 0},
        "weighted_sampler_alpha: expected a number at least 0, got -1",
    ),
    ({"split": "a,b"}, {"split": "949/50/1"}, "split: expected up to three shares"),
    (
        BLEND | {"weight_by": "tokens", "train_data_weights": [1, 2]},
        BLEND | {"weight_by": "tokens", "weighted_sampler_alpha": 0.5},
        "train_data_weights: weight_by (program) sets it; remove one",
    ),
    (
        BLEND | {"weight_by": "tokens", "weight_by_num_documents": True},
        BLEND | {"weight_by_num_documents": True},
        "weight_by: weight_by_num_documents (program) sets the weights",
    ),
    (
        {"data_path": "d", "weight_by": "bytes"},
        BLEND | {"weight_by": "bytes"},
        "weight_by: weighs the sets of train_data_paths",
    ),
    (
        BLEND | {"train_data_weight_schedule": {"weights": [[1, 2], [0, 0]], "until": [5]}},
        BLEND | {"train_data_weight_schedule": {"weights": [[1, 2], [0, 1]], "until": [5]}},
        "train_data_weight_schedule.weights: phase 2: expected numbers from 0 on, at least one above it",
    ),
    (
        BLEND | {"train_data_weight_schedule": {"weights": [[1, -2]], "until": []}},
        BLEND | {"train_data_weight_schedule": {"weights": [[1, 2]], "until": []}},
        "train_data_weight_schedule.weights: phase 1: expected numbers from 0 on",
    ),
    (
        BLEND | {"train_data_weight_schedule": {"weights": [[1], [1, 1]], "until": [5]}},
        PATHS | {"train_data_weight_schedule": {"weights": [[1], [1]], "until": [5]}},
        "train_data_weight_schedule.weights: phase 1: expected 2 weights, got 1",
    ),
    (
        BLEND | {"train_data_weight_schedule": {"weights": [[1, 2], [2, 1], [1, 1]], "until": [5, 4]}},
        BLEND | {"train_data_weight_schedule": {"weights": [[1, 2], [2, 1], [1, 1]], "until": [4, 5]}},
        "train_data_weight_schedule.until: expected rising iterations from 1 on, got [5, 4]",
    ),
    (
        BLEND | {"train_data_weight_schedule": {"weights": [[1, 2]], "until": []}, "train_epochs": 2},
        BLEND | {"train_epochs": 2},
        "train_epochs: each set is seen whole; remove train_data_weight_schedule",
    ),
    (
        {"curriculum_learning": CURRICULUM, "seq_curriculum": {"seq_len": [16, 32], "until": [3]}},
        {"seq_curriculum": {"seq_len": [16, 32], "until": [3]}},
        "seq_curriculum: curriculum_learning (program) cuts samples short",
    ),
    (PAIRS | {"pack_impl": "packed"}, PAIRS, "pack_impl: answers are whole documents"),
    (PAIRS | {"train_impl": "normal"}, PAIRS, "dataset_impl: pairs are for train_impl dpo, kto and rm, not normal"),
    (
        PAIRS | {"neg_train_data_paths": ["n", "m"]},
        PAIRS,
        "pos_train_data_paths: pos_train_data_paths and neg_train_data_paths come together",
    ),
    (
        PAIRS | {"pos_train_label_data_paths": ["p"]},
        PAIRS | {"pos_train_label_data_paths": ["p"], "neg_train_label_data_paths": ["n"]},
        "pos_train_label_data_paths: pos_train_label_data_paths and neg_train_label_data_paths come together",
    ),
    (
        PAIRS | {"pos_train_label_data_paths": ["p", "q"], "neg_train_label_data_paths": ["n", "m"]},
        PAIRS,
        "pos_train_label_data_paths: expected labels for each of pos_train_data_paths, got 2",
    ),
    (
        {"neg_valid_data_paths": ["n"]},
        PAIRS | {"neg_valid_data_paths": ["n"], "pos_valid_data_paths": ["p"]},
        "neg_valid_data_paths: only dataset_impl: pairwise reads it",
    ),
    ({"dataset_impl": "pairwise", "pack_impl": "unpacked", "train_impl": "dpo"}, PAIRS, "pos_train_data_paths: is req"),
    ({"split": "1,1,1,1"}, {"split": "100,0,0"}, "split: expected up to three shares"),
    (
        {"precision": "fp32", "fp16": {"enabled": True}},
        {"precision": "fp32"},
        "fp16.enabled: precision is fp32 (program)",
    ),
    (
        {"precision": "fp16", "fp16": {"enabled": False}},
        {"precision": "fp16"},
        "fp16.enabled: false, but precision is fp16",
    ),
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"fp16": {"enabled": True}},
        "bf16.enabled: bf16 and fp16",
    ),
    ({"fp16": {"loss_scale": 0}}, {"fp16": {"enabled": True}}, "fp16.enabled: is required"),
    (
        {"attention_config": [[["flash"], 3]]},
        {"attention_config": [[["flash"], 2]]},
        "attention_config: describes 3 layers",
    ),
    (
        {"attention_config": [[["lokal"], 2]]},
        {},
        'attention_config: expected global, flash, mamba, mamba2, attention, mlp or moe, got "lokal"',
    ),
    ({"attention_config": [["flash", 2]]}, {}, "attention_config: expected items like [[flash], 12]"),
    (
        {"optimizer": {"type": "SGD", "params": {"lr": 1, "betas": [0.9, 0.9]}}},
        {"optimizer": {"type": "SGD", "params": {"lr": 1, "momentum": 0.9}}},
        "optimizer.params.betas: SGD has no betas, only lr, momentum",
    ),
    (
        {"optimizer": {"params": {"lr": 1, "betas": [0.9]}}},
        {"optimizer": {"params": {"lr": 1}}},
        "optimizer.params.betas:",
    ),
    (
        {"weight_decay": 0.2, "optimizer": {"params": {"weight_decay": 1}}},
        {"weight_decay": 1, "optimizer": {"params": {"weight_decay": 1}}},
        "optimizer.params.weight_decay: 1.0, but weight_decay is 0.2 (program)",
    ),
    ({"lr": 1e-4}, {"lr": 1e-4, "optimizer": {"params": {"lr": 1e-4}}}, "lr: 0.0001, but optimizer.params.lr"),
    ({"zero_stage": 1}, {"zero_stage": 1, "zero_optimization": {"stage": 1}}, "zero_stage: 1, but zero_optimization"),
    ({"optimizer_type": "sgd"}, {"optimizer_type": "ADAM"}, 'optimizer_type: "sgd", but optimizer.type, which it is'),
    ({"clip_grad": 0.5}, {"clip_grad": 0.5, "gradient_clipping": 0.5}, "clip_grad: 0.5, but gradient_clipping"),
    (
        {"warmup": 0.1, "warmup_iters": 5, "train_iters": 10},
        {"warmup_iters": 5, "train_iters": 10},
        "warmup_iters: warmup is set at program; remove one",
    ),
    ({"warmup_iters": 11, "train_iters": 10}, {"warmup_iters": 10, "train_iters": 10}, "warmup_iters: 11 is more than"),
    ({"train_epochs": 1, "train_iters": 10}, {"train_epochs": 1}, "train_epochs: train_iters is set at program"),
    (
        {"override_lr_scheduler": True, "use_checkpoint_lr_scheduler": True},
        {"override_lr_scheduler": True},
        "override_lr_scheduler: use_checkpoint_lr_scheduler (program) says the opposite",
    ),
    (
        {"curriculum_learning": CURRICULUM | {"min_difficulty": 33}},
        {"curriculum_learning": CURRICULUM},
        "curriculum_learning.min_difficulty: is more than max_difficulty 32",
    ),
    (
        {"curriculum_learning": CURRICULUM | {"schedule_config": {"total_curriculum_step": 5}}},
        {"curriculum_learning": CURRICULUM},
        "curriculum_learning.schedule_config: fixed_linear needs difficulty_step",
    ),
    ({"gpt_j_tied": True}, {"gpt_j_tied": True, "gpt_j_residual": True}, "gpt_j_tied: only gpt_j_residual: true"),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}} | ROTARY,
        {"rope_scaling": {"rope_type": "linear", "factor": 8}} | ROTARY,
        "rope_scaling: llama3 needs original_max_position_embeddings",
    ),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 8}},
        {"rope_scaling": {"rope_type": "linear", "factor": 8}} | ROTARY,
        "rope_scaling: only pos_emb rotary reads it, not learned (default)",
    ),
    (
        {"norm_placement": "olmo3", "gpt_j_residual": True},
        {"norm_placement": "olmo3"},
        "norm_placement: olmo3 has no form with gpt_j_residual True (program)",
    ),
    (
        {"use_separate_qk_norms": True, "norm": "rmsnorm"},
        {"use_separate_qk_norms": True, "use_qk_layernorm": True, "norm": "rmsnorm"},
        "use_separate_qk_norms: needs use_qk_layernorm: true and norm: rmsnorm",
    ),
    (
        {"use_qk_layernorm": True, "num_kv_heads": 2},
        {"use_qk_layernorm": True},
        "use_qk_layernorm: one norm cannot serve all heads of queries and 2 of keys",
    ),
    ({"compile": True}, {"compile": "block"}, "compile: expected auto, false, block or block-max, got true"),
    (
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "selective", "checkpoint_activations": True},
        "recompute_granularity: selective needs checkpoint_activations: true",
    ),
    (
        {"recompute_granularity": "selective", "checkpoint_activations": True, "checkpoint_num_layers": 2},
        {"recompute_granularity": "full", "checkpoint_activations": True, "checkpoint_num_layers": 2},
        "recompute_granularity: selective is within a block: checkpoint_num_layers 2 (program) must be 1",
    ),
    (
        {"recompute_granularity": "selective", "checkpoint_activations": True, "checkpoint_in_cpu": True},
        {"checkpoint_activations": True, "checkpoint_in_cpu": True},
        "recompute_granularity: checkpoint_in_cpu (program) needs full recomputation",
    ),
    (
        {"activation_memory_budget": 0.5, "checkpoint_activations": True},
        {"activation_memory_budget": 0.5},
        "activation_memory_budget: is instead of checkpoint_activations (program)",
    ),
    (
        {"intermediate_size": 100, "expansion_factor": 2},
        {"expansion_factor": 2},
        "expansion_factor: intermediate_size 100",
    ),
]


@pytest.mark.parametrize("refused, accepted, message", CASES)
def test_contradictions(problems_of, refused, accepted, message):
    (problem,) = problems_of(refused)
    assert problem.removeprefix("program: ").startswith(message)
    assert problems_of(accepted) == ()


def test_places_of_both_keys_are_named(write):
    a = "num_layers: 2\nhidden_size: 66\n"
    b = "num_attention_heads: 4\nseq_length: 8\nmax_position_embeddings: 8\n"
    with pytest.raises(ValueError) as caught:
        load(write(a=a, b=b))
    assert str(caught.value) == "a.yml:2: hidden_size: 66 is not a multiple of num_attention_heads 4 (b.yml:1)"


TRAINABLE = {
    "train_iters": 1,
    "data_path": "d",
    "train_micro_batch_size_per_gpu": 1,
    "tokenizer_type": "CharLevelTokenizer",
}


def test_what_training_needs(problems_of):
    assert problems_of(TRAINABLE, NeoXArgs.check_training) == ()
    for key in ("train_iters", "data_path", "train_micro_batch_size_per_gpu"):
        (problem,) = problems_of(TRAINABLE | {key: None}, NeoXArgs.check_training)
        assert problem.startswith(f"{key}: is required for training")
    (problem,) = problems_of(TRAINABLE | {"tokenizer_type": "HFTokenizer"}, NeoXArgs.check_training)
    assert problem.startswith("vocab_file: is required by tokenizer_type HFTokenizer")
    problems = problems_of(TRAINABLE | {"tokenizer_type": None}, NeoXArgs.check_training)
    assert [line.split(":")[0] for line in problems] == ["vocab_file", "merge_file"], "GPT-NeoX's default is GPT-2's"


def test_what_generation_needs(problems_of):
    enough = {"load": "x", "tokenizer_type": "CharLevelTokenizer", "maximum_tokens": 31}
    assert problems_of(enough, NeoXArgs.check_generation) == ()
    assert (
        problems_of(enough | {"text_gen_type": "input-file", "sample_input_file": "p"}, NeoXArgs.check_generation) == ()
    )
    from_save = {**enough, "load": None, "save": "x", "checkpoint_factor": 1}
    assert problems_of(from_save, NeoXArgs.check_generation) == ()
    assert len(problems_of({"maximum_tokens": 31}, NeoXArgs.check_generation)) == 3
    (problem,) = problems_of(enough | {"maximum_tokens": 32}, NeoXArgs.check_generation)
    assert "32 leaves no place for a context in max_position_embeddings 32" in problem
    (problem,) = problems_of(enough | {"prompt_end": ""}, NeoXArgs.check_generation)
    assert 'prompt_end: is empty; it separates prompts, as "\\n" (in double quotes) does' in problem
    (problem,) = problems_of(enough | {"text_gen_type": "input-file"}, NeoXArgs.check_generation)
    assert "sample_input_file: is required" in problem
