"""FLOPs of each HuggingFace family beside torch's own counter over the model of `transformers`."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.checkpointing.families.convert import from_hf
from megatron.model import block_specs
from megatron.model.specs import AttentionSpec
from megatron.neox_arguments import NeoXArgs
from megatron.training.metrics.flops import model_flops
from tests.checkpointing.family_models import CASES, VOCAB, on_disk, random_model
from tests.marks import with_more

ROWS, SEQ = 2, 16
ORDINARY = ("gpt_neox", "llama 3", "gemma 3", "qwen 3 moe", "gpt oss", "mixtral", "phi 3", "deepseek 3")
# The counter knows no scans; test_flops.py has their products by hand.
STATES = ("mamba", "falcon mamba", "nemotron h", "qwen 3 next", "qwen 3.5", "kimi linear", "lfm 2", "granite 4")
FAMILIES = [case for case in CASES if not case.startswith(STATES)]


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
