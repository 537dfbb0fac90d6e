"""Loads a HuggingFace folder with transformers, compares the loaded tensors with the files, and runs it in
fp32.

Only one module's weights are in memory at a time, because `from_pretrained` maps the files. If it converts
tensors (stacked experts, quantised weights, several dtypes), all are in memory. If they do not fit, or for
Meta's files, which `from_pretrained` cannot read, modules get their tensors directly from the files, and the
result says so.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron.checkpointing.errors import CheckpointError, shortened
from megatron.checkpointing.families.family import Config, Family, gives_score
from megatron.checkpointing.families.multimodal import is_multimodal, text_name
from megatron.checkpointing.families.registry import FAMILIES, family_of
from megatron.checkpointing.huggingface.dequantize import weight_dtype
from megatron.checkpointing.huggingface.folder import HFFolder
from megatron.checkpointing.huggingface.weight_writer import weight_bytes
from megatron.checkpointing.tensor_files import readable_size
from megatron.mpu.memory import free_host_memory

# transformers' mixers with states read the weights of these modules without calling them.
_READ_BY_PARENT = ("conv1d", "dt_proj", "conv")
_MAX_NAMED = 4

Stored = Mapping[str, list[list[str]]]
"""{tensor name in memory: [its names in files]}; for stacked experts one inner list for each expert."""


def transformers_logits(folder: HFFolder, tokens: Tensor) -> tuple[Tensor, str | None]:
    """Returns transformers' logits, `[batch, seq, vocabulary]` fp32, and why `from_pretrained` was not used.

    For a reward model, the logits are the scores at the last token, `[batch, 1]`. The reason is None if
    `from_pretrained` loaded the folder. tokens: ids, `[batch, seq]`. No code of the folder is run. Raises
    CheckpointError if transformers cannot load the model, or loads other weights than the files hold."""
    transformers: Any
    try:
        import transformers
    except ModuleNotFoundError:
        raise CheckpointError("the comparison of logits needs transformers (pip install transformers)") from None
    try:
        with _quiet(transformers):
            auto, config = _class_of(transformers, folder)
            model = _without_weights(auto, config)
            stored = _stored_names(folder, model)
            obstacle = _load_obstacle(folder, stored)
            loaded = _loaded(auto, config, folder) if obstacle is None else None
        if loaded is not None:
            _compare_loaded(folder, loaded, stored)
        _lend_all(model, partial(_value, folder, loaded, stored), stored)
        return model(tokens, use_cache=False).logits, obstacle
    except CheckpointError:
        raise
    except Exception as problem:  # transformers reads the user's files and raises errors of any kind
        words = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
        raise CheckpointError(
            f"{folder.origin}: transformers could not load or run this model, so its logits were not checked ({words})"
        ) from problem


def same_values(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN."""
    return torch.equal(left, right) or (
        left.shape == right.shape and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
    )


def _class_of(transformers: Any, folder: HFFolder) -> tuple[Any, Any]:
    """Returns (the auto class that loads the folder's model, transformers' configuration object)."""
    if folder.is_transformers_format:
        config = transformers.AutoConfig.from_pretrained(folder.path, trust_remote_code=False)
    else:
        config = transformers.AutoConfig.for_model(**folder.config)
    # transformers 5's default kernel for experts does not support all sizes.
    config._experts_implementation = "eager"
    return auto_class(transformers, config.to_dict(), gives_score(folder.config)), config


def auto_class(transformers: Any, config: Config, scores: bool) -> Any:
    """Returns transformers' auto class that loads a model, such as AutoModelForCausalLM.

    config: the full config.json, also of a multimodal model. scores: the model is a reward model."""
    if scores:
        return transformers.AutoModelForSequenceClassification
    return transformers.AutoModelForImageTextToText if is_multimodal(config) else transformers.AutoModelForCausalLM


def _without_weights(auto: Any, config: Any) -> Any:
    """Builds the model in fp32: parameters take no memory (meta device), buffers are real.

    auto: an auto class. config: transformers' configuration object."""

    def on_meta(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        if param.is_meta:
            return None  # tied, or registered again
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
        model.config.pad_token_id = -1  # no token has this id
    return model.eval()


def _load_obstacle(folder: HFFolder, stored: Stored) -> str | None:
    if not folder.is_transformers_format:
        return "from_pretrained cannot read files of this format"
    if folder.is_nvfp4:
        return "from_pretrained cannot dequantise NVFP4 without other packages"
    if folder.has_edge_blocks:
        return "from_pretrained dequantises smaller blocks at the edge of a weight differently"
    dtypes = set(folder.stored_dtypes.values())
    as_stored = folder.quantised is None and len(dtypes) == 1 and all(len(names) == 1 for names in stored.values())
    size = weight_bytes(folder.shapes.values(), _dtype(folder))
    free = free_host_memory(size)
    if as_stored or size <= free:
        return None
    return f"from_pretrained needs {readable_size(size)} of memory, but only {readable_size(free)} are free"


def _dtype(folder: HFFolder) -> torch.dtype:
    """Returns a dtype that holds the weights of the folder without loss."""
    if folder.quantised is not None:
        return folder.dtype or weight_dtype(folder.config)
    return reduce(torch.promote_types, {dtype for dtype in folder.stored_dtypes.values() if dtype is not None})


def _loaded(auto: Any, config: Any, folder: HFFolder) -> Mapping[str, Tensor]:
    """Loads a folder with `from_pretrained`; returns the model's parameters and buffers by name.

    Raises CheckpointError for tensors that transformers finds missing or of wrong shape."""
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
            raise CheckpointError(
                f"{folder.origin}: transformers reports {kind.replace('_', ' ')}: {shortened(names, _MAX_NAMED)}"
            )
    return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}


def _stored_names(folder: HFFolder, model: Any) -> Stored:
    """Returns {tensor name in transformers' model: its names in the files}.

    Raises CheckpointError if the files lack a parameter, or hold a tensor that the model does not use."""
    family, tensors = FAMILIES[family_of(folder.config)], dict(model.state_dict(keep_vars=True))
    head = model.get_output_embeddings()
    is_wrapped = is_multimodal(model.config.to_dict())
    aliases: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        aliases.setdefault(id(tensor), []).append(name)

    def groups(name: str) -> list[list[str]]:
        inner_name = (text_name(name) or name) if is_wrapped else name
        names = [inner_name]
        # transformers 5 names GPT-NeoX's head differently in memory than in files
        if head is not None and model.get_submodule(name.rpartition(".")[0]) is head:
            names.append(family.head)
        options = [[[option]] for option in names if option in folder.shapes]
        options += [family.stored_names(option, len(tensors[name]) if tensors[name].dim() else 1) for option in names]
        return next(
            (match for match in options if match and all(n in folder.shapes for group in match for n in group)), []
        )

    stored: dict[str, list[list[str]]] = {}
    for name, tensor in tensors.items():
        if is_wrapped and text_name(name) is None:
            continue
        # The tensor's own name comes first, because files may also hold the tensor that it is tied to.
        candidates = map(groups, (name, *aliases[id(tensor)]))
        files = next((candidate for candidate in candidates if candidate and candidate[0]), None)
        if files is not None:
            stored[name] = files
        elif isinstance(tensor, nn.Parameter):
            raise CheckpointError(
                f"{folder.origin}: the files lack the tensor {name}, which transformers needs; export or download the "
                "model again"
            )
    _refuse_unread(folder, family, stored)
    return stored


def _refuse_unread(folder: HFFolder, family: Family, stored: Stored) -> None:
    """Raise CheckpointError if the files hold tensors that transformers' model does not use."""
    read = {name for groups in stored.values() for group in groups for name in group}
    unread = {name for name in folder.shapes.keys() - read if not re.fullmatch(family.ignored, name)}
    unread -= {family.head} if gives_score(folder.config) else set()
    if folder.mtp_layers:  # for multi-token prediction, which transformers does not have
        blocks = folder.config["num_hidden_layers"]
        unread = {name for name in unread if not (family.leaves_out(name, blocks) or family.predicts(name))}
    if unread:
        raise CheckpointError(
            f"{folder.origin}: holds tensors that transformers' model does not use: "
            f"{shortened(sorted(unread), _MAX_NAMED)}"
        )


def _compare_loaded(folder: HFFolder, loaded: Mapping[str, Tensor], stored: Stored) -> None:
    """Raise CheckpointError if a tensor that transformers loaded differs from the files."""
    for name, groups in stored.items():
        for file_tensor, part in _parts(folder, loaded[name], groups):
            value = folder.get(file_tensor)
            if part.shape != value.shape or not same_values(part.to(value.dtype), value):
                raise CheckpointError(
                    f"{folder.origin}: {name}, as loaded by transformers, differs from {file_tensor} in the files; "
                    "does config.json fit the weights (tie_word_embeddings)?"
                )


def _parts(folder: HFFolder, tensor: Tensor, groups: list[list[str]]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in files, tensor) for each part of a tensor in transformers' memory.

    groups: the names in files, in a list for each expert. Stacked experts (`[experts, rows, columns]`) are
        split into the tensors of each expert; a tensor with one list, into those of its rows."""
    if len(groups) == 1 and len(groups[0]) == 1:
        yield groups[0][0], tensor
        return
    rows = [folder.shapes[name][0] for name in groups[0]]
    matrices = [tensor] if len(groups) == 1 else tensor
    for expert_names, matrix in zip(groups, matrices, strict=True):
        yield from zip(expert_names, matrix.split(rows), strict=True)


def _value(folder: HFFolder, loaded: Mapping[str, Tensor] | None, stored: Stored, name: str) -> Tensor:
    """Returns the tensor `name` of transformers' model: from `loaded`, or if that is None from the files."""
    if loaded is not None:
        return loaded[name] if folder.dtype is None else loaded[name].to(folder.dtype)
    groups = stored[name]
    if len(groups) == 1 and len(groups[0]) == 1:
        return folder.get(groups[0][0])
    # Only one tensor at a time is in memory in addition to the result.
    rows = sum(folder.shapes[part][0] for part in groups[0])
    experts = () if len(groups) == 1 else (len(groups),)
    result = torch.empty(*experts, rows, *folder.shapes[groups[0][0]][1:])
    for file_tensor, part in _parts(folder, result, groups):
        part.copy_(folder.get(file_tensor))
    return result


def _lend_all(model: Any, get: Callable[[str], Tensor], stored: Stored) -> None:
    for path, module in model.named_modules():
        begin = f"{path}." if path else ""
        for local_name, buffer in module._buffers.items():
            if buffer is not None and begin + local_name in stored:
                module._buffers[local_name] = get(begin + local_name).float()
        if any(begin + local_name in stored for local_name in module._parameters):
            parent, _, last = path.rpartition(".")
            reader = model.get_submodule(parent) if last in _READ_BY_PARENT else module
            lend(module, partial(_with_prefix, get, begin), own_only=True, reader=reader)


def _with_prefix(get: Callable[[str], Tensor], begin: str) -> Callable[[str], Tensor]:
    return lambda name: get(begin + name)


def lend(
    module: nn.Module,
    open_layer: Callable[[], Callable[[str], Tensor]],
    own_only: bool = False,
    reader: nn.Module | None = None,
) -> None:
    """Registers hooks that give a module its parameters in fp32 only during its forward pass.

    open_layer: called before each forward pass; returns a function from a parameter's name in the module to
        its value.
    own_only: leave out the parameters of submodules.
    reader: the module whose forward pass needs the parameters; None: `module`."""
    empty: dict[tuple[nn.Module, str], nn.Parameter] = {}

    def take(*_: Any) -> None:
        get = open_layer()
        for path, part in [("", module)] if own_only else module.named_modules():
            for param_name, param in list(part._parameters.items()):
                if param is None:
                    continue
                empty[part, param_name] = param
                value = get(f"{path}.{param_name}" if path else param_name).float()
                if value.shape != param.shape:
                    raise CheckpointError(
                        f"{path}.{param_name}: has shape {tuple(value.shape)}, but the model needs {tuple(param.shape)}"
                    )
                part._parameters[param_name] = nn.Parameter(value, requires_grad=False)

    def give_back(*_: Any) -> None:
        for (part, param_name), param in empty.items():
            part._parameters[param_name] = param
        empty.clear()

    (reader or module).register_forward_pre_hook(take)
    (reader or module).register_forward_hook(give_back)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Within the context, transformers prints no warnings and no progress bars."""
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
