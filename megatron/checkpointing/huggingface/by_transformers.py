"""What transformers makes of a HuggingFace folder: loaded by `from_pretrained` of the folder itself, compared
with the tensors of its files, and run in fp32 with the weights of one module at a time.

`from_pretrained` maps files where it takes tensors as they are. Where it makes others of them (experts that
it puts together, quantised weights, several dtypes), all are in memory; where that has no room, and for
Meta's files, which it cannot read, modules get their tensors from the files directly, and the result says so.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families import FAMILIES, family_of, gives_score, is_multimodal, text_name
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.huggingface.dequantize import weight_dtype
from megatron.checkpointing.huggingface.folder import HFFolder
from megatron.checkpointing.tensor_files import readable_size
from megatron.mpu.memory import free_host_memory

# Modules whose weights transformers' mixers with a state read without calling them.
_READ_BY_PARENT = ("conv1d", "dt_proj")
_SHOWN = 4

Stored = Mapping[str, list[list[str]]]
"""The tensors of files that one in memory is made of, by its name: of each expert in turn, or of itself."""


def transformers_logits(folder: HFFolder, tokens: Tensor) -> tuple[Tensor, str | None]:
    """The logits of the class that transformers has for config.json, `[batch, seq, vocabulary]` fp32; of a
    reward model the scores of the last tokens, `[batch, 1]`. And why the folder was not loaded by
    `from_pretrained`, in words; None where it was.

    No code of the folder is run. Raises CheckpointError where transformers cannot load the model, or loads
    another one than the files hold.
    """
    transformers: Any
    try:
        import transformers
    except ModuleNotFoundError:
        raise CheckpointError("the check of the result needs transformers (pip install transformers)") from None
    try:
        with _quiet(transformers):
            auto, config = _class_of(transformers, folder)
            model = _without_weights(auto, config)
            stored = _stored_names(folder, model)
            why_not = _why_not_loaded(folder, stored)
            loaded = _loaded(auto, config, folder) if why_not is None else None
        if loaded is not None:
            _compare_loaded(folder, loaded, stored)
        _lend_all(model, partial(_value, folder, loaded, stored), stored)
        return model(tokens, use_cache=False).logits, why_not
    except CheckpointError:
        raise
    except Exception as problem:  # of a library that reads the user's files: errors of its own kinds, too
        words = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
        raise CheckpointError(f"{folder.origin}: transformers cannot load and run this model ({words})") from problem


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN where the other is too."""
    return torch.equal(one, other) or (
        one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    )


def _class_of(transformers: Any, folder: HFFolder) -> tuple[Any, Any]:
    """The auto class for a folder, and its configuration."""
    if folder.of_transformers:
        config = transformers.AutoConfig.from_pretrained(folder.path, trust_remote_code=False)
    else:
        config = transformers.AutoConfig.for_model(**folder.config)
    # The kernel for experts, which else is transformers 5's choice, does not take all sizes.
    config._experts_implementation = "eager"
    return auto_class(transformers, config.to_dict(), gives_score(folder.config)), config


def auto_class(transformers: Any, config: Config, scores: bool) -> Any:
    """The auto class that loads a model. config: its config.json, of a multimodal model all of it; scores:
    whether it is to be a reward model."""
    if scores:
        return transformers.AutoModelForSequenceClassification
    return transformers.AutoModelForImageTextToText if is_multimodal(config) else transformers.AutoModelForCausalLM


def _without_weights(auto: Any, config: Any) -> Any:
    """The model in fp32, with parameters that have no memory; its buffers are real."""

    def on_meta(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        if param.is_meta:
            return None  # tied to another, or made again
        return nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)

    config = deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False)
    finally:
        handle.remove()
    if "SequenceClassification" in type(model).__name__:
        model.config.pad_token_id = -1  # none of the tokens
    return model.eval()


def _why_not_loaded(folder: HFFolder, stored: Stored) -> str | None:
    if not folder.of_transformers:
        return "from_pretrained reads no files of this format"
    if folder.has_edge_blocks:
        return "from_pretrained reads quantised blocks at the edge of a weight otherwise"
    dtypes = set(folder.stored_dtypes.values())
    as_stored = folder.quantised is None and len(dtypes) == 1 and all(len(names) == 1 for names in stored.values())
    needed = sum(map(math.prod, folder.shapes.values())) * _dtype(folder).itemsize
    free = free_host_memory(needed)
    if as_stored or needed <= free:
        return None
    return f"from_pretrained takes {readable_size(needed)} of memory, {readable_size(free)} are free"


def _dtype(folder: HFFolder) -> torch.dtype:
    """The dtype that holds every number of the folder."""
    if folder.quantised is not None:
        return folder.dtype or weight_dtype(folder.config)
    return reduce(torch.promote_types, {dtype for dtype in folder.stored_dtypes.values() if dtype is not None})


def _loaded(auto: Any, config: Any, folder: HFFolder) -> Mapping[str, Tensor]:
    """Parameters and buffers of the model that `from_pretrained` makes of a folder, by name."""
    config = deepcopy(config)
    if folder.quantised is not None:
        config.quantization_config = {**config.quantization_config, "dequantize": True}
    model, info = auto.from_pretrained(
        folder.path, config=config, dtype=_dtype(folder), attn_implementation="eager", trust_remote_code=False,
        local_files_only=True, output_loading_info=True,
    )  # fmt: skip
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            names = sorted(str(name) for name in info[kind])
            raise CheckpointError(f"{folder.origin}: transformers finds {kind.replace('_', ' ')}: {_some(names)}")
    return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}


def _stored_names(folder: HFFolder, model: Any) -> Stored:
    """Raises CheckpointError for a parameter of the model that is not in the files."""
    family, tensors = FAMILIES[family_of(folder.config)], dict(model.state_dict(keep_vars=True))
    head = model.get_output_embeddings()
    is_whole = is_multimodal(model.config.to_dict())
    aliases: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        aliases.setdefault(id(tensor), []).append(name)

    def groups(name: str) -> list[list[str]]:
        known = (text_name(name) or name) if is_whole else name
        names = [known]
        # transformers 5 calls GPT-NeoX's head otherwise in memory than in files
        if head is not None and model.get_submodule(name.rpartition(".")[0]) is head:
            names.append(family.head)
        tried = [[[one]] for one in names if one in folder.shapes]
        tried += [family.stored_names(one, len(tensors[name]) if tensors[name].dim() else 1) for one in names]
        return next((found for found in tried if found and all(n in folder.shapes for of in found for n in of)), [])

    stored: dict[str, list[list[str]]] = {}
    for name, tensor in tensors.items():
        if is_whole and text_name(name) is None:
            continue
        # Its own tensor first: one that is tied may have one, too.
        candidates = map(groups, (name, *aliases[id(tensor)]))
        files = next((candidate for candidate in candidates if candidate and candidate[0]), None)
        if files is not None:
            stored[name] = files
        elif isinstance(tensor, nn.Parameter):
            raise CheckpointError(f"{folder.origin}: transformers wants {name}, which is not there")
    _refuse_unread(folder, family, stored)
    return stored


def _refuse_unread(folder: HFFolder, family: Family, stored: Stored) -> None:
    """Raise CheckpointError for tensors of the files that no tensor of the model is made of."""
    read = {name for groups in stored.values() for of in groups for name in of}
    unread = {name for name in folder.shapes.keys() - read if not re.fullmatch(family.ignored, name)}
    unread -= {family.head} if gives_score(folder.config) else set()
    if unread:
        raise CheckpointError(f"{folder.origin}: transformers has no place for {_some(sorted(unread))}")


def _compare_loaded(folder: HFFolder, loaded: Mapping[str, Tensor], stored: Stored) -> None:
    """Raise CheckpointError where transformers loaded another tensor than the files hold."""
    for name, groups in stored.items():
        for own, part in _parts(folder, loaded[name], groups):
            value = folder.get(own)
            if part.shape != value.shape or not same_values(part.to(value.dtype), value):
                raise CheckpointError(
                    f"{folder.origin}: transformers loads another {name} than {own} of its files; is config.json "
                    "that of these weights (tie_word_embeddings)?"
                )


def _parts(folder: HFFolder, whole: Tensor, groups: list[list[str]]) -> Iterator[tuple[str, Tensor]]:
    """The parts of a tensor in memory with the names of the tensors of the files that they are; of experts
    (`[experts, rows, columns]`) the rows of each are those of its tensors."""
    if len(groups) == 1 and len(groups[0]) == 1:
        yield groups[0][0], whole
        return
    rows = [folder.shapes[name][0] for name in groups[0]]
    for of_expert, matrix in zip(groups, whole, strict=True):
        yield from zip(of_expert, matrix.split(rows), strict=True)


def _value(folder: HFFolder, loaded: Mapping[str, Tensor] | None, stored: Stored, name: str) -> Tensor:
    """A tensor of the model, in the precision in which the folder is read."""
    if loaded is not None:
        return loaded[name] if folder.dtype is None else loaded[name].to(folder.dtype)
    groups = stored[name]
    if len(groups) == 1 and len(groups[0]) == 1:
        return folder.get(groups[0][0])
    # One of the tensors at a time is in memory beside the result.
    rows = sum(folder.shapes[part][0] for part in groups[0])
    whole = torch.empty(len(groups), rows, folder.shapes[groups[0][0]][1])
    for own, part in _parts(folder, whole, groups):
        part.copy_(folder.get(own))
    return whole


def _lend_all(model: Any, get: Callable[[str], Tensor], stored: Stored) -> None:
    for path, module in model.named_modules():
        begin = f"{path}." if path else ""
        for own, buffer in module._buffers.items():
            if buffer is not None and begin + own in stored:
                module._buffers[own] = get(begin + own).float()
        if any(begin + own in stored for own in module._parameters):
            parent, _, last = path.rpartition(".")
            reader = model.get_submodule(parent) if last in _READ_BY_PARENT else module
            lend(module, partial(_below, get, begin), alone=True, reader=reader)


def _below(get: Callable[[str], Tensor], begin: str) -> Callable[[str], Tensor]:
    return lambda name: get(begin + name)


def lend(
    module: nn.Module,
    open_layer: Callable[[], Callable[[str], Tensor]],
    alone: bool = False,
    reader: nn.Module | None = None,
) -> None:
    """Give a module its parameters, in fp32, for the time of its forward pass, or that of `reader`. alone:
    but for those of the modules within it."""
    empty: dict[tuple[nn.Module, str], nn.Parameter] = {}

    def take(*_: Any) -> None:
        get = open_layer()
        for path, part in [("", module)] if alone else module.named_modules():
            for param_name, param in list(part._parameters.items()):
                if param is None:
                    continue
                empty[part, param_name] = param
                value = get(f"{path}.{param_name}" if path else param_name).float()
                if value.shape != param.shape:
                    raise CheckpointError(f"{path}.{param_name}: shape {tuple(value.shape)}, not {tuple(param.shape)}")
                part._parameters[param_name] = nn.Parameter(value, requires_grad=False)

    def give_back(*_: Any) -> None:
        for (part, param_name), param in empty.items():
            part._parameters[param_name] = param
        empty.clear()

    (reader or module).register_forward_pre_hook(take)
    (reader or module).register_forward_hook(give_back)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Within the context transformers neither warns nor draws bars: what it finds is raised here."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
