"""Three steps of `lora` against peft under TRL's trainers, from the same adapters: texts, and pairs."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from megatron.data import Batch
from megatron.neox_arguments import NeoXArgs
from megatron.training.checkpoint.base_weights import begin_adapters
from megatron.training.reference.model import model_without_adapters
from megatron.training.setup import build_engine
from tests.model.stages import Weights, groups_of
from tests.model.test_transformers import llama_weights
from tests.objectives.test_trl import PAIRWISE, lm_batches, pair_batches, tiny_args
from tests.objectives.trl_reference import ROW, model, pair_inputs, sft_inputs, words
from tests.pool import run_ranks
from tests.training.runs import cells

STEPS, RATE = 3, 1e-2
FORMS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "alpha": 8},
    "rslora": {"r": 4, "alpha": 8, "rslora": True, "target": ["q_proj", "v_proj"]},
    "dora": {"r": 2, "alpha": 4, "dora": True, "target": ["q_proj", "o_proj", "gate_proj", "down_proj"]},
}
NEOX_NAMES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attention.query_key_value"), "o_proj": "attention.dense",
    **dict.fromkeys(("up_proj", "gate_proj"), "mlp.linear1"), "down_proj": "mlp.linear2",
}  # fmt: skip


def torch_steps(params: dict[str, Tensor], loss_of: Callable[[], Tensor]) -> list[float]:
    optimizer, losses = torch.optim.AdamW(params.values(), lr=RATE, weight_decay=0.0), []
    for _ in range(STEPS):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def trl_steps(form: str, kind: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of TRL, adapters at first and at last."""
    lora_keys = FORMS[form]
    peft_config = LoraConfig(
        r=lora_keys["r"], lora_alpha=lora_keys["alpha"], use_rslora=lora_keys.get("rslora", False),
        use_dora=lora_keys.get("dora", False), target_modules=lora_keys.get("target", "all-linear"),
        task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
            "report_to": "none", "disable_tqdm": True,
        }  # fmt: skip
        trainer_keys: dict[str, Any] = {"model": model(1), "processing_class": words(), "peft_config": peft_config}
        trainer_keys["train_dataset"] = Dataset.from_list([ROW if kind == "dpo" else {"text": "a b c"}] * 2)
        if kind == "dpo":
            trainer: Any = DPOTrainer(args=DPOConfig(**common), **trainer_keys)
            inputs = pair_inputs(trainer, kind)
        else:
            trainer = SFTTrainer(args=SFTConfig(**common), **trainer_keys)
            inputs = sft_inputs(trainer, True)
        trainer.model.eval()
        params = {name: param for name, param in trainer.model.named_parameters() if param.requires_grad}
        initial_adapters = {name: param.detach().clone() for name, param in params.items()}
        losses = torch_steps(params, lambda: trainer.compute_loss(trainer.model, inputs))
    return losses, initial_adapters, {name: param.detach().clone() for name, param in params.items()}


def in_our_names(params: dict[str, Tensor]) -> Weights:
    layers: Weights = {}
    for name, value in params.items():
        parts = name.split(".")
        number, module, kind = int(parts[parts.index("layers") + 1]), parts[-4], parts[-3]
        if kind not in ("lora_A", "lora_B"):  # lora_magnitude_vector.default.weight, or without weight
            module, kind = parts[parts.index("lora_magnitude_vector") - 1], "lora_magnitude_vector"
            value = value.flatten()
        layers.setdefault(number + 2, {})[f"{NEOX_NAMES[module]}.lora.{module}.{kind}"] = value
    return layers


Trained = tuple[list[float], Weights]


def trained(args: NeoXArgs, base: Weights, adapters: Weights, batches: list[Batch], pairs: bool = False) -> Trained:
    """Losses of steps on the same batches from these adapters, and the weights after them."""
    engine = build_engine(args, groups_of(args, 1))
    engine.set_weights(base)
    begin_adapters(engine)
    engine.set_weights(
        {n: {k: v for k, v in tensors.items() if "magnitude" not in k} for n, tensors in adapters.items()}
    )
    if pairs:
        engine.use_reference(model_without_adapters(engine))
    losses = [float(engine.train_step(batches, RATE).loss) for _ in range(STEPS)]
    assert (engine.stage.layers["2"].attention.dense.weight.dtype == torch.uint8) is args.quantized
    weights = engine.weights(master=True)
    engine.close()
    return losses, weights


ADAMW: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": RATE}}, "weight_decay": 0.0, "gradient_clipping": 0.0,
    "train_iters": STEPS,
}  # fmt: skip


def neox_steps(rank: int, world_size: int, kind: str, *model_inputs: Any) -> list[Trained]:
    """For the pool: on rows with padding, and on packed ones."""
    results = []
    for packed in (False, True):
        lora, base, adapters = model_inputs
        preference = {**PAIRWISE, "pack_impl": "best_fit"} if packed else PAIRWISE
        optimizer_keys = ADAMW | (preference if kind == "dpo" else {})
        args = tiny_args(lora=lora, train_micro_batch_size_per_gpu=4, **optimizer_keys).for_world(1)
        batches = pair_batches(packed) if kind == "dpo" else lm_batches(packed, True)
        results.append(trained(args, base, adapters, batches, kind == "dpo"))
    return results


def assert_adapters(weights: Weights, params: dict[str, Tensor]) -> None:
    for layer, values in in_our_names(params).items():
        for name, value in values.items():
            torch.testing.assert_close(weights[layer][name], value.detach(), atol=2e-5, rtol=1e-4)


def in_our_weights(state: dict[str, Tensor], *heads: int) -> Weights:
    return {
        layer: {name.replace("norm.weight", "norm.scale"): value for name, value in tensors.items()}
        for layer, tensors in llama_weights(state, *heads).items()
    }


@pytest.mark.parametrize(("form", "kind"), cells(
    [("lora", "dpo"), ("dora", "sft")], [("rslora", "sft"), ("dora", "dpo")], [("lora", "sft"), ("rslora", "dpo")]
))  # fmt: skip
def test_three_steps(form: str, kind: str) -> None:
    expected_losses, initial_adapters, last = trl_steps(form, kind)
    base = in_our_weights({name: value.detach() for name, value in model(1).state_dict().items()}, 2, 2)
    for losses, weights in run_ranks(neox_steps, 1, kind, FORMS[form], base, in_our_names(initial_adapters))[0]:
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        if kind == "dpo":
            assert losses[0] == pytest.approx(0.6931472, abs=1e-6)
        assert_adapters(weights, last)
