"""Every loss against TRL 1.16: value, gradient of every weight, and metrics; padded and packed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.data import Batch
from megatron.data.preferences.responses import batch_responses, with_responses
from megatron.model import Stage, layer_params
from megatron.neox_arguments import NeoXArgs
from megatron.training.method import build_objective
from tests.model.stages import Weights, gradients, make_stage, small
from tests.objectives.cases import ANSWERS, MISMATCHED, PAIRS, VOCAB, documents_of, in_rows
from tests.objectives.steps import Forward, arrays, assert_step, facts, forward_of, scores, step_loss

PAIRWISE = {"train_impl": "dpo", "dataset_impl": "pairwise", "pack_impl": "unpacked", "pos_train_data_paths": ["pos"],
            "neg_train_data_paths": ["neg"]}  # fmt: skip
CASES = facts("trl")


def tiny_args(**keys: Any) -> NeoXArgs:
    return small(hidden_size=16, num_attention_heads=2, num_kv_heads=2, norm="rmsnorm", rms_norm_epsilon=1e-5,
                 activation="swiglu", intermediate_size=24, padded_vocab_size=VOCAB, no_weight_tying=True,
                 use_bias_in_attn_linear=False, use_bias_in_mlp=False, max_position_embeddings=64, **keys)  # fmt: skip


def unflat(args: NeoXArgs, values: np.ndarray) -> Weights:
    weights: Weights = {}
    offset = 0
    for layer, specs in sorted(layer_params(args).items()):
        for spec in sorted(specs, key=lambda spec: spec.name):
            count = int(np.prod(spec.shape))
            weights.setdefault(layer, {})[spec.name] = torch.from_numpy(values[offset : offset + count]).view(
                spec.shape
            )
            offset += count
    assert offset == len(values)
    return weights


def keys_of_case(case: dict[str, Any]) -> dict[str, Any]:
    kind, loss = case["kind"], case.get("loss_type")
    if kind == "kto":
        return {"train_impl": "kto", "kto_loss_type": loss, "kto_beta": case["beta"],
                "kto_desirable_weight": case["desirable_weight"], "kto_undesirable_weight": case["undesirable_weight"],
                "pack_impl": "unpacked"}  # fmt: skip
    keys: dict[str, Any] = {**PAIRWISE, "dpo_beta": case["beta"]}
    if case.get("label_smoothing"):
        keys["dpo_label_smoothing"] = case["label_smoothing"]
    if kind == "dpo":
        return {**keys, "dpo_loss_type": loss, "dpo_loss_weights": case.get("loss_weights")}
    if kind == "orpo":
        return {**keys, "dpo_loss_type": "orpo"}
    if loss == "simpo":
        return {**keys, "dpo_loss_type": "simpo", "simpo_gamma": case["simpo_gamma"]}
    losses = [loss or "sigmoid", "sft"]
    return {**keys, "dpo_loss_type": losses, "dpo_loss_weights": [1.0, case["cpo_alpha"]], "dpo_reference_free": True}


def stage_of(weights_name: str, file_stem: str = "trl", **keys: Any) -> Stage:
    """The script's model with its "policy" or "reference" weights."""
    args = tiny_args(**keys)
    return make_stage(args, unflat(args, arrays(file_stem)[weights_name]))


def kto_batches(packed: bool) -> list[Batch]:
    documents = [(prompt, answer) for prompt, answer, _ in ANSWERS]
    signs = [1.0 if good else -1.0 for _, _, good in ANSWERS]
    if packed:
        examples = in_rows(documents, [[2, 0], [4, 1, 3]], 40, signs + [0.0])
        return [with_responses(examples, kl_batch=in_rows(MISMATCHED, [[1, 4, 0, 3, 2]], 64, [1.0] * len(MISMATCHED)))]
    first_batch = in_rows(documents[:3], [[0], [1], [2]], 16, signs[:3])
    second_batch = in_rows(documents[3:], [[0], [1]], 16, signs[3:])
    kl_batches = [in_rows(part, [[i] for i in range(len(part))], 16, [1.0] * len(part))
              for part in (MISMATCHED[:1], MISMATCHED[1:])]  # fmt: skip
    return [
        with_responses(batch, kl_batch=kl) for batch, kl in zip((first_batch, second_batch), kl_batches, strict=True)
    ]


def pair_batches(packed: bool) -> list[Batch]:
    """Two micro-batches, of one pair and of three; packed: pairs share rows, one of padding stands last."""
    documents = documents_of(PAIRS)
    if packed:
        return [in_rows(documents, [[4, 5, 0, 1], [6, 7, 2, 3]], 48, [1.0] * 8 + [0.0] * 2)]
    parts = documents[:2], documents[2:]
    return [in_rows(part, [[i] for i in range(len(part))], 16, [1.0] * len(part)) for part in parts]


def lm_batches(packed: bool, assistant_only: bool) -> list[Batch]:
    documents = [(prompt, chosen) for prompt, chosen, _ in PAIRS]
    if not assistant_only:
        documents = [(prompt[:1], prompt[1:] + chosen) for prompt, chosen in documents]
    rows = [[2, 0, 3, 1]] if packed else [[i] for i in range(len(documents))]
    return [in_rows(documents, rows, 48 if packed else 16, [1.0] * len(documents))]


def with_reference(batches: list[Batch], forward: Forward) -> list[Batch]:
    sums = scores(forward, batches)
    scored = [with_responses(batch, reference_logprobs=logprobs) for batch, logprobs in zip(batches, sums, strict=True)]
    return [
        batch if (kl := batch_responses(batch).kl_batch) is None
        else with_responses(batch, kl_batch=with_reference([kl], forward)[0])
        for batch in scored
    ]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", CASES)
def test_value_gradient_and_metrics(name: str, packed: bool) -> None:
    case, policy = CASES[name], stage_of("policy")
    if case["kind"] == "sft":
        keys = {"sft_loss_type": case["loss_type"], "train_data_paths": ["text"], "train_label_data_paths": ["labels"],
                "eval_iters": 0}  # fmt: skip
        batches = lm_batches(packed, case["assistant_only"])
    else:
        keys = keys_of_case(case)
        micro_batches = kto_batches(packed) if case["kind"] == "kto" else pair_batches(packed)
        batches = with_reference(micro_batches, forward_of(stage_of("reference")))
    gradient = arrays("trl")[f"gradient_{name}"]
    metrics = assert_step(build_objective(tiny_args(**keys)), policy, batches, case["loss"], gradient)
    if case["kind"] in ("cpo", "orpo"):  # theirs are of all places, padding included
        metrics = {key: value for key, value in metrics.items() if not key.startswith("logits")}
    if name == "dpo_sft":  # no reference is read for it here
        metrics = {key: value for key, value in metrics.items() if not key.startswith("rewards")}
    shared = set(metrics) & set(case["metrics"])
    required = {"entropy", "mean_token_accuracy"} if case["kind"] == "sft" else {"logps/chosen", "logps/rejected"}
    assert required <= shared
    assert case["kind"] == "sft" or name == "dpo_sft" or "rewards/margins" in shared
    for key in shared:
        assert metrics[key] == pytest.approx(case["metrics"][key], rel=2e-5, abs=1e-6), key


def test_a_likelihood_loss_with_pairs_weighs_tokens_of_the_step() -> None:
    """TRL takes the mean over the chosen tokens of each micro-batch, then the mean of these, ours over the
    step's tokens, whatever the split. One micro-batch at a time, both are the same."""
    trl_arrays = arrays("trl_accumulated")
    trl_loss, trl_gradient = float(trl_arrays["loss"]), torch.from_numpy(trl_arrays["gradient"])
    keys = {"dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 1.0], "dpo_beta": 0.3}
    objective, reference = build_objective(tiny_args(**PAIRWISE, **keys)), stage_of("reference")
    documents = documents_of(PAIRS)
    parts = [in_rows(part, [[i] for i in range(4)], 16, [1.0] * 4) for part in (documents[:4], documents[4:])]

    def step(batches: list[Batch]) -> tuple[float, Tensor]:
        policy = stage_of("policy")
        loss, _ = step_loss(objective, forward_of(policy), with_reference(batches, forward_of(reference)))
        loss.backward()
        grads = gradients(policy)
        return float(loss.detach()), torch.cat([grads[layer, key].flatten() for layer, key in sorted(grads)])

    (first_loss, first_gradient), (second_loss, second_gradient) = step(parts[:1]), step(parts[1:])
    assert (first_loss + second_loss) / 2 == pytest.approx(trl_loss, rel=1e-5)
    largest = float(trl_gradient.abs().max())
    torch.testing.assert_close((first_gradient + second_gradient) / 2, trl_gradient, rtol=1e-4, atol=1e-5 * largest)
    actual, gradient = step(parts)
    assert actual == pytest.approx(step([in_rows(documents, [[i] for i in range(8)], 16, [1.0] * 8)])[0], rel=1e-6)
    assert actual / trl_loss == pytest.approx(1.015, abs=1e-3), "what docs/post-training.md says of these pairs"
    assert float((gradient - trl_gradient).norm() / trl_gradient.norm()) == pytest.approx(0.133, abs=1e-3)


def leaves(value_tree: Any, path: str = "") -> dict[str, Any]:
    """All numbers and words by their paths; of metrics, which change with TRL's versions, none."""
    if not isinstance(value_tree, dict | list):
        return {path: value_tree}
    pairs = value_tree.items() if isinstance(value_tree, dict) else enumerate(value_tree)
    leaf_dicts = [leaves(value, f"{path}/{key}") for key, value in pairs if key != "metrics"]
    return {key: value for leaf_dict in leaf_dicts for key, value in leaf_dict.items()}


@pytest.mark.product
@pytest.mark.parametrize(("script", "files"), [("trl_reference", {"trl", "trl_accumulated", "trl_reward"}),
                                               ("trl_policy", {"trl_policy", "trl_online_dpo"})])  # fmt: skip
def test_trl_still_gives_these_numbers(script: str, files: set[str], tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="pip install trl==1.16.0")
    subprocess.run([sys.executable, "-m", f"tests.objectives.{script}", str(tmp_path)], check=True)
    assert {file.stem for file in tmp_path.iterdir()} == files
    for new_file in tmp_path.glob("*.json"):
        assert leaves(json.loads(new_file.read_text())) == pytest.approx(
            leaves(facts(new_file.stem)), rel=1e-5, abs=1e-6
        )
    for new_file in tmp_path.glob("*.npz"):
        with np.load(new_file) as new_arrays:
            assert set(new_arrays) == set(arrays(new_file.stem))
            for name, values in arrays(new_file.stem).items():
                # fp32 sums cancel to small entries: their error is of the largest one's size (seen: 2e-6).
                atol = 1e-5 * max(1.0, float(np.abs(values).max()))
                np.testing.assert_allclose(new_arrays[name], values, rtol=1e-4, atol=atol)
