"""Every loss against TRL 1.16: value, gradient of every weight, and metrics; padded and packed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.data import Batch
from megatron.model import Stage, layer_params
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import build_objective
from tests.model.stages import Weights, gradients, small, stage_with
from tests.objectives.cases import ANSWERS, MISMATCHED, PAIRS, VOCAB, documents_of, in_rows
from tests.objectives.steps import Forward, arrays, assert_step, facts, forward_of, scores, step_loss

PAIRWISE = {"train_impl": "dpo", "dataset_impl": "pairwise", "pack_impl": "unpacked", "pos_train_data_paths": ["pos"],
            "neg_train_data_paths": ["neg"]}  # fmt: skip
CASES = facts("trl")


def args_with(**keys: Any) -> NeoXArgs:
    return small(hidden_size=16, num_attention_heads=2, num_kv_heads=2, norm="rmsnorm", rms_norm_epsilon=1e-5,
                 activation="swiglu", intermediate_size=24, padded_vocab_size=VOCAB, no_weight_tying=True,
                 use_bias_in_attn_linear=False, use_bias_in_mlp=False, max_position_embeddings=64, **keys)  # fmt: skip


def unflat(args: NeoXArgs, values: np.ndarray) -> Weights:
    weights: Weights = {}
    at = 0
    for layer, specs in sorted(layer_params(args).items()):
        for spec in sorted(specs, key=lambda spec: spec.name):
            count = int(np.prod(spec.shape))
            weights.setdefault(layer, {})[spec.name] = torch.from_numpy(values[at : at + count]).view(spec.shape)
            at += count
    assert at == len(values)
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


def stage_of(which: str, kept: str = "trl", **keys: Any) -> Stage:
    """The script's model with its "policy" or "reference" weights."""
    args = args_with(**keys)
    return stage_with(args, unflat(args, arrays(kept)[which]))


def kto_batches(packed: bool) -> list[Batch]:
    documents = [(prompt, answer) for prompt, answer, _ in ANSWERS]
    signs = [1.0 if good else -1.0 for _, _, good in ANSWERS]
    if packed:
        examples = in_rows(documents, [[2, 0], [4, 1, 3]], 40, signs + [0.0])
        return [replace(examples, kl_batch=in_rows(MISMATCHED, [[1, 4, 0, 3, 2]], 64, [1.0] * len(MISMATCHED)))]
    first = in_rows(documents[:3], [[0], [1], [2]], 16, signs[:3])
    second = in_rows(documents[3:], [[0], [1]], 16, signs[3:])
    others = [in_rows(part, [[i] for i in range(len(part))], 16, [1.0] * len(part))
              for part in (MISMATCHED[:1], MISMATCHED[1:])]  # fmt: skip
    return [replace(batch, kl_batch=kl) for batch, kl in zip((first, second), others, strict=True)]


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
    scored = [replace(batch, reference_logprobs=each) for batch, each in zip(batches, sums, strict=True)]
    return [batch if batch.kl_batch is None else replace(batch, kl_batch=with_reference([batch.kl_batch], forward)[0])
            for batch in scored]  # fmt: skip


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
        made = kto_batches(packed) if case["kind"] == "kto" else pair_batches(packed)
        batches = with_reference(made, forward_of(stage_of("reference")))
    gradient = arrays("trl")[f"gradient_{name}"]
    metrics = assert_step(build_objective(args_with(**keys)), policy, batches, case["loss"], gradient)
    if case["kind"] in ("cpo", "orpo"):  # theirs are of all places, padding included
        metrics = {key: value for key, value in metrics.items() if not key.startswith("logits")}
    if name == "dpo_sft":  # no reference is read for it here
        metrics = {key: value for key, value in metrics.items() if not key.startswith("rewards")}
    shared = set(metrics) & set(case["metrics"])
    least = {"entropy", "mean_token_accuracy"} if case["kind"] == "sft" else {"logps/chosen", "logps/rejected"}
    assert least <= shared
    assert case["kind"] == "sft" or name == "dpo_sft" or "rewards/margins" in shared
    for key in shared:
        assert metrics[key] == pytest.approx(case["metrics"][key], rel=2e-5, abs=1e-6), key


def test_a_likelihood_beside_pairs_weighs_tokens_of_the_step() -> None:
    """TRL takes the mean over the chosen tokens of each micro-batch, then the mean of these, ours over the
    step's tokens, whatever the split. One micro-batch at a time, both are the same."""
    made = arrays("trl_accumulated")
    theirs, their_gradient = float(made["loss"]), torch.from_numpy(made["gradient"])
    keys = {"dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 1.0], "dpo_beta": 0.3}
    objective, reference = build_objective(args_with(**PAIRWISE, **keys)), stage_of("reference")
    documents = documents_of(PAIRS)
    parts = [in_rows(part, [[i] for i in range(4)], 16, [1.0] * 4) for part in (documents[:4], documents[4:])]

    def step(batches: list[Batch]) -> tuple[float, Tensor]:
        policy = stage_of("policy")
        loss, _ = step_loss(objective, forward_of(policy), with_reference(batches, forward_of(reference)))
        loss.backward()
        grads = gradients(policy)
        return float(loss.detach()), torch.cat([grads[layer, key].flatten() for layer, key in sorted(grads)])

    (first, one), (second, other) = step(parts[:1]), step(parts[1:])
    assert (first + second) / 2 == pytest.approx(theirs, rel=1e-5)
    largest = float(their_gradient.abs().max())
    torch.testing.assert_close((one + other) / 2, their_gradient, rtol=1e-4, atol=1e-5 * largest)
    ours, gradient = step(parts)
    assert ours == pytest.approx(step([in_rows(documents, [[i] for i in range(8)], 16, [1.0] * 8)])[0], rel=1e-6)
    assert ours / theirs == pytest.approx(1.015, abs=1e-3), "what docs/post-training.md says of these pairs"
    assert float((gradient - their_gradient).norm() / their_gradient.norm()) == pytest.approx(0.133, abs=1e-3)


def leaves(found: Any, path: str = "") -> dict[str, Any]:
    """All numbers and words by their paths; of metrics, which change with TRL's versions, none."""
    if not isinstance(found, dict | list):
        return {path: found}
    pairs = found.items() if isinstance(found, dict) else enumerate(found)
    of_pairs = [leaves(value, f"{path}/{key}") for key, value in pairs if key != "metrics"]
    return {key: value for each in of_pairs for key, value in each.items()}


@pytest.mark.product
@pytest.mark.parametrize(("script", "files"), [("trl_reference", {"trl", "trl_accumulated", "trl_reward"}),
                                               ("trl_policy", {"trl_policy", "trl_online_dpo"})])  # fmt: skip
def test_trl_still_gives_these_numbers(script: str, files: set[str], tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="pip install trl==1.16.0")
    subprocess.run([sys.executable, "-m", f"tests.objectives.{script}", str(tmp_path)], check=True)
    assert {file.stem for file in tmp_path.iterdir()} == files
    for made in tmp_path.glob("*.json"):
        assert leaves(json.loads(made.read_text())) == pytest.approx(leaves(facts(made.stem)), rel=1e-5, abs=1e-6)
    for made in tmp_path.glob("*.npz"):
        with np.load(made) as again:
            assert set(again) == set(arrays(made.stem))
            for name, values in arrays(made.stem).items():
                # fp32 sums cancel to small entries: their error is of the largest one's size (seen: 2e-6).
                atol = 1e-5 * max(1.0, float(np.abs(values).max()))
                np.testing.assert_allclose(again[name], values, rtol=1e-4, atol=atol)
