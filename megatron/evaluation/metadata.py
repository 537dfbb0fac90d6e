"""Metadata that lm-eval writes with the scores: the model, the settings, the tokenizer, the machine."""

import hashlib
import math
import subprocess
from pathlib import Path
from typing import Any

from megatron.evaluation.harness import NUMPY_SEED, RANDOM_SEED, EvaluationResults
from megatron.evaluation.task_loading import SEED, LoadedTasks
from megatron.model import Model
from megatron.model.weight_map import layer_params
from megatron.neox_arguments import NeoXArgs


def machine_info() -> dict[str, Any]:
    """Returns the machine, Python and package versions and the git hash, under lm-eval's names. Takes a
    second or two."""
    from lm_eval.loggers.utils import add_env_info

    info: dict[str, Any] = {"git_hash": _git_hash()}
    add_env_info(info)
    return info


def add_metadata(
    model: Model,
    loaded_tasks: LoadedTasks,
    evaluation: EvaluationResults,
    machine: dict[str, Any],
    *,
    source: str,
    start_date: float,
    seconds: float,
    bootstrap: int,
) -> None:
    """Adds to the results the metadata that lm-eval's own command writes, under its names, and the failures.

    machine: what `machine_info` returned. source: the name of the model. start_date: seconds since 1970;
        seconds: how long the evaluation took; bootstrap: resamples of the standard errors.
    """
    from lm_eval.utils import sanitize_model_name

    args, template = model.args, loaded_tasks.template if model.args.eval_apply_chat_template else None
    name, revision = _name(source)
    evaluation.results.update(
        config={
            "model": "neox",
            "model_args": {"load": source, "iteration": args.iteration, "precision": args.params_dtype},
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
            "fewshot_seed": SEED,
            "num_fewshot": args.eval_num_fewshot,
            "apply_chat_template": args.eval_apply_chat_template,
            "eval_overlong": args.eval_overlong,
        },
        date=start_date,
        **machine,
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
    """Returns the model's name, and its commit if the model is in the Hub's cache, else None.

    source: a folder, or a name.
    """
    path = Path(source).resolve()
    if path.parent.name != "snapshots":  # of the Hub's cache
        return source, None
    return path.parents[1].name.removeprefix("models--").replace("--", "/"), path.name


def _parameters(model: Model) -> int:
    """Returns the number of parameters as HuggingFace counts them: tied weights once, and no rows that pad
    the vocabulary."""
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
    """Returns the git commit of the working folder, as lm-eval records it; None without git."""
    try:
        return subprocess.run(
            ["git", "describe", "--always"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
