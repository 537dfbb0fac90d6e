"""Keys of evaluation with lm-eval: of eval.py, and of training with `eval_tasks`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.declaration import key, new_key


@dataclass(frozen=True)
class EvaluationKeys:
    """Evaluation on tasks of lm-eval."""

    eval_tasks: tuple[str, ...] | None = key(
        None,
        "Tasks, groups and tags of lm-eval, or YAML files of tasks: for eval.py, and in training at iteration 0 and "
        "every eval_interval",
        differs="GPT-NeoX scores ten documents of a task; here all of them, but for eval_limit",
    )
    eval_results_prefix: str = key("", "Prefix of result files")
    eval_output_dir: str | None = new_key(
        None, "Folder of result files; unset: eval.py writes into the working folder, training none"
    )
    eval_limit: float | None = new_key(None, "Documents of each task, below 1 a share of them; unset: all", gt=0)
    eval_num_fewshot: int | None = new_key(None, "Examples before each question; unset: as the task says", ge=0)
    eval_include_path: str | tuple[str, ...] | None = new_key(None, "Folders with YAML files of own tasks")
    eval_task_args: Mapping[str, Any] | None = new_key(
        None, "Arguments of tasks that take some, as {max_seq_lengths: [4096]} of RULER"
    )
    eval_batch_size: Literal["auto"] | int = new_key("auto", "Texts of a forward; auto: as memory allows", ge=1)
    eval_overlong: Literal["truncate_left", "refuse", "skip"] = new_key(
        "truncate_left", "What is done with a text longer than the model's positions (they are counted)"
    )
    eval_apply_chat_template: bool = new_key(
        False, "Ask as in a conversation, through the chat template of the tokenizer"
    )
    eval_system_prompt: str | None = new_key(None, "What a system says before every question")
    eval_system_prompt_file: str | None = new_key(None, "File with that text")
    eval_log_samples: bool = new_key(False, "Write every document, answer and score beside the results")
    eval_cache: str | None = new_key(None, "Folder of answers so far, so that an interrupted evaluation goes on")
    eval_failures: Literal["report", "stop"] = new_key(
        "report", "A task that fails: say so and go on with the others, or end the run"
    )
    eval_confirm_unsafe_code: bool = new_key(
        False, "Run tasks that execute code which the model wrote, as HumanEval does"
    )
    eval_compare_hf: bool = new_key(False, "eval.py: score with lm-eval's hf backend too, and print the differences")
