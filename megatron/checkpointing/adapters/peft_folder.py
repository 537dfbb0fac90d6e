"""Reads and writes folders in peft's format: `adapter_config.json` and `adapter_model.safetensors`.

One layer is in memory at a time."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.adapters.peft_names import (
    PREFIX,
    PeftModule,
    PeftTensor,
    family_of_adapters,
    family_of_modules,
    peft_modules,
    peft_tensors,
    short_name,
    target_of,
    vocabulary_modules,
)
from megatron.checkpointing.adapters.peft_places import is_left_out, is_selected, peft_sizes, placed
from megatron.checkpointing.errors import CheckpointError, shortened
from megatron.checkpointing.families.convert import padded
from megatron.checkpointing.families.family import Family
from megatron.checkpointing.families.field_types import check_adapter_fields
from megatron.checkpointing.families.multimodal import memory_name, names_a_wrapper, text_modules, text_name
from megatron.checkpointing.huggingface.folder import PickledFile, SafetensorsFile
from megatron.checkpointing.huggingface.model_files import read_json
from megatron.checkpointing.huggingface.weight_writer import weight_bytes, write_weights
from megatron.neox_arguments import ConfigError, ModelArgs, NeoXArgs
from megatron.neox_arguments.values.lora_settings import chosen_blocks, copied_modules, lora_targets

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OLDER_WEIGHTS = "adapter_model.bin"  # written by earlier versions of peft; the current one reads it too
CAUSAL, SCORES = "CAUSAL_LM", "SEQ_CLS"
# Fields of adapter_config.json that we read.
_READ = {
    "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights", "task_type",
    "base_model_name_or_path", "peft_type",
    "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
    "fan_in_fan_out",  # follows from the modules: GPT-2's weights are stored transposed, its adapters are not
}  # fmt: skip
# Fields that are ignored, because they do not change outputs.
_SILENT = {
    "auto_mapping", "inference_mode", "revision", "peft_version", "megatron_core", "qalora_group_size",
    "runtime_config", "modules_to_save", "ensure_weight_tying", "eva_config",
    "corda_config", "loftq_config", "lora_ga_config",
}  # fmt: skip
# Fields with few allowed values.
_FIXED = {"bias": (None, "none")}
_INITIAL_VALUES = (None, True, False, "gaussian", "eva", "orthogonal")  # other values change the base weights
_HINTS = {
    "bias": "this program cannot train biases together with adapters",
    "lora_bias": "adapters of this program have no biases",
    "target_parameters": "this program has no adapters for routed experts and routers; merge the adapter with "
    "peft's merge_and_unload, and import the merged model",
    "trainable_token_indices": "train the full embedding with modules_to_save instead",
    "alora_invocation_tokens": "this program applies adapters to every token",
    "layer_replication": "this program cannot use one block twice",
    "megatron_config": "this program splits layers by model_parallel_size instead",
}
_PEFT_DEFAULT = 8  # r and lora_alpha if adapter_config.json lacks them
_MAX_NAMED = 4


def is_peft(name: str | Path) -> bool:
    """Whether `name` is the path of a folder in peft's format (with an adapter_config.json)."""
    return (Path(name) / CONFIG).is_file()


def peft_vocab_size(path: str | Path) -> int:
    """Returns the number of rows of the embedding or head saved in a peft folder; 0 if neither is saved.

    Also returns 0 if `path` is no peft folder."""
    return (PeftFolder(path).vocab_size or 0) if is_peft(path) else 0


class PeftFolder:
    """A folder with LoRA adapters in peft's format, opened for reading.

    is_multimodal: the adapters were trained on a multimodal model. Only adapters of its language model are
        read, under the names they would have without the multimodal wrapper.
    Raises CheckpointError that names unsupported fields and tensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = read_json(self.path / CONFIG)
        check_adapter_fields(self.config, str(self.path / CONFIG))
        self._check_config()
        file = next((self.path / name for name in (WEIGHTS, OLDER_WEIGHTS) if (self.path / name).is_file()), None)
        if file is None:
            raise CheckpointError(
                f"{self.path}: holds adapter_config.json but no weights: {WEIGHTS} or {OLDER_WEIGHTS}"
            )
        self.file = SafetensorsFile(file) if file.name == WEIGHTS else PickledFile(file)
        # For modules_to_save, peft sometimes also saves the module as it was before training.
        names = {_today(name): name for name in self.file.shapes if ".original_module." not in name}
        self.is_multimodal = any(names_a_wrapper(name.removeprefix(PREFIX)) for name in names)
        self._stored: Mapping[str, str] = self._language_model_tensors(names) if self.is_multimodal else names

    @property
    def base(self) -> str | None:
        """The base model of the adapter, from its adapter_config.json: a folder, or a name on the Hub."""
        return self.config.get("base_model_name_or_path") or None

    def _check_config(self) -> None:
        kind, file = self.config.get("peft_type"), self.path / CONFIG
        if kind != "LORA":
            raise CheckpointError(f"{file}: peft_type: {kind} is not supported; only LORA is")
        if self.config.get("task_type") not in (None, CAUSAL, SCORES):
            raise CheckpointError(
                f"{file}: task_type: {self.config['task_type']} is not supported; only {CAUSAL} and {SCORES} are"
            )
        for name, value in self.config.items():
            is_supported = value in _FIXED[name] if name in _FIXED else name in _READ | _SILENT
            if not is_supported and value:
                reason = f" ({_HINTS[name]})" if name in _HINTS else ""
                raise CheckpointError(f"{file}: {name}: {json.dumps(value)} is not supported{reason}")
        init_method = self.config.get("init_lora_weights")
        if init_method not in _INITIAL_VALUES:
            raise CheckpointError(
                f"{file}: init_lora_weights: {init_method} is not supported, because it changes the base weights; save "
                "the adapter with peft's path_initial_model_for_weight_conversion, which writes plain LoRA"
            )

    def _language_model_tensors(self, names: Mapping[str, str]) -> dict[str, str]:
        """Returns {tensor name without the multimodal wrapper: its name in the file}.

        names: {tensor name as current peft writes it: its name in the file}. Raises CheckpointError if a
            trained adapter is outside the language model. An adapter whose lora_B is 0 has no effect and is
            ignored."""
        inner_names = {name: text_name(name.removeprefix(PREFIX)) for name in names}
        other_parts = [name for name, text in inner_names.items() if text is None]
        trained = [
            name for name in other_parts
            if ".lora_A." not in name and not (".lora_B." in name and not self.file.get(names[name]).any())
        ]  # fmt: skip
        if trained:
            raise CheckpointError(
                f"{self.path}: {shortened(sorted(trained), _MAX_NAMED)}: adapters outside the language model are not "
                "supported, such as those of the vision tower; train with target_modules such as "
                f"{text_modules(['q_proj', 'v_proj'])}"
            )
        return {PREFIX + text: names[name] for name, text in inner_names.items() if text is not None}

    def _names(self, end: str) -> list[str]:
        return [name.removeprefix(PREFIX).removesuffix(end) for name in self._stored if name.endswith(end)]

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules that have adapters."""
        return tuple(self._names(".lora_A.weight"))

    @cached_property
    def copies(self) -> Mapping[str, int]:
        """Number of rows of each module saved in full (`modules_to_save`), by the last part of its name
        ("lm_head")."""
        full = [name for name in self._stored if name.endswith(".weight") and ".lora_" not in name]
        return {name.split(".")[-2]: self.file.shapes[self._stored[name]][0] for name in full}

    @property
    def scores(self) -> bool:
        return "score" in self.copies

    @property
    def vocab_size(self) -> int | None:
        """Number of rows of the saved embedding or head; None if neither is saved."""
        return max((rows for name, rows in self.copies.items() if name != "score"), default=None)

    def args_over(self, base: NeoXArgs) -> NeoXArgs:
        """Returns the base model's configuration `base` with `lora` set for these adapters.

        Raises CheckpointError."""
        self._refuse_vocabulary(tied=not base.no_weight_tying and not base.score_head)
        if not self.modules:
            raise CheckpointError(f"{self.path}: holds no adapter of a linear layer (no tensor named *.lora_A.weight)")
        module_kinds = vocabulary_modules()
        heads = {module_kinds.get(name, name) for name in self.copies if name != "score"}
        if not base.no_weight_tying and not base.score_head:
            heads = {"embed_tokens" if name == "lm_head" else name for name in heads}
        config = self.config
        base = base.replace(score_head=True) if self.scores else base
        family = family_of_modules(base, self.modules)
        targets = sorted({target_of(base, family, name) for name in self.modules})
        lora: dict[str, Any] = {
            "r": config.get("r") or _PEFT_DEFAULT,
            "alpha": config.get("lora_alpha") or _PEFT_DEFAULT,
            "dropout": config.get("lora_dropout") or 0.0,
            "rslora": bool(config.get("use_rslora")),
            "dora": bool(config.get("use_dora")),
            "target": targets,
            "modules_to_save": sorted(heads) or None,
        }
        try:
            everywhere = peft_modules(base.replace(lora=lora), family)
            return base.replace(lora={**lora, **placed(everywhere, self._is_adapted, config, lora["r"], lora["alpha"])})
        except ConfigError as problem:
            lines = "\n  ".join(line.replace("(program)", "").strip() for line in problem.problems)
            raise CheckpointError(f"{self.path}: this adapter does not fit its base model:\n  {lines}") from problem

    def _is_adapted(self, module: PeftModule) -> bool:
        """Whether the file holds an adapter of this module, or adapter_config.json selects the module."""
        names = {*module.names, *module.older, *map(memory_name, module.names)}
        is_stored = not names.isdisjoint(self.modules) and not is_left_out(self.config, module.block)
        return is_stored or any(is_selected(self.config, name) for name in names)

    def _refuse_vocabulary(self, tied: bool) -> None:
        """Raise CheckpointError if the folder holds LoRA adapters of the embedding or the head.

        This program supports LoRA adapters only for linear layers of blocks. tied: the base model's head
        shares the embedding's weights."""
        modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in self._stored if ".lora_" in name}
        adapted = sorted(module for module in modules if module.rpartition(".")[2] in vocabulary_modules())
        if adapted:
            condition = " (in this model the head is the embedding: tie_word_embeddings)" if tied else ""
            raise CheckpointError(
                f"{self.path}: LoRA adapters of {', '.join(adapted)} are not supported{condition}; name only linear "
                "layers of blocks in target_modules, and train the embedding and the head with modules_to_save"
                f"{' (ensure_weight_tying: true)' if tied else ''}"
            )

    def reader(self, args: NeoXArgs) -> Callable[[int], dict[str, Tensor]]:
        """Returns a function that takes a NeoX layer index and returns the layer's full adapter tensors by
        NeoX names.

        args: the result of `args_over`. A saved embedding or head with fewer rows than the model's is padded
            with the mean of its rows. Raises CheckpointError that names missing and unknown tensors and wrong
            shapes."""
        tensors = peft_tensors(args, family_of_modules(args, self.modules))
        self._check_tensors(args, tensors)
        tensors_by_layer: dict[int, list[PeftTensor]] = {}
        for tensor in tensors:
            tensors_by_layer.setdefault(tensor.layer, []).append(tensor)
        return lambda layer: {row.spec.name: self._read(row) for row in tensors_by_layer.get(layer, ())}

    def _read(self, tensor: PeftTensor) -> Tensor:
        keys = self._stored_keys(tensor)
        value = self.file.get(self._stored[keys[0]]).clone()
        return padded(value, tensor.spec.shape[0]) if tensor.vocabulary else tensor.join(value)

    def _stored_keys(self, tensor: PeftTensor) -> list[str]:
        return [key for key in (*tensor.keys, *tensor.older) if key in self._stored]

    def _check_tensors(self, args: ModelArgs, tensors: Iterable[PeftTensor]) -> None:
        problems, unknown = [], set(self._stored)
        for tensor in tensors:
            keys = self._stored_keys(tensor)
            unknown -= set(keys)
            if not keys:
                problems.append(f"missing tensor {tensor.keys[0]}")
                continue
            shape, expected = self.file.shapes[self._stored[keys[0]]], tensor.spec.shape
            is_right = shape[0] <= expected[0] and shape[1:] == expected[1:] if tensor.vocabulary else shape == expected
            if not is_right:
                limit = "at most " if tensor.vocabulary else ""
                problems.append(f"{keys[0]}: has shape {shape}, expected {limit}{expected}")
            problems += self._tie_problems(args, tensor, keys) if tensor.vocabulary else []
        problems += [f"unknown tensor {key}" for key in sorted(unknown)]
        if problems:
            remainder = [f"and {len(problems) - _MAX_NAMED} more"] if len(problems) > _MAX_NAMED else []
            lines = "\n  ".join([*problems[:_MAX_NAMED], *remainder])
            raise CheckpointError(f"{self.path}: this adapter does not fit its base model:\n  {lines}")

    def _tie_problems(self, args: ModelArgs, tensor: PeftTensor, keys: list[str]) -> list[str]:
        """Returns error lines if tied embedding and head are not both saved, or have different values."""
        if args.no_weight_tying or args.score_head or tensor.layer != 0:
            return []
        kinds = vocabulary_modules()
        embedding = [key for key in keys if kinds[key.split(".")[-2]] == "embed_tokens"]
        heads = [key for key in keys if key not in embedding]
        if not embedding or not heads:
            return [
                f"{keys[0]}: embedding and head are tied, but only one of them is saved; train both as one tensor "
                "(peft's ensure_weight_tying)"
            ]
        embedding_value, head_value = (self.file.get(self._stored[key]) for key in (embedding[0], heads[0]))
        if torch.equal(embedding_value, head_value):
            return []
        return [f"{embedding[0]}, {heads[0]}: have different values, but embedding and head are tied in this model"]


def _today(name: str) -> str:
    """Converts a tensor name written by an older version of peft to the name that current peft writes."""
    name = name.removesuffix(".weight") if name.endswith("lora_magnitude_vector.weight") else name
    return re.sub(r"\.modules_to_save(\.default)?\.weight$", ".weight", name)


def peft_config(
    args: ModelArgs, family: Family, tensors: Iterable[PeftTensor], base: str | None, in_wrapper: bool
) -> dict[str, Any]:
    """Returns the content of adapter_config.json for a model's adapters.

    tensors: the tensors in the folder's weight file. base: the name of the base model. in_wrapper: the base
        model is multimodal, and `args` describes its language model."""
    assert args.lora is not None
    lora, keys = args.lora, [key.removeprefix(PREFIX) for tensor in tensors for key in tensor.keys]
    module_names = [key.removesuffix(".lora_A.weight") for key in keys if key.endswith(".lora_A.weight")]
    modules: list[str] | str = list(dict.fromkeys(short_name(family, module) for module in module_names))
    layers = None if lora["layers_to_transform"] is None else sorted(chosen_blocks(args))
    if any("." in name for name in lora_targets(args)) or in_wrapper and layers is not None:
        modules, layers = module_names, None
    elif in_wrapper:
        modules = text_modules(modules)
    copies = [key.split(".")[-2] for key in keys if ".lora_" not in key]
    alpha = float(lora["alpha"])
    return {
        "peft_type": "LORA",
        "task_type": SCORES if args.score_head else CAUSAL,
        "base_model_name_or_path": base,
        "revision": None,
        "inference_mode": True,
        "r": lora["r"],
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": lora["dropout"],
        "target_modules": modules,
        "layers_to_transform": layers,
        **peft_sizes(args, peft_modules(args, family), in_wrapper),
        "use_rslora": lora["rslora"],
        "use_dora": lora["dora"],
        "bias": "none",
        "fan_in_fan_out": any(row.transposed for row in family.rows if not row.holds_all_experts),
        "init_lora_weights": True,
        "modules_to_save": list(dict.fromkeys(copies)) or None,
        # Tied embedding and head were trained as one tensor.
        **({"ensure_weight_tying": True} if copied_modules(args) and not args.no_weight_tying else {}),
    }


def write_peft(
    folder: Path,
    args: NeoXArgs,
    layers: Callable[[], Iterable[tuple[int, Mapping[str, Tensor]]]],
    dtype: torch.dtype,
    *,
    family: str | None = None,
    base: str | None = None,
    vocab_size: int | None = None,
    in_wrapper: bool = False,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors (peft's format) into an existing folder.

    layers: a function that returns (NeoX layer index, the layer's full adapter tensors by NeoX names) pairs.
    dtype: of the written tensors.
    family: the HuggingFace `model_type` whose module names are used; None: the first family that fits `args`.
    base: the name of the base model.
    vocab_size: number of rows of embedding and head to keep; None: all.
    in_wrapper: the base model is multimodal, and `args` describes its language model.
    Raises CheckpointError."""
    its_family = family_of_adapters(args, family)
    tensors = [tensor.within_wrapper() if in_wrapper else tensor for tensor in peft_tensors(args, its_family)]
    tensors_by_name = {(tensor.layer, tensor.spec.name): tensor for tensor in tensors}
    shapes = {
        key: tuple(part.shape)
        for tensor in tensors
        for key, part in _parts(tensor, torch.empty(tensor.spec.shape, device="meta"), vocab_size)
    }

    def stored_tensors() -> Iterator[tuple[str, Tensor]]:
        for layer, values in layers():
            for name, value in values.items():
                yield from _parts(tensors_by_name[layer, name], value, vocab_size)

    limit = weight_bytes(shapes.values(), dtype) + 1  # large enough for a single file
    write_weights(folder, shapes, dtype, stored_tensors(), limit=limit, single_name=WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(peft_config(args, its_family, tensors, base, in_wrapper), indent=2) + "\n")


def _parts(tensor: PeftTensor, value: Tensor, vocab_size: int | None) -> Iterator[tuple[str, Tensor]]:
    rows = value[:vocab_size] if tensor.vocabulary else value
    yield from zip(tensor.keys, tensor.split(rows), strict=True)
