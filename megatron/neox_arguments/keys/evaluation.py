"""Declares the keys of evaluation with lm-eval, by eval.py or during training (`eval_tasks`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.declaration import key, new_key


@dataclass(frozen=True)
class EvaluationKeys:
    """Configuration keys of evaluation on tasks of lm-eval."""

    eval_tasks: tuple[str, ...] | None = key(
        None,
        "lm-eval's tasks, groups and tags, or task YAML files: for eval.py, and in training at iteration 0 and "
        "every eval_interval",
        differs="GPT-NeoX scores ten documents per task; here all, or eval_limit",
    )
    eval_results_prefix: str = key("", "Prefix of result files")
    eval_output_dir: str | None = new_key(
        None, "Folder of result files; unset: the working folder for eval.py, none in training"
    )
    eval_limit: float | None = new_key(None, "Documents per task, below 1 a share of them; unset: all", gt=0)
    eval_num_fewshot: int | None = new_key(None, "Examples before each question; unset: the task's number", ge=0)
    eval_include_path: str | tuple[str, ...] | None = new_key(None, "Folders with YAML files of own tasks")
    eval_task_args: Mapping[str, Any] | None = new_key(None, "Task arguments, as {max_seq_lengths: [4096]} for RULER")
    eval_batch_size: Literal["auto"] | int = new_key("auto", "Texts per forward pass; auto: as memory allows", ge=1)
    eval_overlong: Literal["truncate_left", "refuse", "skip"] = new_key(
        "truncate_left", "Handling of texts longer than the model's positions (they are counted)"
    )
    eval_apply_chat_template: bool = new_key(False, "Ask through the tokenizer's chat template")
    eval_system_prompt: str | None = new_key(None, "System prompt before every question")
    eval_system_prompt_file: str | None = new_key(None, "File with the system prompt")
    eval_log_samples: bool = new_key(False, "Write every document, answer and score beside the results")
    eval_cache: str | None = new_key(None, "Folder of answers so far, to resume an interrupted evaluation")
    eval_failures: Literal["report", "stop"] = new_key(
        "report", "If a task fails: report it and continue, or end the run"
    )
    eval_confirm_unsafe_code: bool = new_key(
        False, "Allow tasks to execute code written by the model, as HumanEval does"
    )
    eval_compare_hf: bool = new_key(False, "eval.py: score with lm-eval's hf backend too, and print the differences")
