"""Holds the tasks and results of an evaluation, and writes the results as files and as a table.

The files also hold lm-eval's metadata: model, settings, tokenizer and machine.
"""

import hashlib
import itertools
import math
import os
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megatron.data.files import replace_text, temporary
from megatron.generation.prompts.chat import ChatTemplate
from megatron.model import Model
from megatron.model.weight_map import layer_params
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.local_paths import with_home
from megatron.process.run_files import to_json
from megatron.process.score_files import samples_file

TIME = "%m-%d-%Y-%H-%M-%S"  # in file names, as in GPT-NeoX
RANDOM_SEED, NUMPY_SEED, FEWSHOT_SEED = 0, 1234, 1234  # lm-eval's; the last one chooses few-shot examples
# The entries of lm-eval's results that are dictionaries by task or group
_PARTS = (
    "results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples", "samples",
    "task_hashes",
)  # fmt: skip


@dataclass
class EvaluationResults:
    """The results of an evaluation, in the form in which lm-eval returns and writes them.

    failures: {task name: the reason why the task could not be run}.
    """

    results: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, results: dict[str, Any]) -> None:
        """Merges what lm-eval's `evaluate` returned for another task, or group of tasks, into this object."""
        for part in _PARTS:
            if part in results:
                self.results.setdefault(part, {}).update(results[part] or {})

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of tasks and groups as {"TASK_METRIC": value}, such as {"piqa_acc": 0.7}.

        If a metric has a filter other than lm-eval's default `none`, its name is "TASK_METRIC_FILTER".
        """
        metrics: dict[str, float] = {}
        for task, values in self.results.get("results", {}).items():
            for name, value in values.items():
                metric, comma, kind = name.partition(",")
                if comma and isinstance(value, int | float) and not isinstance(value, bool):
                    metrics[f"{task}_{metric}" + ("" if kind == "none" else f"_{kind}")] = float(value)
        return metrics


@dataclass
class LoadedTasks:
    """The tasks of an evaluation that could be loaded, and the reasons why others could not.

    tasks: {requested name: its tasks, in the form that lm-eval's `evaluate` takes}.
    failures: {requested name: the reason why the task could not be loaded}.
    template: the chat template if `eval_apply_chat_template` is set, else None.
    system_prompt: the text that begins every prompt; None: no such text.
    """

    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    template: ChatTemplate | None = None
    system_prompt: str | None = None


def table(evaluation: EvaluationResults) -> list[str]:
    """Returns the lines of a Markdown table with the metrics of all tasks and groups; [] if there are
    none."""
    results = evaluation.results
    rows = [("Task", "Version", "n-shot", "Filter", "Metric", "Value", "Stderr")]
    directions = results.get("higher_is_better", {})
    for task, values in results.get("results", {}).items():
        facts = (values.get("alias", task), results.get("versions", {}).get(task), results.get("n-shot", {}).get(task))
        leading_cells = [" " if fact is None else str(fact) for fact in facts]
        for name in sorted(name for name in values if "," in name and "_stderr," not in name):
            metric, _, kind = name.partition(",")
            better = {True: " \u2191", False: " \u2193"}.get(directions.get(task, {}).get(metric), "")
            error = values.get(f"{metric}_stderr,{kind}")
            error_text = f"\u00b1 {error:.4f}" if isinstance(error, float) else ""
            text = f"{values[name]:.6g}" if isinstance(values[name], float) else str(values[name])
            rows.append((*leading_cells, kind, metric + better, text, error_text))
            leading_cells = [""] * 3
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]] if rows[1:] else []


def output_folder(args: NeoXArgs) -> Path:
    """Creates the folder `eval_output_dir` (default: the working folder) and returns it.

    Call it before the evaluation, because it raises ConfigError if the folder cannot be written to.
    """
    folder = with_home(args.eval_output_dir or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = temporary(folder / "eval_results")
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise args.error(
            "eval_output_dir", f"{folder}: cannot be written to ({problem.strerror}); set it to a writable folder"
        ) from problem
    return folder


def write(args: NeoXArgs, evaluation: EvaluationResults, name: str) -> Path:
    """Writes the results to `eval_results_NAME.json` in the output folder and returns the file's path.

    With `eval_log_samples` it also writes `eval_samples_TASK_NAME.jsonl` for each task. `eval_results_prefix`
    and `_` come before these names. The samples are removed from `evaluation`.

    name: the NAME in the file names. If the file exists, NAME-2, NAME-3 and so on are tried.
    """
    folder, prefix = output_folder(args), f"{args.eval_results_prefix}_" if args.eval_results_prefix else ""
    other_names = (f"{name}-{number}" for number in itertools.count(2))  # for results written in the same second
    name = next(
        candidate
        for candidate in itertools.chain([name], other_names)
        if not (folder / f"{prefix}eval_results_{candidate}.json").exists()
    )
    path = folder / f"{prefix}eval_results_{name}.json"
    for task, samples in evaluation.results.pop("samples", {}).items():
        lines = (to_json(sample, default=_jsonable, ensure_ascii=False) + "\n" for sample in samples)
        replace_text(samples_file(path, task), "".join(lines))
    replace_text(path, to_json(evaluation.results, indent=2, default=_jsonable, ensure_ascii=False) + "\n")
    return path


def _jsonable(value: Any) -> Any:
    from lm_eval.utils import handle_non_serializable

    return handle_non_serializable(value)


# -- metadata ------------------------------------------------------------------------------------------------


@cache
def _machine_info() -> dict[str, Any]:
    """Returns facts about the machine, versions of Python and packages, and the git hash, under lm-eval's
    names. The first call takes a second or two."""
    from lm_eval.loggers.utils import add_env_info

    info: dict[str, Any] = {"git_hash": _git_hash()}
    add_env_info(info)
    return info


def add_metadata(
    model: Model,
    loaded_tasks: LoadedTasks,
    evaluation: EvaluationResults,
    *,
    source: str,
    iteration: int | None,
    start_date: float,
    seconds: float,
    bootstrap: int,
) -> None:
    """Adds metadata (model, settings, tokenizer, machine) and the failures to `evaluation.results`.

    The names are those that lm-eval's own command writes.

    source: folder or Hub name of the model. iteration: step of its weights; None: they are of no checkpoint.
        start_date: start of the evaluation, in seconds since 1970.
        seconds: how long the evaluation took. bootstrap: number of resamples for standard errors.
    """
    from lm_eval.utils import sanitize_model_name

    args, template = model.args, loaded_tasks.template if model.args.eval_apply_chat_template else None
    name, revision = _name(source)
    evaluation.results.update(
        config={
            "model": "neox",
            "model_args": {
                "load": os.path.abspath(source) if os.path.isdir(source) else source,
                "iteration": iteration,
                "precision": args.params_dtype,
                **({"load_ema": True} if args.load_ema else {}),
            },
            "model_num_parameters": _parameters(model),
            "model_dtype": str(model.dtype),
            "model_revision": revision,
            "model_sha": revision,
            "batch_size": args.eval_batch_size,
            "batch_sizes": [],
            "device": str(model.groups.device),
            "use_cache": args.eval_cache,
            "limit": args.eval_limit,
            "bootstrap_iters": bootstrap,
            "gen_kwargs": {},
            "random_seed": RANDOM_SEED,
            "numpy_seed": NUMPY_SEED,
            "torch_seed": None,  # no task draws with it
            "fewshot_seed": FEWSHOT_SEED,
            "num_fewshot": args.eval_num_fewshot,
            "apply_chat_template": args.eval_apply_chat_template,
            "eval_overlong": args.eval_overlong,
        },
        date=start_date,
        **_machine_info(),
        **_tokenizer(model),
        max_length=model.positions,
        model_source="neox",
        model_name=name,
        model_name_sanitized=sanitize_model_name(name),
        system_instruction=loaded_tasks.system_prompt,
        system_instruction_sha=_hash(loaded_tasks.system_prompt),
        fewshot_as_multiturn=args.eval_apply_chat_template,
        chat_template=None if template is None else template.text,
        chat_template_sha=None if template is None else _hash(template.text),
        total_evaluation_time_seconds=str(seconds),
        failures=evaluation.failures,
    )


def _name(source: str) -> tuple[str, str | None]:
    """Returns the model's name, and its Hub commit if the model is in the cache of the Hub, else None.

    source: the model's folder, or its name.
    """
    path = Path(source).resolve()
    if path.parent.name != "snapshots":  # of the Hub's cache
        return source, None
    return path.parents[1].name.removeprefix("models--").replace("--", "/"), path.name


def _parameters(model: Model) -> int:
    """Returns the number of parameters as HuggingFace counts them: tied weights once, and without the rows
    that pad the vocabulary."""
    args: NeoXArgs = model.args.replace(padded_vocab_size=model.columns or model.args.padded_vocab_size)
    sizes = {
        (spec.name if spec.shared else (layer, spec.name)): math.prod(spec.shape)
        for layer, specs in layer_params(args).items()
        for spec in specs
    }
    return sum(sizes.values())


def _tokenizer(model: Model) -> dict[str, Any]:
    tokenizer = model.tokenizer
    roles = {role: getattr(tokenizer, role) for role in ("pad", "eos", "bos")}
    return {
        **{f"tokenizer_{role}_token": [tokenizer.special_tokens.get(i), str(i)] for role, i in roles.items()},
        "eot_token_id": tokenizer.eos,
    }


def _hash(text: str | None) -> str | None:
    return hashlib.sha256(text.encode()).hexdigest() if text else None


def _git_hash() -> str | None:
    """Returns the git commit of the working folder, as lm-eval records it; None if git cannot tell."""
    try:
        return subprocess.run(
            ["git", "describe", "--always"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
