"""Keys of logs, trackers and text generation."""

from dataclasses import dataclass
from typing import Literal

from megatron.neox_arguments.declare import key

_NO_HARNESS = "evaluation tasks are not built yet; remove it (--set {}=null)"


@dataclass(frozen=True)
class LoggingKeys:
    log_dir: str | None = key(None, "Folder of each rank's output and of metrics.jsonl; unset: `logs` in `save`")
    log_interval: int = key(100, "Iterations between log lines", ge=1)
    tensorboard_dir: str | None = key(None, "Folder of TensorBoard's event files; unset: none are written")
    use_wandb: bool | None = key(None, "Log to Weights & Biases")
    wandb_project: str = key("neox", "Weights & Biases project")
    wandb_group: str | None = key(None, "Weights & Biases group")
    wandb_run_name: str | None = key(None, "Weights & Biases run name")
    wandb_team: str | None = key(None, "Weights & Biases entity")
    wandb_host: str = key("https://api.wandb.ai", "Weights & Biases server")
    peak_theoretical_tflops: float | None = key(None, "Peak of one device; if set, MFU and HFU are logged", gt=0)
    steps_per_print: int = key(10, "DeepSpeed's own log interval", no_effect="log_interval decides")
    wall_clock_breakdown: bool = key(False, "DeepSpeed's timers", no_effect="DeepSpeed's timers are not printed")
    log_grad_norm: bool = key(False, "Log the gradient norm", no_effect="it is always logged")


@dataclass(frozen=True)
class TextgenKeys:
    text_gen_type: Literal["unconditional", "input-file", "interactive"] = key(
        None,
        "Where prompts come from, interactive: the terminal; unset: input-file if sample_input_file is set",
        later=("precompute",),
    )
    temperature: float = key(0.0, "Divides the logits; 0: always the most likely token", ge=0)
    top_p: float = key(0.0, "Sample from the smallest set with this probability; 0: all tokens", ge=0, le=1)
    top_k: int = key(0, "Sample from this many most likely tokens; 0: all tokens", ge=0)
    maximum_tokens: int = key(64, "Tokens to generate", ge=1)
    prompt_end: str = key("\n", "What separates prompts in the input file, and ends one at the terminal")
    sample_input_file: str | None = key(None, "File with prompts")
    sample_output_file: str | None = key(
        "samples.txt", "File that samples are written to (JSON lines); unset with input-file: INPUT.output.jsonl"
    )
    num_samples: int = key(1, "Samples to generate without prompts", ge=1)
    recompute: bool = key(False, "Generate without a cache: every token runs the text before it again (slow)")
    eval_tasks: tuple[str, ...] | None = key(None, "Evaluation tasks", refuse=_NO_HARNESS.format("eval_tasks"))
    eval_results_prefix: str = key("", "Prefix of result files", refuse=_NO_HARNESS.format("eval_results_prefix"))
