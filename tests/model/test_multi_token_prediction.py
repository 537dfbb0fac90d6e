"""Multi-token prediction beside its formula, written with transformers' layers and plain torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron.checkpointing.families.convert import from_hf
from megatron.data.batch import Batch, collate, places_of_loss
from megatron.data.future_tokens import future_tokens
from megatron.model import for_inference
from megatron.model.init import stage_parameters
from megatron.model.stage import Stage
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.objectives import language_modelling
from tests.checkpointing.family_models import _SIZES, CASES
from tests.model.runs import LLAMA, MOE, TIED_LLAMA
from tests.model.stages import Weights, gradients, make_stage, random_batch, random_weights, small

DEPTH, SCALE, BLOCKS, EPS = 2, 0.7, 4, 1e-6
SEQ = 16


class FormulaModel(nn.Module):
    """DeepSeek V3 of transformers, whose last blocks are those of multi-token prediction."""

    def __init__(self) -> None:
        super().__init__()
        _, fields = CASES["deepseek 3"]
        config = transformers.DeepseekV3Config(**{**_SIZES, **fields, "num_hidden_layers": BLOCKS + DEPTH})
        config._attn_implementation, config._experts_implementation = "sdpa", "eager"
        self.language_model = transformers.DeepseekV3ForCausalLM(config)
        hidden = config.hidden_size
        norms = {
            name: nn.ModuleList(nn.RMSNorm(hidden, EPS) for _ in range(DEPTH)) for name in ("enorm", "hnorm", "norm")
        }
        self.enorm, self.hnorm, self.norm = norms.values()
        self.eh_proj = nn.ModuleList(nn.Linear(2 * hidden, hidden, bias=False) for _ in range(DEPTH))
        generator = torch.Generator().manual_seed(0)
        for _, param in self.named_parameters():
            value = 0.2 * torch.randn(param.shape, generator=generator)
            param.data.copy_(1 + value if param.dim() == 1 else value)
        self.train()

    def losses(self, tokens: Tensor, weights: Tensor) -> list[Tensor]:
        """The summed losses of depth 0, 1, .. of a document. weights: of each token as a target."""
        model = self.language_model.model
        inputs = tokens[:-1]
        embedded = model.embed_tokens(inputs).unsqueeze(0)
        rope = model.rotary_emb(embedded, torch.arange(len(inputs)).unsqueeze(0))
        x = embedded
        for layer in model.layers[:BLOCKS]:
            x = layer(x, position_embeddings=rope)
        x = model.norm(x)
        sums = [self._cross_entropy(x, tokens[1:], weights[1:])]
        for k in range(1, DEPTH + 1):
            count = len(inputs) - k  # the sequences of the paper become shorter
            if count < 1:
                sums.append(torch.zeros(()))
                continue
            joined = torch.cat([self.enorm[k - 1](embedded[:, k:]), self.hnorm[k - 1](x[:, :count])], -1)
            x = self.eh_proj[k - 1](joined)
            x = model.layers[BLOCKS + k - 1](x, position_embeddings=tuple(table[:, :count] for table in rope))
            x = self.norm[k - 1](x)
            sums.append(self._cross_entropy(x, tokens[k + 1 :], weights[k + 1 :]))
        return sums

    def _cross_entropy(self, x: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        logits = self.language_model.lm_head(x)[0]
        return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()

    def tensors(self, folder: Path, use: Any) -> dict[str, Tensor]:
        """`use(parameter)` of every parameter, by HuggingFace's name of the parameter in files."""
        values = {name: param.data for name, param in self.language_model.named_parameters()}
        for param in self.language_model.parameters():
            param.data = use(param)
        self.language_model.save_pretrained(folder)
        for name, param in self.language_model.named_parameters():
            param.data = values[name]
        tensors = load_file(folder / "model.safetensors")
        for k in range(DEPTH):
            block = f"model.layers.{BLOCKS + k}."
            tensors |= {
                f"{block}{name}.weight": use(getattr(self, name)[k].weight) for name in ("enorm", "hnorm", "eh_proj")
            }
            tensors[f"{block}shared_head.norm.weight"] = use(self.norm[k].weight)
        return tensors


def converted(model: FormulaModel, tensors: dict[str, Tensor]) -> tuple[NeoXArgs, Weights]:
    config = {**model.language_model.config.to_dict(), "num_hidden_layers": BLOCKS, "num_nextn_predict_layers": DEPTH}
    keys, values = from_hf(config, tensors.__getitem__, mtp_layers=DEPTH)
    weights: Weights = {}
    for layer, name, value in values:
        weights.setdefault(layer, {})[name] = value
    return NeoXArgs.from_dict(
        {**keys, "mtp_loss_scaling_factor": SCALE, "seq_length": SEQ, "precision": "fp32"}
    ), weights


def batch_of(packed: bool) -> tuple[Batch, list[tuple[Tensor, Tensor]]]:
    """A batch with untrained prompts, and its documents: tokens, and their loss weights as targets.

    packed: several documents in a row; else the rows are one document each."""
    rng = np.random.default_rng(0)
    samples = rng.integers(0, 90, (2, SEQ + 1))
    labels = np.where(rng.random(samples.shape) < 0.7, samples, -1)
    begins = np.zeros(samples.shape, bool)
    begins[:, 0] = True
    if packed:
        begins[0, [1, 3, 6, 12]] = begins[1, [9, SEQ]] = True
    batch = collate(samples, labels=labels, begins=begins, reset_attention_mask=packed, reset_position_ids=packed)
    documents = []
    for row in range(len(samples)):
        starts = [*np.flatnonzero(begins[row]).tolist(), SEQ + 1]
        for begin, end in zip(starts, starts[1:], strict=False):
            tokens, weights = torch.from_numpy(samples[row, begin:end]), torch.from_numpy(labels[row, begin:end] >= 0)
            if len(tokens) > 1:
                documents.append((tokens, weights.float()))
    return batch, documents


def loss_of(stage: Stage, batch: Batch, args: NeoXArgs) -> tuple[Tensor, dict[str, Tensor]]:
    """The summed loss of the objective in training, and its metrics."""
    objective = language_modelling(mtp_layers=args.mtp_num_layers or 0, mtp_factor=args.mtp_loss_scaling_factor)
    sums: list[Any] = []

    def finish(head: Any) -> Tensor:
        sums.append(objective.loss_sum(head, batch, None))
        return sums[0][0]

    stage.train()(None, batch, finish)
    return sums[0][0].sum(), sums[0][1]


@pytest.mark.parametrize("packed", [False, True])
def test_losses_and_gradients_are_those_of_the_formula(packed: bool, tmp_path: Path) -> None:
    model = FormulaModel()
    args, weights = converted(model, model.tensors(tmp_path, lambda param: param.data))
    stage = make_stage(args, weights)
    batch, documents = batch_of(packed)
    sums = [torch.stack(losses) for losses in zip(*(model.losses(*document) for document in documents), strict=True)]
    main, *further = (losses.sum() for losses in sums)
    trained = batch.loss_weights.sum()
    ((main + SCALE / DEPTH * sum(further)) / trained).backward()
    loss, metrics = loss_of(stage, batch, args)
    torch.testing.assert_close(loss, main, rtol=1e-5, atol=0)
    for k, expected in enumerate(further, start=1):
        total, count = metrics[f"mtp_loss/{k}"]
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
        assert count == sum(weights[k + 1 :].sum() for _, weights in documents)
    (loss / trained).backward()
    expected_gradients = converted(model, model.tensors(tmp_path, lambda param: param.grad))[1]
    for layer, name, param in stage_parameters(stage):
        if name == "mlp.router.expert_bias":
            continue
        gradient, expected = param.grad, expected_gradients[layer][name]
        assert gradient is not None
        assert expected.norm() > 1e-6, f"{layer} {name} has no gradient"
        assert (gradient - expected).norm() <= 1e-5 * expected.norm(), f"{layer} {name}"


@pytest.mark.parametrize("model", [LLAMA, MOE, TIED_LLAMA])
def test_a_weight_of_zero_changes_no_gradient_of_the_trunk(model: dict[str, Any]) -> None:
    """To the bit; the blocks' own gradients are 0."""
    grads = []
    for keys in ({}, {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.0}):
        args = small(**model, **keys)
        stage, batch = make_stage(args, random_weights(args)), random_batch(args)
        loss, _ = loss_of(stage, batch, args)
        loss.backward()
        grads.append(gradients(stage) | {(-1, "loss"): loss.detach()})
    trunk, predicting = grads
    assert all(torch.equal(predicting[place], gradient) for place, gradient in trunk.items())
    assert not any(predicting[place].any() for place in predicting.keys() - trunk.keys())
    assert len(predicting) > len(trunk)


def test_what_a_depth_reads_and_predicts() -> None:
    """Documents, positions that begin anew, padding and the end of a row bound it."""
    batch, _ = batch_of(packed=True)
    ids = torch.tensor([[0, 1, 1, 2, 2, 2, *[3] * 6, *[4] * 4], [5] * 9 + [6] * 7])
    for depth in (1, 2, SEQ):
        future = future_tokens(batch, depth)
        for row in range(2):
            for i in range(SEQ):
                j = i + depth
                in_document = j < SEQ and ids[row, i] == ids[row, j]
                assert future.in_document[row, i] == in_document
                expected = (
                    (batch.tokens[row, j], batch.labels[row, j], batch.loss_weights[row, j])
                    if in_document
                    else (0, 0, 0)
                )
                assert (future.tokens[row, i], future.labels[row, i], future.loss_weights[row, i]) == expected
    from_positions = future_tokens(replace(batch, documents=None), 2)
    from_documents = future_tokens(replace(batch, positions=None), 2)
    for future in (from_positions, from_documents):
        assert future.in_document.equal(future_tokens(batch, 2).in_document), "each alone tells documents apart"
    padded = future_tokens(replace(batch, filled=torch.tensor([SEQ, 11])), 2).in_document
    assert not padded[1, 9:].any() and padded[1, 8 - 2] and padded[0].equal(from_positions.in_document[0])
    sparse = torch.zeros(2, SEQ, dtype=torch.int64)
    sparse[0, 1] = sparse[1, [4, 9]] = sparse[:, 15] = 1
    batch = Batch(batch.tokens, batch.labels * sparse, sparse, loss_places=places_of_loss(sparse.numpy()))
    for depth in (1, 3):
        future = future_tokens(batch, depth)
        assert future.loss_places is not None and len(future.loss_places.unique()) == len(future.loss_places)
        weights = future.loss_weights.t().flatten()
        assert weights[future.loss_places].sum() == weights.sum() > 0


def test_evaluation_and_generation_run_no_further_blocks() -> None:
    args = small(**LLAMA, mtp_num_layers=2)
    stage, trunk = make_stage(args), make_stage(small(**LLAMA), random_weights(args))
    batch = random_batch(args)
    heads: list[Any] = []
    for model, is_training in ((stage, True), (stage, False), (trunk, False)):
        model.train(is_training)(None, batch, lambda head: heads.append(head) or head.hidden_states)
    training, evaluation, expected = heads
    assert len(training.further) == 2 and evaluation.further == ()
    assert all(head.hidden_states.equal(expected.hidden_states) for head in (training, evaluation))
    assert stage.cache_bytes == trunk.cache_bytes and stage.empty_cache(1, 16).layers.keys() == {2, 3, 4, 5}
    assert for_inference(args).mtp_num_layers is None


@pytest.mark.parametrize(("keys", "message"), [
    ({"mtp_num_layers": 0}, "mtp_num_layers"),
    ({"mtp_loss_scaling_factor": 0.3}, "mtp_loss_scaling_factor: is read only with mtp_num_layers"),
    ({"mtp_num_layers": 1, "mtp_loss_scaling_factor": -1.0}, "mtp_loss_scaling_factor"),
    ({"mtp_num_layers": 1, "lora": {"r": 2}}, "mtp_num_layers: its blocks have no adapters"),
    ({"mtp_num_layers": 1, "train_impl": "rm"}, "mtp_num_layers: a reward model predicts no tokens"),
    ({"mtp_num_layers": 1, "train_impl": "dpo"}, "mtp_num_layers: trains with next-token prediction alone"),
    ({"mtp_num_layers": 1, "attention_config": ["attention", "mlp"]}, "mtp_num_layers: needs a last block"),
])  # fmt: skip
def test_what_it_does_not_fit_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**keys)
