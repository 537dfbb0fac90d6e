"""Writes the model card (README.md) of an exported HuggingFace folder."""

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
import yaml

from megatron.checkpointing.manifest import read_manifest
from megatron.neox_arguments import NeoXArgs

_DEFAULT_FIELDS: Mapping[str, Any] = {"library_name": "transformers", "tags": ["gpt-neox"]}
# (The Hub's task, transformers' class) of language models, then of reward models.
_TASKS = ("text-generation", "AutoModelForCausalLM"), ("text-classification", "AutoModelForSequenceClassification")


def model_card(
    source: Path,
    args: NeoXArgs,
    config: Mapping[str, Any],
    parameters: int,
    dtype: torch.dtype,
    imported_card: str = "",
    averaged: bool = False,
) -> bytes:
    """Returns the content of README.md: what the model is and how it was trained.

    source: the checkpoint. config: the exported config.json. parameters: number of parameters. dtype: of the
        exported weights.
    imported_card: README.md of the imported model. Its YAML front matter (license, languages, terms) stays,
        except its scores (`model-index`) once the model has been trained further.
    averaged: the weights are averages over the run's steps (`ema_decay`)."""
    manifest = read_manifest(source)
    facts = {"Architecture": config["architectures"][0], "Parameters": f"{parameters:,}"}
    facts["Precision"] = str(dtype).removeprefix("torch.")
    if averaged:
        facts["Weights"] = f"exponential moving average over steps (`ema_decay: {args.ema_decay}`)"
    task, loader = _TASKS[bool(args.score_head)]
    front = _front_matter(imported_card, task, trained=manifest is not None and manifest.consumed_samples > 0)
    return (
        f"---\n{front}---\n\n"
        f"# {config['architectures'][0]}, {parameters / 1e6:,.0f}M parameters\n\n"
        "Trained with a GPT-NeoX configuration and converted to HuggingFace's format.\n\n"
        f"{_fact_table({**facts, **_facts_of_run(source, args)})}\n\n"
        f"```python\nfrom transformers import {loader}, AutoTokenizer\n\n"
        f'model = {loader}.from_pretrained(".")\ntokenizer = AutoTokenizer.from_pretrained(".")\n```\n\n'
        f"{_configuration(args)}"
    ).encode()


def adapter_card(source: Path, args: NeoXArgs, base: str | None, trained: int) -> bytes:
    """Returns the content of README.md of adapters in peft's format.

    source: the checkpoint. base: name of the base model, as in adapter_config.json. trained: number of the
        adapters' parameters."""
    front: dict[str, Any] = {"library_name": "peft", "pipeline_tag": _TASKS[0][0], "tags": ["lora", "gpt-neox"]}
    if base is not None and not Path(base).is_absolute():
        front["base_model"] = base
    facts = {"Base model": base or "not recorded", "Parameters": f"{trained:,}"}
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n"
        f"# LoRA adapters of {PurePath(base).name if base else 'a model'}\n\n"
        "Trained with a GPT-NeoX configuration and written in peft's format.\n\n"
        f"{_fact_table({**facts, **_facts_of_run(source, args)})}\n\n"
        "```python\nfrom peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer\n\n"
        'model = AutoPeftModelForCausalLM.from_pretrained(".")\n'
        'tokenizer = AutoTokenizer.from_pretrained(".")\n```\n\n'
        f"{_configuration(args)}"
    ).encode()


def _facts_of_run(source: Path, args: NeoXArgs) -> dict[str, Any]:
    """Returns what the checkpoint tells of its training, by name."""
    manifest, facts = read_manifest(source), {"Checkpoint": source.name}
    if manifest is not None:
        facts |= {"Iteration": f"{manifest.iteration:,}", "Samples seen": f"{manifest.consumed_samples:,}"}
        if manifest.consumed_samples and args.seq_length:
            facts["Tokens seen"] = f"about {manifest.consumed_samples * args.seq_length:,}"
        facts |= {f"{name} version": value for name, value in manifest.versions.items()}
    return facts


def _fact_table(facts: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())])


def _configuration(args: NeoXArgs) -> str:
    """Returns the section with the configuration of the training."""
    texts = {PurePath(name).name: text for name, text in args.public_config_files.items()}
    texts = texts or {"configuration.json": json.dumps(args.public_values, indent=1)}
    kinds = {name: PurePath(name).suffix[1:] or "yaml" for name in texts}
    parts = [f"`{name}`:\n\n```{kinds[name]}\n{text.rstrip()}\n```" for name, text in texts.items()]
    return "## Training configuration\n\n" + "\n\n".join(parts) + "\n"


def _front_matter(imported_card: str, task: str, trained: bool) -> str:
    """Returns the YAML front matter of the imported card, with our default fields added.

    task: value of `pipeline_tag`. trained: drop the imported model's scores."""
    parts = imported_card.lstrip("\ufeff").split("---\n", 2)
    try:
        existing = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else {}
    except yaml.YAMLError:
        existing = {}
    existing = existing if isinstance(existing, dict) else {}
    if task != _TASKS[0][0]:  # the card may describe the language model that the reward model was trained from
        existing.pop("pipeline_tag", None)
    tags = existing.get("tags") or []
    tags = [tags] if isinstance(tags, str) else list(tags)
    front = {
        **_DEFAULT_FIELDS,
        "pipeline_tag": task,
        **existing,
        "tags": [*tags, *(tag for tag in _DEFAULT_FIELDS["tags"] if tag not in tags)],
    }
    if trained:
        front.pop("model-index", None)
    return yaml.safe_dump(front, sort_keys=False, allow_unicode=True, width=2**20)
