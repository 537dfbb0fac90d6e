"""The model as a list of layers, and the weight map: every parameter's name, full shape, sharding and
initialisation.

Initialisation, saving, loading, conversion and resharding read this table. Names are those of GPT-NeoX's
per-layer checkpoint files: layer 0 is the embedding, 2 to N + 1 the blocks, N + 3 the final norm, N + 4 the
output layer (untied head or score). A tied head has no parameter in layer N + 4. Layers from N + 5 on are the
blocks of multi-token prediction, which GPT-NeoX lacks.
"""

from dataclasses import replace
from typing import Any

from megatron.model.block import FEED_FORWARDS, MIXERS, Block, sublayer_spec
from megatron.model.build_specs import block_norms, embedding_spec, norm_spec, residual_form
from megatron.model.embedding import Embedding
from megatron.model.head import FinalNorm, Head, ScoreHead
from megatron.model.norms import NORMS
from megatron.model.prediction import PredictionBlock
from megatron.model.specs import (
    AttentionSpec,
    BlockSpec,
    FinalNormSpec,
    HeadSpec,
    LayerSpec,
    MixerSpec,
    PredictionSpec,
    ScoreSpec,
)
from megatron.mpu import ParamSpec, with_prefix
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.values.lora_settings import copied_modules


def layer_specs(args: ModelArgs) -> tuple[LayerSpec, ...]:
    """Returns the specs of the full model's layers, in execution order."""
    last = args.num_layers + 1
    blocks = []
    for i in range(args.num_layers):
        mixer, feed_forward = sublayer_spec(MIXERS, args, i), sublayer_spec(FEED_FORWARDS, args, i)
        blocks.append(
            BlockSpec(
                i + 2, mixer, feed_forward, block_norms(args, i), residual_form(args, i), args.hidden_dropout,
                args.residual_multiplier, args.layer_scalar,
            )
        )  # fmt: skip
    head: LayerSpec = HeadSpec(
        last + 3, args.hidden_size, args.padded_vocab_size, tied=not args.no_weight_tying,
        copied="lm_head" in copied_modules(args) if args.no_weight_tying else "embed_tokens" in copied_modules(args),
        softcap=args.final_logit_softcapping,
    )  # fmt: skip
    norm = FinalNormSpec(last + 2, norm_spec(args), args.logit_scale)
    if args.score_head:  # reads the norm's output without multiplier, as transformers' classes do
        head, norm = ScoreSpec(last + 3, args.hidden_size), replace(norm, multiplier=1.0)
    embedding, predictions = embedding_spec(args), []
    for i in range(args.mtp_num_layers or 0):  # each like the last block
        fields = {**vars(blocks[-1]), "index": last + 4 + i}
        predictions.append(
            PredictionSpec(
                **fields, input_norm=norm_spec(args), final_norm=norm.norm, final_multiplier=norm.multiplier,
                embedding=embedding,
            )
        )  # fmt: skip
    return (embedding, *blocks, norm, *predictions, head)


def block_specs(args: ModelArgs) -> tuple[BlockSpec, ...]:
    """Returns the specs of the full model's blocks, in execution order, without those of multi-token
    prediction."""
    return tuple(spec for spec in layer_specs(args) if spec.kind == "block")  # type: ignore[misc]


def prediction_specs(args: ModelArgs) -> tuple[PredictionSpec, ...]:
    """Returns the specs of the blocks of multi-token prediction, in execution order."""
    return tuple(spec for spec in layer_specs(args) if isinstance(spec, PredictionSpec))


def block_number(args: ModelArgs, layer: int) -> int | None:
    """Returns the number of the block with NeoX layer index `layer`, counted from 0; None for other layers.

    Blocks of multi-token prediction follow the others, as in HuggingFace's files.
    """
    if 2 <= layer < args.num_layers + 2:
        return layer - 2
    return layer - 5 if 0 <= layer - args.num_layers - 5 < (args.mtp_num_layers or 0) else None


def mixer_of(args: ModelArgs, layer: int) -> MixerSpec | None:
    """Returns the mixer of the block with NeoX layer index `layer`; None for other layers, or without one."""
    number = block_number(args, layer)
    if number is None:
        return None
    mixer: MixerSpec | None = sublayer_spec(MIXERS, args, min(number, args.num_layers - 1))
    return mixer


def attention_of(args: ModelArgs, layer: int) -> AttentionSpec | None:
    """Returns the attention of the block with NeoX layer index `layer`; None for other layers and mixers."""
    mixer = mixer_of(args, layer)
    return mixer if isinstance(mixer, AttentionSpec) else None


def layer_params(args: ModelArgs) -> dict[int, tuple[ParamSpec, ...]]:
    """Returns the parameters of each layer, by NeoX layer index. A tied head, which has none, is left out.

    `args.padded_vocab_size` must be known.
    """
    kinds: dict[str, Any] = {
        "embedding": Embedding, "block": Block, "prediction": PredictionBlock, "norm": FinalNorm, "head": Head,
        "score": ScoreHead,
    }  # fmt: skip
    params_by_layer: dict[int, tuple[ParamSpec, ...]] = {}
    distinct_specs: list[LayerSpec] = []  # most blocks differ from an earlier one only in their index
    for spec in layer_specs(args):
        equal_specs = (earlier for earlier in distinct_specs if replace(earlier, index=spec.index) == spec)
        if (equal_spec := next(equal_specs, None)) is not None:
            params_by_layer[spec.index] = params_by_layer[equal_spec.index]
        else:
            params_by_layer[spec.index] = kinds[spec.kind].params(spec)
            distinct_specs.append(spec)
    layers = sorted(params_by_layer.items())
    return {layer: specs for layer, specs in layers if specs or layer <= args.num_layers + 3}


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is trained while base weights are frozen (`lora`).

    This holds for parameters of adapters, trained copies of weights, and the score head of a reward model.
    """
    return ".lora." in name or name.endswith(".modules_to_save") or name == "rm_linear.weight"


def may_be_wide(name: str) -> bool:
    """Whether a parameter of this name may be fp32 beside 16-bit weights.

    These are the parameters whose `ParamSpec` is precise or not trained.
    """
    return name.endswith(("mixer.A_log", "mixer.D", "router.expert_bias", "layer_scalar"))


def base_params(args: ModelArgs) -> dict[int, tuple[ParamSpec, ...]]:
    """Returns the parameters of the model without adapters and trained copies, by NeoX layer index."""
    return layer_params(args) if args.lora is None else layer_params(replace(args, lora=None))


def adapter_params(args: ModelArgs) -> dict[int, tuple[ParamSpec, ...]]:
    """Returns the parameters that `lora` trains (adapters, trained copies, a score head), by NeoX layer
    index.

    Layers without any are left out.
    """
    adapters = {i: tuple(p for p in specs if is_adapter(p.name)) for i, specs in layer_params(args).items()}
    return {layer: specs for layer, specs in adapters.items() if specs}


def named_params(args: ModelArgs) -> dict[tuple[int, str], ParamSpec]:
    """Returns the spec of each parameter of the full model, by (NeoX layer index, name)."""
    return {(layer, spec.name): spec for layer, specs in layer_params(args).items() for spec in specs}


def shared_params(args: ModelArgs) -> dict[str, int]:
    """Returns the names of the parameters that all blocks share, each with the NeoX index of the first block,
    which owns it."""
    owners: dict[str, int] = {}
    for (layer, name), spec in named_params(args).items():
        if spec.shared:
            owners.setdefault(name, layer)
    return owners


def unused_params(args: ModelArgs, layer: int) -> tuple[ParamSpec, ...]:
    """Returns the norms of a layer that GPT-NeoX saves but never uses. Checkpoints hold their initial values.

    layer: NeoX's layer index.
    """
    if not 2 <= layer < args.num_layers + 2 or residual_form(args, layer - 2) == "single":
        return ()
    norm, norms_in_use = norm_spec(args), block_norms(args, layer - 2)
    names = [name for name in ("input_layernorm", "post_attention_layernorm") if name not in norms_in_use]
    return tuple(param for name in names for param in with_prefix(name, NORMS[norm.kind].params(norm)))
