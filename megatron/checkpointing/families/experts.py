"""Describes experts and routers for all families that have them: tensor names, config.json fields."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import get
from megatron.checkpointing.families.family import UP_GATE, Config, Family, TensorMapping
from megatron.checkpointing.families.llama import replaced_rows
from megatron.neox_arguments import ModelArgs

_BLOCK = "model.layers.{}."
_FUSED = _BLOCK + "mlp.experts."  # in transformers 5's memory, one tensor holds all experts


def expert_rows(block: str, gate: str, up: str, down: str) -> tuple[TensorMapping, ...]:
    """Returns the tensor mappings of a block's router and experts.

    block: HuggingFace's prefix of the block's names. gate, up, down: names of an expert's matrices."""
    matrix = f"{block}experts.{{expert}}."
    return (
        TensorMapping("mlp.router.layer.weight", (f"{block}gate.weight",)),
        TensorMapping("mlp.experts.mlp.w1", (f"{matrix}{gate}.weight",)),
        TensorMapping("mlp.experts.mlp.w3", (f"{matrix}{up}.weight",)),
        TensorMapping("mlp.experts.mlp.w2", (f"{matrix}{down}.weight",), transposed=True),
    )


def experts_in_memory(block: str, gate: str, up: str, down: str, fused: str = _FUSED) -> dict[str, tuple[str, ...]]:
    """Returns `Family.in_memory`: {name of a stacked tensor in memory: names of each expert's tensors in
    files}.

    block: HuggingFace's prefix of the block's names. gate, up, down: names of an expert's matrices. fused:
        prefix of the stacked tensors."""
    matrix = f"{block}experts.{{expert}}."
    return {
        f"{fused}gate_up_proj": (f"{matrix}{gate}.weight", f"{matrix}{up}.weight"),
        f"{fused}down_proj": (f"{matrix}{down}.weight",),
    }


_MIXTRAL = (_BLOCK + "block_sparse_moe.", "w1", "w3", "w2")
_QWEN = (_BLOCK + "mlp.", "gate_proj", "up_proj", "down_proj")
_SHARED = _BLOCK + "mlp.shared_expert."
MIXTRAL_ROWS = replaced_rows(*expert_rows(*_MIXTRAL))
MIXTRAL_IN_MEMORY = {
    _BLOCK + "mlp.gate.weight": (_BLOCK + "block_sparse_moe.gate.weight",), **experts_in_memory(*_MIXTRAL)
}  # fmt: skip
# For Qwen and OLMo, whose models may also have dense blocks.
EXPERT_ROWS = replaced_rows(
    *expert_rows(*_QWEN),
    TensorMapping(
        "mlp.shared_expert.linear1.weight", (f"{_SHARED}up_proj.weight", f"{_SHARED}gate_proj.weight"), UP_GATE
    ),
    TensorMapping("mlp.shared_expert.linear2.weight", (f"{_SHARED}down_proj.weight",)),
    TensorMapping("mlp.shared_expert_gate.weight", (_BLOCK + "mlp.shared_expert_gate.weight",)),
)
EXPERTS_IN_MEMORY = experts_in_memory(*_QWEN)


def deepseek_rows(block: str, gate: str, up: str, down: str) -> tuple[TensorMapping, ...]:
    """Returns the tensor mappings of DeepSeek's experts: chosen by scores plus biases, beside shared ones.

    block: HuggingFace's prefix of the block's names. gate, up, down: names of an expert's matrices."""
    shared = f"{block}shared_experts."
    return (
        *expert_rows(block, gate, up, down),
        TensorMapping("mlp.router.expert_bias", (f"{block}gate.e_score_correction_bias",)),
        TensorMapping(
            "mlp.shared_expert.linear1.weight", (f"{shared}up_proj.weight", f"{shared}gate_proj.weight"), UP_GATE
        ),
        TensorMapping("mlp.shared_expert.linear2.weight", (f"{shared}down_proj.weight",)),
    )


DEEPSEEK_ROWS = deepseek_rows(*_QWEN)


class ExpertRows(NamedTuple):
    """The place of an expert's matrix: the rows `rows` of number `expert` in the stacked tensor `stored`."""

    stored: str
    expert: int
    rows: slice


def rows_of_experts(family: Family, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ExpertRows]:
    """Returns the place of each expert's matrix in a folder with stacked experts, by the matrix's usual name.

    transformers 5 stacks all experts of a block in memory, and in files written with
    `save_original_format=False`. shapes: of the folder's tensors, by name."""
    matrices = {}
    for name, shape in shapes.items():
        if len(shape) == 3 and family.stacks_experts(name):
            for expert, names in enumerate(family.stored_names(name, shape[0])):
                high = shape[1] // max(1, len(names))
                for i, matrix_name in enumerate(names):
                    matrices[matrix_name] = ExpertRows(name, expert, slice(i * high, (i + 1) * high))
    return matrices


def expert_keys(config: Config, defaults: Config) -> dict[str, Any]:
    """Returns the NeoX configuration keys for experts, routing and the load-balancing loss.

    As in transformers, the loss is used only if output_router_logits is true. It is computed over a
    micro-batch and all layers together. defaults: of the family's HuggingFace configuration class. Raises
    CheckpointError for a model without experts."""
    field = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    experts = get(config, field, defaults.get("num_experts"))
    if experts is None or experts < 2:
        raise CheckpointError(f"config.json: {field}: {experts}; a model with experts has 2 or more")
    keys = {
        "moe_num_experts": experts,
        "moe_top_k": get(config, "num_experts_per_tok", defaults.get("num_experts_per_tok")),
        "moe_router_type": "topk",
        "norm_topk_prob": get(config, "norm_topk_prob", False),
    }
    coefficient = get(config, "router_aux_loss_coef", defaults["router_aux_loss_coef"])
    if get(config, "output_router_logits", False) and coefficient:
        keys |= {"moe_aux_loss_coeff": coefficient, "moe_aux_loss_scope": "transformers"}
    return keys


def expert_config(args: ModelArgs, number: str = "num_experts") -> dict[str, Any]:
    """Returns config.json's fields for experts, the inverse of `expert_keys`.

    A load-balancing loss that transformers cannot compute is left out. number: the field that holds the
    number of experts."""
    balanced = args.moe_aux_loss_scope == "transformers" and args.moe_aux_loss_coeff > 0.0
    return {
        number: args.moe_num_experts,
        "num_experts_per_tok": args.moe_top_k,
        "norm_topk_prob": args.norm_topk_prob,
        "output_router_logits": balanced,
        **({"router_aux_loss_coef": args.moe_aux_loss_coeff} if balanced else {}),
    }
