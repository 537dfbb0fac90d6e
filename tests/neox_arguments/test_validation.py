"""Checks across keys: each contradiction is refused with its key, and its neighbour is accepted."""

import pytest
import yaml

from megatron.neox_arguments import NeoXArgs, load
from megatron.neox_arguments.values.losses import least_prefix_saving
from tests.neox_arguments.conftest import TRAINABLE, message_states, problems_of

TABLE = """
- adam: &adam {type: Adam, params: {lr: 0.1}}
  paths: &paths {train_data_paths: [t], valid_data_paths: [v], test_data_paths: [s]}
  blend: &blend {<<: *paths, train_data_paths: [t, u]}
  by_count: &by_count {<<: *blend, weight_by_num_documents: true}
  curriculum: &curriculum {enabled: true, curriculum_type: seqlen, min_difficulty: 8, max_difficulty: 32,
    schedule_type: fixed_linear, schedule_config: {total_curriculum_step: 5, difficulty_step: 8}}
  pairs: &pairs {dataset_impl: pairwise, pack_impl: unpacked, train_impl: dpo, pos_train_data_paths: [p],
    neg_train_data_paths: [n]}
  kto: &kto {train_impl: kto, pack_impl: unpacked}
  mamba: &mamba {attention_config: [[[mamba], all]], pos_emb: none}
  selective: &selective {recompute_granularity: selective, checkpoint_activations: true}
  wsd: &wsd {lr_decay_style: wsd, train_iters: 10, warmup: 0.1}
  llama3_rope: &llama3_rope {rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4}

# What is refused; what makes it accepted (null: without the key); the key and other facts of the message
- [{hidden_size: 66}, {hidden_size: 68}, hidden_size, 66 num_attention_heads 4]
- [{num_kv_heads: 3}, {num_kv_heads: 2}, num_kv_heads, 3 num_attention_heads 4]
- [{seq_length: 33}, {seq_length: 31}, seq_length, 33 max_position_embeddings 32]
- [{pos_emb: rotary, rotary_pct: 0.2}, {rotary_pct: 0.25}, rotary_pct, 3 16 head_dim even]
- [{model_parallel_size: 3, intermediate_size: 96}, {model_parallel_size: 2}, model_parallel_size,
   3 num_attention_heads 4]
- [{model_parallel_size: 2, num_attention_heads: 6, head_dim: 8, num_kv_heads: 3}, {num_kv_heads: 1},
   model_parallel_size, 2 num_kv_heads 3]
- [{model_parallel_size: 2, padded_vocab_size: 101}, {padded_vocab_size: 102}, padded_vocab_size,
   101 model_parallel_size 2]
- [{pipe_parallel_size: 3}, {pipe_parallel_size: 2}, pipe_parallel_size, 3 num_layers 2]
- [{pipe_parallel_size: 2, pipeline_schedule: interleaved}, {pipeline_schedule: zero_bubble}, pipe_parallel_size,
   2 ranks 4 stages interleaved num_layers]
- [{pipe_parallel_size: 2, pipeline_layers: [2, 1]}, {pipeline_layers: [1, 1]}, pipeline_layers, 2 1 num_layers]
- [{pipe_parallel_size: 3, pipeline_layers: [1, 0, 1]}, {pipeline_layers: [0, 1, 1]}, pipeline_layers, 1 0 first last]
- [{pipe_parallel_size: 2, pipeline_layers: [2, 0], pos_emb: rpe}, {pos_emb: learned}, pipeline_layers, 2 0 pos_emb rpe]
- [{sequence_parallel: true, model_parallel_size: 2, seq_length: 31}, {model_parallel_size: null}, sequence_parallel,
   model_parallel_size 2 seq_length 31]
- [{context_parallel_size: 2, context_parallel_ulysses_size: 2}, {context_parallel_type: ring},
   context_parallel_ulysses_size, allgather ring auto]
- [{context_parallel_size: 4, context_parallel_type: ring, context_parallel_ulysses_size: 3},
   {context_parallel_ulysses_size: 2}, context_parallel_ulysses_size, 3 context_parallel_size 4]
- [{context_parallel_size: 8, context_parallel_type: ulysses}, {context_parallel_type: auto}, context_parallel_type,
   4 heads 8 ranks allgather]
- [{context_parallel_size: 2, <<: *mamba}, {attention_config: [[[mamba2], all]], mamba_num_groups: 2}, attention_config,
   mamba2 context_parallel_size 2]
- [{context_parallel_size: 8, attention_config: [[[mamba2], all]], mamba_num_groups: 2, pos_emb: none},
   {context_parallel_size: 4}, seq_length, 32 context_parallel_size 8 3]
- [{context_parallel_size: 8, attention_config: [[[gated_delta_net], all]]}, {linear_conv_kernel_dim: 3}, seq_length,
   32 context_parallel_size 8 gated_delta_net 3]
- [{attention_config: [[[gated_delta_net], all]], linear_num_value_heads: 24}, {linear_num_key_heads: 8},
   linear_num_value_heads, 24 16 multiple]
- [{attention_config: [[[gated_delta_net], all]], linear_num_key_heads: 2, model_parallel_size: 4},
   {linear_num_key_heads: 4}, linear_num_key_heads, 2 model_parallel_size 4]
- [{attention_config: [[[kimi_delta_attention], all]], linear_num_value_heads: 16, linear_value_head_dim: 64},
   {linear_key_head_dim: 64}, linear_key_head_dim, 128 linear_value_head_dim 64]
- [{attention_config: [[[gated_delta_net], all]], gpt_j_residual: true}, {gpt_j_residual: false}, gpt_j_residual,
   attention_config gated_delta_net]
- [{attention_config: [[[gated_delta_net], all]], lora: {r: 4, target: [in_proj_qkvz, in_proj_b]}},
   {lora: {r: 4, target: [in_proj_qkv, in_proj_b]}}, lora.target, in_proj_qkvz in_proj_b rows]
- [{attention_config: [[[gated_delta_net], all]], lora: {r: 4, target: [q_proj]}}, {lora: {r: 4}}, lora.target,
   q_proj linear in_proj_qkvz out_proj]
- [{linear_key_head_dim: 64}, {attention_config: [[[gated_delta_net], all]]}, linear_key_head_dim,
   no effect gated_delta_net]
- [{attention_output_gate: true, attention_config: [[[gated_delta_net], all]]}, {attention_config: null},
   attention_output_gate, no block has attention]
- [{attention_output_gate: true, te_mha: true}, {te_mha: false}, attention_output_gate, te_mha]
- [{context_parallel_size: 2, moe_num_experts: 4, moe_router_type: sinkhorn}, {moe_router_type: topk}, moe_router_type,
   sinkhorn context_parallel_size 2 topk]
- [{context_parallel_size: 2, moe_num_experts: 4, moe_router_type: topk, moe_expert_capacity_factor: 1.0},
   {moe_expert_capacity_factor: null}, moe_expert_capacity_factor, context_parallel_size 2]
- [{pipe_partition_method: best}, {pipe_partition_method: uniform}, pipe_partition_method,
   best uniform parameters type:REGEX]
- [{optimizer: *adam, min_lr: 0.2}, {min_lr: 0.1}, min_lr, 0.2 optimizer.params.lr 0.1]
- [{lr_decay_iters: 5, lr_decay_fraction: 0.5}, {lr_decay_iters: null}, lr_decay_fraction, lr_decay_iters]
- [{lr_decay_style: wsd}, {lr_wsd_decay_iters: 2}, lr_decay_style, wsd lr_wsd_decay_iters]
- [{lr_wsd_decay_iters: 2}, {lr_wsd_decay_iters: null}, lr_wsd_decay_iters, lr_decay_style wsd linear]
- [{<<: *wsd, lr_wsd_decay_iters: 10}, {lr_wsd_decay_iters: 9}, lr_wsd_decay_iters, 10 1 lr_decay_iters]
- [{save: x}, {extra_save_iters: []}, save, checkpoint_factor extra_save_iters save_interval_in_mins]
- [{checkpoint_factor: 2.5}, {checkpoint_factor: 2.0}, checkpoint_factor, 2.5 checkpoint_scale linear]
- [{checkpoint_factor: 1, checkpoint_scale: log}, {checkpoint_factor: 1.5}, checkpoint_factor, 1 checkpoint_scale log]
- [{extra_save_iters: [-1]}, {extra_save_iters: [0]}, extra_save_iters, expected 0]
- [{<<: *paths, data_path: d}, {data_path: null}, data_path, train_data_paths]
- [{train_data_paths: [t]}, {eval_iters: 0}, train_data_paths, valid_data_paths eval_iters split]
- [{<<: *paths, train_data_paths: []}, {train_data_paths: [t, u]}, train_data_paths, expected one none]
- [{<<: *blend, train_data_weights: [7, 2, 1]}, {train_data_weights: [7, 3]}, train_data_weights, 2 paths 3]
- [{data_path: x, train_label_data_paths: [l]}, {<<: *paths, data_path: null}, train_label_data_paths,
   train_data_paths data_path]
- [{<<: *blend, train_label_data_paths: [l]}, {train_label_data_paths: [l, m]}, train_label_data_paths,
   2 train_data_paths 1]
- [{<<: *paths, valid_reward_data_paths: [r]}, {pack_impl: unpacked}, valid_reward_data_paths,
   pack_impl unpacked packed]
- [{<<: *paths, valid_sets: {a/b: x}}, {valid_sets: {ab: x}}, valid_sets, a/b letters]
- [{<<: *paths, valid_sets: {web: []}}, {valid_sets: {web: [x]}}, valid_sets.web, prefix]
- [{<<: *paths, valid_sets: {web: x}, eval_iters: 0}, {eval_iters: 1}, valid_sets, eval_iters 0]
- [{<<: *pairs, pack_impl: unpacked, valid_sets: {web: x}}, {valid_sets: null}, valid_sets, train_impl dpo]
- [{<<: *paths, valid_set_labels: {web: l}}, {valid_sets: {web: x}}, valid_set_labels, valid_sets]
- [{<<: *paths, valid_sets: {web: [x, y]}, valid_set_labels: {web: l}}, {valid_set_labels: {web: [l, m]}},
   valid_set_labels.web, 2 valid_sets 1]
- [{<<: *paths, log_spikes_above_sigma: 6}, {log_dir: d}, log_spikes_above_sigma, log_dir save]
- [{<<: *pairs, pack_impl: unpacked, log_loss_by_source: true}, {log_loss_by_source: false}, log_loss_by_source,
   next-token preferences]
- [{drop_last: true, pack_impl: best_fit}, {pack_impl: null}, drop_last, pack_impl best_fit]
- [{compat_group_texts_batch: 1000}, {drop_last: true}, compat_group_texts_batch, drop_last]
- [{compat_pack_impl: true, pack_impl: best_fit}, {pack_impl: unpacked}, compat_pack_impl,
   pack_impl pack_until_overflow unpacked]
- [{compat_pack_impl: true, pack_impl: unpacked, truncate_documents: 5}, {compat_pack_impl: null}, truncate_documents,
   compat_pack_impl]
- [{<<: *blend, train_data_weights: [1, 0]}, {train_data_weights: [1, 1.0e-9]}, train_data_weights,
   "above 0 [1.0, 0.0]"]
- [{test_data_weights: [1]}, *paths, test_data_weights, test_data_paths]
- [{<<: *by_count, valid_data_weights: [1]}, {valid_data_weights: null, weighted_sampler_alpha: 0.3},
   valid_data_weights, weight_by_num_documents]
- [{data_path: d, weight_by_num_documents: true}, {<<: *paths, data_path: null}, weight_by_num_documents,
   train_data_paths]
- [{<<: *blend, weighted_sampler_alpha: 0.3}, {weighted_sampler_alpha: null}, weighted_sampler_alpha,
   weight_by_num_documents weight_by]
- [{<<: *blend, compat_weight_by_num_documents: true}, {weight_by_num_documents: true}, compat_weight_by_num_documents,
   weight_by_num_documents]
- [{<<: *by_count, weighted_sampler_alpha: -1}, {weighted_sampler_alpha: 0}, weighted_sampler_alpha, 0 -1]
- [{split: "a,b"}, {split: 949/50/1}, split, "a,b three 969, 30, 1"]
- [{split: "1,1,1,1"}, {split: "100,0,0"}, split, "1,1,1,1 three 969, 30, 1"]
- [{<<: *blend, weight_by: tokens, train_data_weights: [1, 2]}, {train_data_weights: null, weighted_sampler_alpha: 0.5},
   train_data_weights, weight_by]
- [{<<: *by_count, weight_by: tokens}, {weight_by: null}, weight_by, weight_by_num_documents]
- [{data_path: d, weight_by: bytes}, {<<: *blend, data_path: null}, weight_by, train_data_paths]
- [{<<: *blend, train_data_weight_schedule: {weights: [[1, 2], [0, 0]], until: [5]}},
   {train_data_weight_schedule: {weights: [[1, 2], [0, 1]], until: [5]}}, train_data_weight_schedule.weights, phase 2 0]
- [{<<: *blend, train_data_weight_schedule: {weights: [[1, -2]], until: []}},
   {train_data_weight_schedule: {weights: [[1, 2]], until: []}}, train_data_weight_schedule.weights, phase 1 0]
- [{<<: *blend, train_data_weight_schedule: {weights: [[1], [1, 1]], until: [5]}},
   {<<: *paths, train_data_weight_schedule: {weights: [[1], [1]], until: [5]}},
   train_data_weight_schedule.weights, phase 1 2 weights]
- [{<<: *blend, train_data_weight_schedule: {weights: [[1, 2], [2, 1], [1, 1]], until: [5, 4]}},
   {train_data_weight_schedule: {weights: [[1, 2], [2, 1], [1, 1]], until: [4, 5]}},
   train_data_weight_schedule.until, "increasing [5, 4]"]
- [{<<: *blend, train_data_weight_schedule: {weights: [[1, 2]], until: []}, train_epochs: 2},
   {train_data_weight_schedule: null}, train_epochs, train_data_weight_schedule]
- [{curriculum_learning: *curriculum, seq_curriculum: {seq_len: [16, 32], until: [3]}}, {curriculum_learning: null},
   seq_curriculum, curriculum_learning]
- [{<<: *pairs, pack_impl: packed}, {pack_impl: unpacked}, pack_impl, unpacked pack_until_overflow best_fit]
- [{<<: *pairs, train_impl: normal}, {train_impl: dpo}, dataset_impl, train_impl dpo kto rm normal]
- [{<<: *pairs, neg_train_data_paths: [n, m]}, {neg_train_data_paths: [n]}, pos_train_data_paths, neg_train_data_paths]
- [{<<: *pairs, pos_train_label_data_paths: [p]}, {neg_train_label_data_paths: [n]}, pos_train_label_data_paths,
   neg_train_label_data_paths]
- [{<<: *pairs, pos_train_label_data_paths: [p, q], neg_train_label_data_paths: [n, m]},
   {pos_train_label_data_paths: null, neg_train_label_data_paths: null},
   pos_train_label_data_paths, pos_train_data_paths 2]
- [{neg_valid_data_paths: [n]}, {<<: *pairs, pos_valid_data_paths: [p]}, neg_valid_data_paths, dataset_impl pairwise]
- [{dataset_impl: pairwise, pack_impl: unpacked, train_impl: dpo}, *pairs, pos_train_data_paths,
   required pairwise neg_train_data_paths]
- [{precision: fp32, fp16: {enabled: true}}, {fp16: null}, fp16.enabled, precision fp32]
- [{precision: fp16, fp16: {enabled: false}}, {fp16: null}, fp16.enabled, false precision fp16]
- [{fp16: {enabled: true}, bf16: {enabled: true}}, {bf16: null}, bf16.enabled, bf16 fp16 both]
- [{fp16: {loss_scale: 0}}, {fp16: {enabled: true}}, fp16.enabled, required]
- [{attention_config: [[[flash], 3]]}, {attention_config: [[[flash], 2]]}, attention_config, 3 layers num_layers 2]
- [{attention_config: [[[lokal], 2]]}, {attention_config: [[[global], 2]]}, attention_config,
   global flash mamba mamba2 attention mlp moe lokal]
- [{attention_config: [[flash, 2]]}, {attention_config: [[[flash], 2]]}, attention_config,
   "expected items ['flash', 2]"]
- [{optimizer: {type: SGD, params: {lr: 1, betas: [0.9, 0.9]}}},
   {optimizer: {type: SGD, params: {lr: 1, momentum: 0.9}}}, optimizer.params.betas, SGD betas lr momentum]
- [{optimizer: {type: Adam, params: {lr: 1, betas: [0.9]}}}, {optimizer: {type: Adam, params: {lr: 1}}},
   optimizer.params.betas, "two [0.9]"]
- [{weight_decay: 0.2, optimizer: {type: Adam, params: {weight_decay: 1}}}, {weight_decay: 1},
   optimizer.params.weight_decay, 1.0 weight_decay 0.2]
- [{lr: 1.0e-4}, {optimizer: {type: Adam, params: {lr: 1.0e-4}}}, lr, 0.0001 optimizer.params.lr 0.001 default]
- [{zero_stage: 1}, {zero_optimization: {stage: 1}}, zero_stage, 1 zero_optimization.stage 0 default]
- [{optimizer_type: sgd}, {optimizer_type: ADAM}, optimizer_type, sgd optimizer.type Adam default]
- [{clip_grad: 0.5}, {gradient_clipping: 0.5}, clip_grad, 0.5 gradient_clipping 1.0 default]
- [{<<: *pairs, pack_impl: unpacked, max_length: 64}, {max_length: 33}, max_length, 64 33 seq_length 32 63 33]
- [{warmup: 0.1, warmup_iters: 5, train_iters: 10}, {warmup: null}, warmup_iters, warmup set]
- [{warmup_iters: 11, train_iters: 10}, {warmup_iters: 10}, warmup_iters, 11 lr_decay_iters 10]
- [{train_epochs: 1, train_iters: 10}, {train_iters: null}, train_epochs, train_iters]
- [{override_lr_scheduler: true, use_checkpoint_lr_scheduler: true}, {use_checkpoint_lr_scheduler: null},
   override_lr_scheduler, use_checkpoint_lr_scheduler]
- [{curriculum_learning: {<<: *curriculum, min_difficulty: 33}}, {curriculum_learning: *curriculum},
   curriculum_learning.min_difficulty, max_difficulty 32]
- [{curriculum_learning: {<<: *curriculum, schedule_config: {total_curriculum_step: 5}}},
   {curriculum_learning: *curriculum}, curriculum_learning.schedule_config, fixed_linear difficulty_step]
- [{gpt_j_tied: true}, {gpt_j_residual: true}, gpt_j_tied, gpt_j_residual]
- [{pos_emb: rotary, rope_scaling: *llama3_rope}, {rope_scaling: {rope_type: linear, factor: 8}}, rope_scaling,
   llama3 original_max_position_embeddings]
- [{rope_scaling: {rope_type: linear, factor: 8}}, {pos_emb: rotary}, rope_scaling, pos_emb rotary learned]
- [{norm_placement: olmo3, gpt_j_residual: true}, {gpt_j_residual: null}, norm_placement, olmo3 gpt_j_residual True]
- [{use_separate_qk_norms: true, norm: rmsnorm}, {use_qk_layernorm: true}, use_separate_qk_norms,
   use_qk_layernorm norm rmsnorm]
- [{use_qk_layernorm: true, num_kv_heads: 2}, {num_kv_heads: null}, use_qk_layernorm,
   num_kv_heads 2 use_separate_qk_norms]
- [{compile: true}, {compile: block}, compile, auto false block block-max true]
- [{recompute_granularity: selective}, {checkpoint_activations: true}, recompute_granularity,
   selective checkpoint_activations]
- [{<<: *selective, checkpoint_num_layers: 2}, {recompute_granularity: full}, recompute_granularity,
   selective checkpoint_num_layers 2 1]
- [{<<: *selective, checkpoint_in_cpu: true}, {recompute_granularity: null}, recompute_granularity,
   checkpoint_in_cpu full]
- [{activation_memory_budget: 0.5, checkpoint_activations: true}, {checkpoint_activations: null},
   activation_memory_budget, checkpoint_activations]
- [{intermediate_size: 100, expansion_factor: 2}, {intermediate_size: null}, expansion_factor, intermediate_size 100]
# Losses of preferences
- [{dpo_loss_type: hinge}, *pairs, dpo_loss_type, train_impl dpo normal]
- [{<<: *pairs, kto_loss_type: apo_zero_unpaired},
   {<<: *kto, dataset_impl: null, pos_train_data_paths: null, neg_train_data_paths: null},
   kto_loss_type, train_impl kto dpo]
- [{<<: *pairs, z_loss: 1.0e-4},
   {dataset_impl: null, pack_impl: null, train_impl: null, pos_train_data_paths: null, neg_train_data_paths: null},
   z_loss, train_impl normal rm dpo]
- [{<<: *pairs, dpo_loss_type: [aot, aot_unpaired]}, {dpo_loss_type: [aot, sigmoid]}, dpo_loss_type, aot aot_unpaired]
- [{<<: *pairs, dpo_loss_type: [sigmoid, sigmoid]}, {dpo_loss_type: [sigmoid]}, dpo_loss_type, once]
- [{<<: *pairs, dpo_loss_type: [orpo, sft]}, {dpo_loss_type: [orpo]}, dpo_loss_type, orpo chosen]
- [{<<: *pairs, dpo_loss_type: [sigmoid, sft], dpo_loss_weights: [1.0]}, {dpo_loss_weights: [1.0, 0.5]},
   dpo_loss_weights, 2 losses]
- [{<<: *pairs, dpo_loss_type: exo_pair}, {dpo_label_smoothing: 0.1}, dpo_label_smoothing, exo_pair]
- [{<<: *pairs, dpo_loss_type: hinge, dpo_label_smoothing: 0.1}, {dpo_loss_type: sigmoid}, dpo_label_smoothing, hinge]
- [{<<: *pairs, simpo_gamma: 0.3}, {dpo_loss_type: simpo}, simpo_gamma, dpo_loss_type simpo]
- [{<<: *kto, compat_kto: true, kto_loss_type: apo_zero_unpaired}, {kto_loss_type: null}, compat_kto, kto_loss_type kto]
- [{<<: *kto, compat_kto: true, pack_impl: best_fit}, {compat_kto: null}, compat_kto, row]
- [{<<: [*pairs, *mamba], pack_impl: best_fit, prefix_sharing: true}, {prefix_sharing: auto}, prefix_sharing,
   states attention_config]
- [{<<: *pairs, dpo_loss_type: sigmod}, {dpo_loss_type: null}, dpo_loss_type, sigmod]
- [{<<: *pairs, dpo_beta: 0}, {dpo_beta: 5}, dpo_beta, more 0]
"""
ANCHORS, *CASES = yaml.safe_load(TABLE)


@pytest.mark.parametrize(("refused", "change", "key", "facts"), CASES)
def test_contradictions(refused, change, key, facts):
    (problem,) = problems_of(refused)
    assert message_states(problem, f"{key}: {facts}")
    assert problems_of({key: value for key, value in (refused | change).items() if value is not None}) == ()


def test_prompts_are_shared_but_where_a_prompt_depends_on_its_row(model):
    """States, and dropout."""
    packed = ANCHORS["pairs"] | {"pack_impl": "best_fit", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    dropout = [{"hidden_dropout": 0.1}, {"attention_dropout": 0.1}, {"lora": {"r": 2, "dropout": 0.1}}]
    unshared = [ANCHORS["mamba"], *({"disable_dropout": False} | section for section in dropout)]
    savings = [least_prefix_saving(NeoXArgs.from_dict(model | packed | changes)) for changes in ({}, *unshared)]
    assert savings[0] is not None and savings[1:] == [None] * 4


def test_places_of_both_keys_are_named(write):
    a = "num_layers: 2\nhidden_size: 66\n"
    b = "num_attention_heads: 4\nseq_length: 8\nmax_position_embeddings: 8\n"
    with pytest.raises(ValueError, match=r"^a.yml:2: hidden_size: 66 .*num_attention_heads 4 \(b.yml:1\)"):
        load(write(a=a, b=b))


def test_what_training_needs():
    assert problems_of(TRAINABLE, NeoXArgs.check_training) == ()
    for key in ("train_iters", "data_path", "train_micro_batch_size_per_gpu"):
        (problem,) = problems_of(TRAINABLE | {key: None}, NeoXArgs.check_training)
        assert message_states(problem, f"{key}: required")
    (problem,) = problems_of(TRAINABLE | {"tokenizer_type": "HFTokenizer"}, NeoXArgs.check_training)
    assert message_states(problem, "vocab_file: required HFTokenizer")
    problems = problems_of(TRAINABLE | {"tokenizer_type": None}, NeoXArgs.check_training)
    assert [line.split(":")[0] for line in problems] == ["vocab_file", "merge_file"], "GPT-NeoX's default is GPT-2's"


@pytest.mark.parametrize("paths", [
    {"data_path": "s3://b/a"}, {"data_path": None, "train_data_paths": ["t", "gs://b/a"], "valid_data_paths": ["v"]},
    {"ga_dataset": "s3://b/a", "ga_mode": "interleaved"},
])  # fmt: skip
def test_training_refuses_data_in_an_object_store(paths):
    (problem,) = problems_of(TRAINABLE | paths, NeoXArgs.check_training)
    assert "://b/a" in problem and any(f"{key}: " in problem for key in paths)


def test_data_are_named_without_a_scheme():
    (problem,) = problems_of(TRAINABLE | {"data_path": "file:///b/a"}, NeoXArgs.check_training)
    assert problem.endswith(" /b/a") and "object store" not in problem


def test_what_generation_needs():
    required = {"load": "x", "tokenizer_type": "CharLevelTokenizer", "maximum_tokens": 31}
    for values in (
        required,
        required | {"text_gen_type": "input-file", "sample_input_file": "p"},
        required | {"load": None, "save": "x", "checkpoint_factor": 1},
    ):
        assert problems_of(values, NeoXArgs.check_generation) == ()
    assert len(problems_of({"maximum_tokens": 31}, NeoXArgs.check_generation)) == 3
    for changes, facts in (
        ({"maximum_tokens": 32}, "maximum_tokens: 32 max_position_embeddings 32"),
        ({"prompt_end": ""}, "prompt_end: empty"),
        ({"text_gen_type": "input-file"}, "sample_input_file: required"),
    ):
        (problem,) = problems_of(required | changes, NeoXArgs.check_generation)
        assert message_states(problem, facts)
