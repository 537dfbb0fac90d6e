"""FLOPs of each HuggingFace family beside torch's own counter over the model of `transformers`."""

from collections.abc import Sequence

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.checkpointing.families.convert import from_hf
from megatron.model import block_specs, layer_params, prediction_specs
from megatron.model.layer_products import mixing_products
from megatron.model.specs import AttentionSpec, GatedDeltaNetSpec, Mamba2Spec, MambaSpec, MixerSpec
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import language_modelling
from megatron.training.metrics.flops import model_flops
from tests.checkpointing.family_models import CASES, VOCAB, on_disk, random_model
from tests.marks import with_more
from tests.model.stages import make_stage, random_batch, random_weights

ROWS, SEQ = 2, 16
ORDINARY = ("gpt_neox", "llama 3", "gemma 3", "qwen 3 moe", "gpt oss", "mixtral", "phi 3", "deepseek 3")
# Families with scans, of which the counter sees the matrix products that transformers runs.
STATES = ("mamba", "falcon mamba", "nemotron h", "qwen 3 next", "qwen 3.5", "kimi linear", "lfm 2", "granite 4")
FAMILIES = [case for case in CASES if not case.startswith(STATES)]
SCANNING = [case for case in CASES if case.startswith(STATES)]
CHUNK = 64  # of transformers' delta rules


@pytest.mark.parametrize("case", with_more(FAMILIES, *(case for case in FAMILIES if case not in ORDINARY)))
def test_flops_are_those_of_torchs_counter(case: str) -> None:
    model = random_model(case).train()
    config, tensors = on_disk(model)
    keys, _ = from_hf(config, tensors.__getitem__, padded_vocab_size=VOCAB)
    sizes = {"padded_vocab_size": VOCAB, "seq_length": SEQ, "train_micro_batch_size_per_gpu": ROWS, "precision": "fp32"}
    args = NeoXArgs.from_dict({**keys, **sizes}).for_world(1)
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    mixers = [spec.mixer for spec in block_specs(args)]
    assert all(isinstance(mixer, AttentionSpec) for mixer in mixers)
    attention = [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]
    widths = sum(mixer.heads * (mixer.head_dim + mixer.value_dim) for mixer in attention)
    square = 6 * ROWS * SEQ**2 * widths  # two products forward, four backward; causality leaves half
    assert model_flops(args) == pytest.approx(counter.get_total_flops() - square / 2, rel=1e-3)


def counted_products(mixer: MixerSpec | None) -> float:
    """Multiplications of a token in a mixer's products, as transformers runs them: full squares."""
    match mixer:
        case AttentionSpec():
            return CHUNK * mixer.heads * (mixer.head_dim + mixer.value_dim)
        case GatedDeltaNetSpec():  # keys with keys and with queries, scores with changes; into and out of the state
            pairs = CHUNK * mixer.heads * (2 * mixer.key_dim + mixer.value_dim)
            return pairs + 3 * mixer.heads * mixer.key_dim * mixer.value_dim
        case MambaSpec():
            return mixer.inner * mixer.state  # out of the state
    return 0.0


def uncounted_products(mixer: MixerSpec | None) -> float:
    """Multiplications that `model_flops` counts besides, less those that causality leaves out."""
    match mixer:
        case AttentionSpec():
            return -counted_products(mixer) / 2
        case GatedDeltaNetSpec():  # a triangular system has no product
            system = mixer.heads * (mixer.key_dim + mixer.value_dim)
            shared = 2 * (mixer.heads - mixer.key_heads) * mixer.key_dim
            return CHUNK / 2 * (system - shared - mixer.heads * (2 * mixer.key_dim + mixer.value_dim))
        case MambaSpec():
            return 2 * mixer.inner * mixer.state
    return 0.0


@pytest.mark.parametrize("case", with_more(SCANNING, *(case for case in SCANNING if case not in STATES)))
def test_flops_of_families_with_scans(case: str) -> None:
    """Forward, in one chunk: products with weights, convolutions, and products that transformers runs.

    Backward has twice as many, as test_flops.py shows with this project's scans.
    """
    model = random_model(case).eval()
    config, tensors = on_disk(model)
    keys, _ = from_hf(config, tensors.__getitem__, padded_vocab_size=VOCAB)
    sizes = {"padded_vocab_size": VOCAB, "seq_length": CHUNK, "max_position_embeddings": CHUNK, "precision": "fp32"}
    args = NeoXArgs.from_dict({**keys, **sizes, "train_micro_batch_size_per_gpu": ROWS}).for_world(1)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.randint(0, VOCAB, (ROWS, CHUNK)), use_cache=False)
    flops = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    mixers, multiplications = [spec.mixer for spec in block_specs(args)], 2 * ROWS * CHUNK
    # A convolution also has columns behind the row's end, which are cut off.
    [kernel] = {spec.shape[-1] for params in layer_params(args).values() for spec in params if "conv1d.w" in spec.name}
    convolutions = flops["aten.convolution"] * CHUNK / (CHUNK + kernel - 1)
    with_weights = flops["aten.mm"] + flops.get("aten.addmm", 0) + convolutions
    mixing = sum(mixing_products(mixer, CHUNK) for mixer in mixers)
    assert with_weights == pytest.approx(model_flops(args) / 3 - multiplications * mixing, rel=1e-3)
    if not any(isinstance(mixer, Mamba2Spec) for mixer in mixers):  # which transformers runs without products
        assert flops["aten.bmm"] == multiplications * sum(map(counted_products, mixers))
        counted_flops = with_weights + flops["aten.bmm"]
        assert model_flops(args) / 3 == pytest.approx(
            counted_flops + multiplications * sum(map(uncounted_products, mixers)), rel=1e-3
        )


def _grouped_flops(x: Sequence[int], matrices: Sequence[int], *_: object, **__: object) -> int:
    """FLOPs of products of the experts' rows: with matrices `[experts, in, out]`, or with rows' gradients."""
    return 2 * x[0] * x[1] * matrices[-1]


def test_flops_of_deepseek_3_with_multi_token_prediction() -> None:
    """transformers' model has none, so that the counter counts this project's."""
    config, tensors = on_disk(random_model("deepseek 3"))
    keys, _ = from_hf(config, tensors.__getitem__, padded_vocab_size=VOCAB)
    sizes = {"padded_vocab_size": VOCAB, "seq_length": SEQ, "train_micro_batch_size_per_gpu": ROWS, "precision": "fp32"}
    args = NeoXArgs.from_dict({**keys, **sizes, "mtp_num_layers": 2, "attention_backend": "math"}).for_world(1)
    stage, batch = make_stage(args, random_weights(args)).train(), random_batch(args, rows=ROWS)
    objective = language_modelling(mtp_layers=2, mtp_factor=0.5)
    operators = torch.ops.megatron.grouped_mm, torch.ops.megatron.grouped_mm_weights
    experts = {operator: _grouped_flops for operator in operators}
    with FlopCounterMode(display=False, custom_mapping=experts) as counter:
        stage(None, batch, lambda head: objective.loss_sum(head, batch, None)[0]).backward()
    flops = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    mixers = [spec.mixer for spec in (*block_specs(args), *prediction_specs(args))]
    widths = sum(
        mixer.heads * (mixer.head_dim + mixer.value_dim) for mixer in mixers if isinstance(mixer, AttentionSpec)
    )
    square = 6 * ROWS * SEQ**2 * widths
    assert flops["aten.bmm"] == pytest.approx(square)
    assert model_flops(args) == pytest.approx(counter.get_total_flops() - square / 2, rel=1e-3)
