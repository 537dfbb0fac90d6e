"""Declares the keys of logs, trackers and text generation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.declaration import key, new_key


@dataclass(frozen=True)
class LoggingKeys:
    """Configuration keys of log lines, metrics and trackers."""

    log_dir: str | None = key(None, "Folder of each rank's output and metrics.jsonl; unset: `logs` in `save`")
    log_interval: int = key(100, "Iterations between log lines", ge=1)
    tensorboard_dir: str | None = key(None, "Folder of TensorBoard's event files; unset: none")
    use_wandb: bool | None = key(
        None, "Log to Weights & Biases", differs="GPT-NeoX turns it on if it finds a key; unset is off here"
    )
    wandb_mode: Literal["online", "offline", "disabled"] | None = new_key(
        None, "Mode of the Weights & Biases run; unset: WANDB_MODE, else online"
    )
    wandb_init_all_ranks: bool = key(False, "Start one Weights & Biases run per rank, all in one group")
    wandb_project: str = key("neox", "Weights & Biases project")
    wandb_group: str | None = key(None, "Weights & Biases group", differs="GPT-NeoX adds a random suffix")
    wandb_run_name: str | None = key(None, "Weights & Biases run name")
    wandb_team: str | None = key(None, "Weights & Biases entity")
    wandb_host: str = key("https://api.wandb.ai", "Weights & Biases server")
    use_comet: bool | None = key(None, "Log to Comet")
    comet_mode: Literal["online", "offline"] | None = new_key(None, "offline: write the experiment into log_dir")
    comet_workspace: str | None = key(None, "Comet workspace")
    comet_project: str | None = key(None, "Comet project")
    comet_experiment_name: str | None = key(None, "Comet experiment name")
    comet_tags: tuple[str, ...] | None = key(None, "Comet tags")
    comet_others: Mapping[str, Any] | None = key(None, "Further values shown with the Comet experiment")
    git_hash: str | None = key(None, "Commit recorded with the run; unset: from git")
    log_device_metrics: Literal["auto", True, False] = new_key(
        "auto", "Utilisation, memory and power of all GPUs (NVML); auto: with GPUs and nvidia-ml-py"
    )
    peak_theoretical_tflops: float | None = key(None, "Peak of one device; if set, MFU and HFU are logged", gt=0)
    log_grad_norm: bool = key(False, "Log the norm of each parameter's gradient (the whole norm always is)")
    log_param_norm: bool = key(False, "Log the norm of each parameter")
    log_grad_pct_zeros: bool = key(False, "Log the share of zeros in each parameter's gradient")
    log_optimizer_states: bool = key(False, "Log the norms of the optimizer's states")
    log_loss_by_source: bool = new_key(
        False,
        "Log the loss of each of train_data_paths, and its share of the trained tokens: train/loss_by_source/NAME, "
        "train/share_by_source/NAME",
    )
    log_spikes_above_sigma: float | None = new_key(
        None,
        "Report steps whose loss or gradient norm lies this many standard deviations above the recent ones, with "
        "their documents and text, in spikes.jsonl",
        gt=0,
    )
    log_gradient_noise_scale: bool = key(False, "Log the gradient noise scale (McCandlish et al. 2018)")
    gradient_noise_scale_n_batches: int = key(5, "Steps per estimate of the gradient noise scale", ge=2)
    gradient_noise_scale_cpu_offload: bool = key(False, "Keep the buffers of the gradient noise scale in host memory")
    profile: bool = key(
        False, "Record a torch profiler trace of some iterations; without Python stacks with gloo (CPUs)"
    )
    profile_step_start: int = key(10, "The trace begins after this iteration", ge=0)
    profile_step_stop: int = key(12, "Last iteration of the trace", ge=1)
    memory_profiling: bool = key(
        False, "Record a memory snapshot of the iterations that profile_step_start and profile_step_stop give"
    )
    memory_profiling_path: str | None = key(None, "Folder of the snapshots of memory_profiling")
    profile_memory: int | None = new_key(
        None,
        "Split the memory peak of this iteration by use (weights, gradients, optimizer states, activations, "
        "logits, ..). Written to memory_parts.json beside metrics.jsonl; show it with tools/profile_memory.py",
        ge=2,
    )
    plan_file: str | None = new_key(
        None,
        "A plan of this run, written with deepy.py plan a.yml --gpus N --gpu NAME --json. After 50 steps a line "
        "compares tokens per second and memory with it",
    )


@dataclass(frozen=True)
class TextgenKeys:
    """Configuration keys of text generation."""

    text_gen_type: Literal["unconditional", "input-file", "interactive", "precompute", "score"] = key(
        None,
        "Source of prompts. interactive: the terminal; unset: input-file if sample_input_file is set. score: "
        "log-probability of each token of sample_input_file (JSON lines). precompute: the same for the data sets, "
        "written beside them (precompute_model_name)",
    )
    return_logits: bool = key(False, "Write the logits of generated tokens too", not_built="writing logits")
    return_logprobs: int | None = new_key(
        None, "Write each generated token's log-probability, and those of the n likeliest tokens (0: none)",
        ge=0
    )  # fmt: skip
    temperature: float = key(0.0, "Divides the logits; 0: always the most likely token", ge=0)
    top_p: float = key(0.0, "Sample from the smallest set with this probability; 0: all tokens", ge=0, le=1)
    top_k: int = key(0, "Sample from this many most likely tokens; 0: all tokens", ge=0)
    min_p: float = new_key(
        0.0, "Sample from tokens with at least this share of the likeliest one's probability; 0: all tokens", ge=0, le=1
    )
    repetition_penalty: float = new_key(
        1.0, "For tokens already in the text, divide positive and multiply negative logits by this; 1: off", gt=0
    )
    frequency_penalty: float = new_key(0.0, "Subtract this from a token's logit once per generated occurrence; 0: off")
    presence_penalty: float = new_key(0.0, "Subtract this from the logits of tokens already generated; 0: off")
    stop_strings: tuple[str, ...] = new_key((), "End the text before the first of these")
    maximum_tokens: int = key(64, "Tokens to generate", ge=1)
    prompt_end: str = key("\n", "Separates prompts in the input file, and ends one at the terminal")
    adapter: tuple[str, ...] = new_key(
        (),
        "generate.py, eval.py, tools/serve.py: adapters to add to the weights of `load`, as PATH or PATH=WEIGHT; "
        "several give their weighted sum. PATH is a checkpoint of a run with `lora`, or a peft folder. "
        "tools/serve.py also: NAME=PATH, served together, each as model NAME",
    )
    sample_input_file: str | None = key(None, "File with prompts")
    sample_output_file: str | None = key(
        "samples.txt", "Output file of samples (JSON lines); unset with input-file: INPUT.output.jsonl"
    )
    num_samples: int = key(1, "Samples to generate without prompts", ge=1)
    recompute: bool = key(False, "Generate without a cache: reprocess the text for every token (slow)")
    chat: bool = new_key(
        False,
        "text_gen_type interactive, demo_prompts: treat prompts as a user's turns, through the chat template",
    )
    system_prompt_file: str | None = new_key(None, "File with the system prompt of conversations (chat: true)")
    demo_prompts: str | None = new_key(
        None,
        "Training: file of prompts, one text per line, or .jsonl with `prompt` or `messages`. They are answered "
        "before the first and after the last step, in <save>/demo_outputs",
    )
    kv_cache_gb: Literal["auto"] | float = new_key(
        "auto",
        "Size of the cache of keys, values and Mamba states on each rank; auto: a share of free memory",
        gt=0,
    )
    decode_cuda_graphs: Literal["auto"] | bool = new_key(
        "auto",
        "On a GPU: run each decode step (one token per text) as one CUDA graph. Not with tensor or pipeline "
        "parallelism, sharded weights, experts, FP8 or LongRoPE. auto: off until it has been timed on a GPU; printed",
    )
    chat_template: str | None = new_key(
        None,
        "File with a Jinja chat template; unset: the one beside vocab_file, else the loaded model's. A run that begins "
        "with a HuggingFace model writes it beside the model's tokenizer",
    )
