"""Folders in peft's format, `adapter_config.json` and `adapter_model.safetensors`: read and written, one
layer in memory at a time."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.adapters.peft_names import (
    PREFIX,
    PeftTensor,
    family_of_adapters,
    family_of_modules,
    peft_tensors,
    short_name,
    target_of,
    vocabulary_modules,
)
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families import check_adapter_fields, names_a_wrapper, text_modules, text_name
from megatron.checkpointing.families.family import Family
from megatron.checkpointing.huggingface.folder import SafetensorsFile, write_weights
from megatron.checkpointing.huggingface.model_files import read_json
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.values.adapters import copied_modules

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CAUSAL, SCORES = "CAUSAL_LM", "SEQ_CLS"
# Of adapter_config.json: what we read, what says nothing of what the adapter computes, what must be as here.
_READ = {
    "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights", "task_type",
    "base_model_name_or_path", "peft_type",
    "fan_in_fan_out",  # follows from the modules: GPT-2's weights are stored transposed, its adapters are not
}  # fmt: skip
_SILENT = {
    "auto_mapping", "inference_mode", "revision", "peft_version", "megatron_core", "qalora_group_size",
    "runtime_config", "target_modules", "exclude_modules", "modules_to_save", "ensure_weight_tying", "eva_config",
    "corda_config", "loftq_config", "lora_ga_config", "layers_pattern",
}  # fmt: skip
_FIXED = {"bias": (None, "none")}
_INITIAL_VALUES = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the weights below
_HINTS = {
    "rank_pattern": "each layer would have a rank of its own",
    "alpha_pattern": "each layer would have an alpha of its own",
    "layers_to_transform": "all layers have adapters here",
    "bias": "biases stay as they are here",
}
_PEFT_DEFAULT = 8  # of r and of lora_alpha, where a file leaves them out
_SHOWN = 4


def is_peft(name: str | Path) -> bool:
    """Whether a path is a folder in peft's format."""
    return (Path(name) / CONFIG).is_file()


def peft_vocab_size(path: str | Path) -> int:
    """Rows of the vocabulary that a folder in peft's format brings along; 0 for anything else."""
    return (PeftFolder(path).vocab_size or 0) if is_peft(path) else 0


class PeftFolder:
    """A folder in peft's format. is_multimodal: it was trained on the class of a multimodal model, of whose
    adapters those of the language model are read, by the names that they have in it alone. Raises
    CheckpointError that names what has no counterpart here."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = read_json(self.path / CONFIG)
        check_adapter_fields(self.config, str(self.path / CONFIG))
        self._check_config()
        if not (self.path / WEIGHTS).is_file():
            old = " (adapter_model.bin: save it again with peft, which writes safetensors)"
            raise CheckpointError(f"{self.path}: holds no {WEIGHTS}{old if list(self.path.glob('*.bin')) else ''}")
        self.file = SafetensorsFile(self.path / WEIGHTS)
        # Below a copy peft sometimes saves what it was made of.
        names = {_today(name): name for name in self.file.shapes if ".original_module." not in name}
        self.is_multimodal = any(names_a_wrapper(name.removeprefix(PREFIX)) for name in names)
        self._stored: Mapping[str, str] = self._of_language_model(names) if self.is_multimodal else names

    @property
    def base(self) -> str | None:
        """The model that the adapter was trained on: a folder, or a name on the Hub."""
        return self.config.get("base_model_name_or_path") or None

    def _check_config(self) -> None:
        kind, where = self.config.get("peft_type"), self.path / CONFIG
        if kind != "LORA":
            raise CheckpointError(f"{where}: peft_type: {kind} is not supported, only LORA")
        if self.config.get("task_type") not in (None, CAUSAL, SCORES):
            raise CheckpointError(f"{where}: task_type: {self.config['task_type']}: is no language model's")
        for name, value in self.config.items():
            taken = value in _FIXED[name] if name in _FIXED else name in _READ | _SILENT
            if not taken and value:
                why = f" ({_HINTS[name]})" if name in _HINTS else ""
                raise CheckpointError(f"{where}: {name}: {json.dumps(value)} is not supported{why}")
        begun = self.config.get("init_lora_weights")
        if begun not in _INITIAL_VALUES:
            raise CheckpointError(
                f"{where}: init_lora_weights: {begun} changes the weights below the adapter; save it with peft's "
                "path_initial_model_for_weight_conversion, which makes a plain one of it"
            )

    def _of_language_model(self, names: Mapping[str, str]) -> dict[str, str]:
        """The stored tensors of the language model by their names in it alone. names: those of a multimodal
        model, by today's names. Raises CheckpointError for other parts of which an adapter changes the
        output: one whose B is zero, as text alone leaves it, does not."""
        inner_names = {name: text_name(name.removeprefix(PREFIX)) for name in names}
        others = [name for name, text in inner_names.items() if text is None]
        trained = [
            name for name in others
            if ".lora_A." not in name and not (".lora_B." in name and not self.file.get(names[name]).any())
        ]  # fmt: skip
        if trained:
            more = f" and {len(trained) - _SHOWN} more" if len(trained) > _SHOWN else ""
            raise CheckpointError(
                f"{self.path}: {', '.join(sorted(trained)[:_SHOWN])}{more}: adapters of the model of images, of which "
                "only the language model is here; train with target_modules of that alone, such as "
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
        """The modules that are there whole, by the last parts of their names, and the rows of each."""
        whole = [name for name in self._stored if name.endswith(".weight") and ".lora_" not in name]
        return {name.split(".")[-2]: self.file.shapes[self._stored[name]][0] for name in whole}

    @property
    def scores(self) -> bool:
        return "score" in self.copies

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding or head that is there; None without."""
        return max((rows for name, rows in self.copies.items() if name != "score"), default=None)

    def args_over(self, base: NeoXArgs) -> NeoXArgs:
        """The configuration of a base model with these adapters. Raises CheckpointError."""
        self._refuse_vocabulary(tied=not base.no_weight_tying and not base.score_head)
        if not self.modules:
            raise CheckpointError(f"{self.path}: holds no adapter of a linear layer (lora_A)")
        heads = set(self.copies) - {"score"}
        if not base.no_weight_tying and not base.score_head:
            heads = {"embed_tokens" if name in ("lm_head", "embed_out") else name for name in heads}
        given = self.config
        base = base.replace(score_head=True) if self.scores else base
        family = family_of_modules(base, self.modules)
        lora = {
            "r": given.get("r") or _PEFT_DEFAULT,
            "alpha": given.get("lora_alpha") or _PEFT_DEFAULT,
            "dropout": given.get("lora_dropout") or 0.0,
            "rslora": bool(given.get("use_rslora")),
            "dora": bool(given.get("use_dora")),
            "target": sorted({target_of(base, family, name) for name in self.modules}),
            "modules_to_save": sorted({"embed_out": "lm_head"}.get(name, name) for name in heads) or None,
        }
        try:
            return base.replace(lora=lora)
        except ConfigError as problem:
            lines = "\n  ".join(line.replace("(program)", "").strip() for line in problem.problems)
            raise CheckpointError(f"{self.path}: does not fit the model below it:\n  {lines}") from problem

    def _refuse_vocabulary(self, tied: bool) -> None:
        """Raise CheckpointError for adapters of the embedding or of the head: here only linears of blocks
        have some. tied: the head is the embedding."""
        modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in self._stored if ".lora_" in name}
        adapted = sorted(module for module in modules if module.rpartition(".")[2] in vocabulary_modules())
        if adapted:
            alone = " of a model whose head is its embedding (tie_word_embeddings)" if tied else ""
            raise CheckpointError(
                f"{self.path}: adapters of {', '.join(adapted)} are not supported{alone}; train with target_modules of "
                "linears in blocks, and with modules_to_save for the embedding and the head"
                f"{' (ensure_weight_tying: true)' if tied else ''}"
            )

    def reader(self, args: NeoXArgs) -> Callable[[int], dict[str, Tensor]]:
        """What reads the whole tensors of a NeoX layer, by our names. args: of `args_over`.

        Copies of the vocabulary are padded with the mean of their rows. Raises CheckpointError that names
        every missing or unknown tensor and wrong shape.
        """
        tensors = peft_tensors(args, family_of_modules(args, self.modules))
        self._check_tensors(args, tensors)
        by_layer: dict[int, list[PeftTensor]] = {}
        for tensor in tensors:
            by_layer.setdefault(tensor.layer, []).append(tensor)
        return lambda layer: {of.spec.name: self._read(of) for of in by_layer.get(layer, ())}

    def _read(self, tensor: PeftTensor) -> Tensor:
        keys = self._stored_keys(tensor)
        whole = self.file.get(self._stored[keys[0]]).clone()
        return _padded(whole, tensor.spec.shape[0]) if tensor.vocabulary else tensor.join(whole)

    def _stored_keys(self, tensor: PeftTensor) -> list[str]:
        return [key for key in (*tensor.keys, *tensor.older) if key in self._stored]

    def _check_tensors(self, args: NeoXArgs, tensors: Iterable[PeftTensor]) -> None:
        problems, unknown = [], set(self._stored)
        for tensor in tensors:
            keys = self._stored_keys(tensor)
            unknown -= set(keys)
            if not keys:
                problems.append(f"missing {tensor.keys[0]}")
                continue
            shape, wanted = self.file.shapes[self._stored[keys[0]]], tensor.spec.shape
            fits = shape[0] <= wanted[0] and shape[1:] == wanted[1:] if tensor.vocabulary else shape == wanted
            if not fits:
                most = "at most " if tensor.vocabulary else ""
                problems.append(f"{keys[0]}: shape {shape}, not {most}{wanted}")
            problems += self._tie_problems(args, tensor, keys) if tensor.vocabulary else []
        problems += [f"unknown {key}" for key in sorted(unknown)]
        if problems:
            more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
            lines = "\n  ".join([*problems[:_SHOWN], *more])
            raise CheckpointError(f"{self.path}: does not fit the model below it, or not all layers alike:\n  {lines}")

    def _tie_problems(self, args: NeoXArgs, tensor: PeftTensor, keys: list[str]) -> list[str]:
        """A tied embedding is the head too: one of them alone, or two that differ, is another model."""
        if args.no_weight_tying or args.score_head or tensor.layer != 0:
            return []
        embedding = [key for key in keys if "embed_" in key and not key.endswith("embed_out.weight")]
        heads = [key for key in keys if key not in embedding]
        if not embedding or not heads:
            return [f"{keys[0]}: without its tied twin; train both as one (peft's ensure_weight_tying)"]
        one, other = (self.file.get(self._stored[key]) for key in (embedding[0], heads[0]))
        return [] if torch.equal(one, other) else [f"{embedding[0]}, {heads[0]}: differ, but are one here (tied)"]


def _today(name: str) -> str:
    """A name of peft's file as today's peft writes it."""
    name = name.removesuffix(".weight") if name.endswith("lora_magnitude_vector.weight") else name
    return re.sub(r"\.modules_to_save(\.default)?\.weight$", ".weight", name)


def _padded(whole: Tensor, rows: int) -> Tensor:
    mean = whole.mean(0, keepdim=True, dtype=torch.float32).to(whole.dtype)
    return torch.cat([whole, mean.expand(rows - len(whole), -1)])


def peft_config(
    args: NeoXArgs, family: Family, tensors: Iterable[PeftTensor], base: str | None, in_wrapper: bool
) -> dict[str, Any]:
    """adapter_config.json of the adapters of a model. base: the name of the model below. in_wrapper: as of
    `write_peft`."""
    assert args.lora is not None
    lora, keys = args.lora, [key.removeprefix(PREFIX) for tensor in tensors for key in tensor.keys]
    named = [key.removesuffix(".lora_A.weight") for key in keys if key.endswith(".lora_A.weight")]
    modules = list(dict.fromkeys(short_name(family, module) for module in named))
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
        "target_modules": text_modules(modules) if in_wrapper else modules,
        "use_rslora": lora["rslora"],
        "use_dora": lora["dora"],
        "bias": "none",
        "fan_in_fan_out": any(row.transposed for row in family.rows if not row.of_all_experts),
        "init_lora_weights": True,
        "modules_to_save": list(dict.fromkeys(copies)) or None,
        # The embedding that is the head too stays so.
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
    """Write the two files of peft's format into an existing folder.

    layers: whole tensors of each NeoX layer of adapters, by our names. dtype: of what is written. family: as
    of `family_of_adapters`. base: the name of the model below. vocab_size: rows that copies of the vocabulary
    keep; None: all. in_wrapper: the model below is a multimodal one, which this is the language model of.
    Raises CheckpointError.
    """
    its_family = family_of_adapters(args, family)
    tensors = [tensor.within_wrapper() if in_wrapper else tensor for tensor in peft_tensors(args, its_family)]
    by_name = {(tensor.layer, tensor.spec.name): tensor for tensor in tensors}
    shapes = {
        key: tuple(part.shape)
        for tensor in tensors
        for key, part in _parts(tensor, torch.empty(tensor.spec.shape, device="meta"), vocab_size)
    }

    def each() -> Iterator[tuple[str, Tensor]]:
        for layer, values in layers():
            for name, value in values.items():
                yield from _parts(by_name[layer, name], value, vocab_size)

    size = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    write_weights(folder, shapes, dtype, each(), limit=size + 1, whole=WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(peft_config(args, its_family, tensors, base, in_wrapper), indent=2) + "\n")


def _parts(tensor: PeftTensor, whole: Tensor, vocab_size: int | None) -> Iterator[tuple[str, Tensor]]:
    kept = whole[:vocab_size] if tensor.vocabulary else whole
    yield from zip(tensor.keys, tensor.split(kept), strict=True)
