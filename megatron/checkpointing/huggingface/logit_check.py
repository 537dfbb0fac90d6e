"""The check that a HuggingFace folder and a model of ours compute the same logits of a fixed batch.

Both models are built without weights, and each of their modules gets its weights in fp32 just for its forward
pass: the memory needed is that of the largest layer, not of the model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families import FAMILIES, family_of, gives_score
from megatron.checkpointing.huggingface.folder import HFFolder
from megatron.data import Batch
from megatron.model import build_stage
from megatron.model.specs import HeadSpec
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs

# The largest difference of fp32 logits of order 1, in proportion above; measured for the families: 2e-7 to
# 2e-6.
BOUND = 2e-5
_ROWS, _LENGTH = 2, 48
# Modules whose weights transformers' mixers with a state read without calling them.
_READ_BY_PARENT = ("conv1d", "dt_proj")


@dataclass(frozen=True)
class LogitComparison:
    """The result of the check. difference: the largest absolute difference of a logit; largest: the largest
    absolute logit; length: number of tokens of each row."""

    difference: float
    largest: float
    length: int

    @property
    def bound(self) -> float:
        return BOUND * max(1.0, self.largest)

    def __str__(self) -> str:
        return (
            f"largest logit difference to transformers {self.difference:.2e} (bound {self.bound:.1e}, largest logit "
            f"{self.largest:.2f}, {_ROWS} x {self.length} tokens, fp32)"
        )


def compare_logits(
    folder: HFFolder, args: NeoXArgs, weights: Callable[[int], Mapping[str, Tensor]], vocab_size: int
) -> LogitComparison:
    """Compare the logits that transformers computes from `folder` with those of our model.

    Raises CheckpointError when the difference is above the bound, and where the folder's logits are NaN or
    Inf.

    weights: whole tensors of a NeoX layer of ours, as stored. vocab_size: logits that both have.
    """
    length = min(_LENGTH, args.max_position_embeddings)
    tokens = torch.randint(0, vocab_size, (_ROWS, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        reference_logits = transformers_logits(folder, tokens)[..., :vocab_size]
        ours = our_logits(args, weights, tokens)[..., :vocab_size]
        if args.score_head:
            ours = ours[:, -1]
    if not reference_logits.isfinite().all():
        broken = [name for name in folder.shapes if not folder.get(name).isfinite().all()]
        named = f"{', '.join(broken[:3])}{f' and {len(broken) - 3} more tensors' if len(broken) > 3 else ''}"
        raise CheckpointError(
            f"{folder.origin}: NaN or Inf in {named or 'the logits of finite weights'}: a broken model, whoever "
            "computes it; take an earlier checkpoint"
        )
    difference = (ours - reference_logits).abs().max().item()
    comparison = LogitComparison(difference, reference_logits.abs().max().item(), length)
    if not difference <= comparison.bound:  # NaN too
        raise CheckpointError(f"{folder.origin}: is not the same model: {comparison}")
    return comparison


def plain_args(args: NeoXArgs) -> NeoXArgs:
    """The configuration of the same model in one process, in fp32, on the CPU; experts take all tokens."""
    return args.replace(
        model_parallel_size=1, pipe_parallel_size=1, precision="fp32", fp16=None, bf16=None, sequence_parallel=False,
        compile=False, attention_backend="math", checkpoint_activations=False, expert_parallel_size=1,
        moe_expert_capacity_factor=None,
        train_batch_size=None, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=None,
    )  # fmt: skip


def our_logits(args: NeoXArgs, weights: Callable[[int], Mapping[str, Tensor]], tokens: Tensor) -> Tensor:
    """The logits of our model, `[batch, seq, padded vocabulary]` fp32. weights: as of `compare_logits`."""
    args = plain_args(args)
    stage = build_stage(args, ParallelGroups.single(torch.device("cpu"))).eval()

    def load(layer: int) -> Callable[[str], Tensor]:
        return weights(layer).__getitem__

    for spec in stage.specs:
        tied, module = isinstance(spec, HeadSpec) and spec.tied, stage.layers[str(spec.index)]
        if any(True for _ in module.parameters()):  # norms may have none
            _lend(module, partial(load, 0 if tied else spec.index))
    out = stage(None, Batch(tokens, tokens, torch.ones_like(tokens)))
    return out.transpose(0, 1)


def transformers_logits(folder: HFFolder, tokens: Tensor) -> Tensor:
    """The logits of the class that transformers has for config.json, `[batch, seq, vocabulary]` fp32; of a
    reward model the scores of the last tokens, `[batch, 1]`.

    No code of the folder is run. Raises CheckpointError where transformers cannot build the model.
    """
    transformers: Any
    try:
        import transformers
    except ModuleNotFoundError:
        raise CheckpointError("the check of the result needs transformers (pip install transformers)") from None
    try:
        # The kernel for experts, which else is transformers 5's choice, does not take all sizes.
        config = transformers.AutoConfig.for_model(**{**_numbers(folder.config), "experts_implementation": "eager"})
        scores = gives_score(folder.config)
        auto = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
        with _without_weights():
            model = auto.from_config(
                config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
            ).eval()
        if scores:
            model.config.pad_token_id = -1  # none of the tokens
    except (OSError, ValueError, TypeError, KeyError) as problem:
        raise CheckpointError(f"{folder.origin}: transformers cannot build this model ({problem})") from problem
    # transformers 5 calls GPT-NeoX's head otherwise in memory than in files
    family = FAMILIES[family_of(folder.config)]
    names: dict[int, list[str]] = {}  # of one parameter, tied ones have several
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for path, module in model.named_modules():
        for buffer_name, buffer in module._buffers.items():  # those that files hold, as the biases of routers
            known = family.stored_names(f"{path}.{buffer_name}", 1)[0]
            if buffer is not None and known and known[0] in folder.shapes:
                module._buffers[buffer_name] = folder.get(known[0]).float()
        if not module._parameters:
            continue
        stored: dict[str, list[list[str]]] = {}
        for param_name, param in module._parameters.items():
            if param is None:
                continue
            known = names[id(param)] + ([family.head] if module is model.get_output_embeddings() else [])
            parts = [[[name]] for name in known if name in folder.shapes]
            parts += [family.stored_names(name, len(param)) for name in known]
            if not all(name in folder.shapes for each in parts[0] for name in each) or not parts[0][0]:
                raise CheckpointError(f"{folder.origin}: transformers wants {path}.{param_name}, which is not there")
            stored[param_name] = parts[0]
        parent, _, own = path.rpartition(".")
        reader = model.get_submodule(parent) if own in _READ_BY_PARENT else module
        _lend(module, partial(_stored, folder, stored), alone=True, reader=reader)
    return model(tokens, use_cache=False).logits


def _numbers(value: Any) -> Any:
    """A value of config.json with numbers in the place of what transformers 5 writes for infinite ones,
    `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping):
        return float(value["__float__"]) if "__float__" in value else {key: _numbers(one) for key, one in value.items()}
    return [_numbers(one) for one in value] if isinstance(value, list) else value


def _stored(folder: HFFolder, names: Mapping[str, list[list[str]]]) -> Callable[[str], Tensor]:
    return lambda own: _assembled(folder, names[own])


def _assembled(folder: HFFolder, names: list[list[str]]) -> Tensor:
    """A tensor of the folder; or of several experts `[experts, rows, columns]` in fp32, the rows of each
    being those of its tensors, of which one at a time is in memory beside the result."""
    if len(names) == 1 and len(names[0]) == 1:
        return folder.get(names[0][0])
    rows = [folder.shapes[name][0] for name in names[0]]
    whole = torch.empty(len(names), sum(rows), folder.shapes[names[0][0]][1])
    for of_expert, matrix in zip(names, whole, strict=True):
        for name, part in zip(of_expert, matrix.split(rows), strict=True):
            part.copy_(folder.get(name))
    return whole


@contextmanager
def _without_weights() -> Iterator[None]:
    """Within the context modules are built with parameters that have no memory; their buffers are real."""

    def on_meta(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        if param.is_meta:
            return None  # tied to another, or made again
        return nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _lend(
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
