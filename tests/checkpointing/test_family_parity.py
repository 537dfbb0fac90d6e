"""Logits of every HuggingFace family equal transformers', both directions, in every layout."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpointing.families.convert import check_hf_tensors, from_hf, hf_config, hf_shapes, to_hf
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from tests.checkpointing.family_models import CASES, PADDED, SCALED, SCALINGS, VOCAB, collected, on_disk, random_model
from tests.checkpointing.family_runs import LAYOUTS, TOKENS, Model, logits_by_layout, logits_of
from tests.checkpointing.test_huggingface import loaded
from tests.model.stages import random_weights

BOUND = 1e-5  # relative to the largest fp32 logit of a case, at least 1, as in the converter
Layouts = list[tuple[int, int]]


def imported(case: str, **changes: Any) -> tuple[Model, Tensor]:
    """A transformers model as ours, and its logits."""
    model = random_model(case, **changes)
    config, tensors = on_disk(model)
    keys, weights = from_hf(config, tensors.__getitem__, padded_vocab_size=PADDED)
    check_hf_tensors(config, keys, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, case)
    with torch.no_grad():
        return (keys, collected(weights)), model(TOKENS).logits


def exported(case: str, folder: Path) -> tuple[Model, Tensor]:
    """A random model of ours, and the logits of the folder that plain transformers loads."""
    config, hf_tensors = on_disk(random_model(case))
    keys, _ = from_hf(config, hf_tensors.__getitem__, padded_vocab_size=PADDED)
    args = NeoXArgs.from_dict(keys)
    weights = random_weights(args, seed=3)
    family = config["model_type"]
    tensors = dict(to_hf(args, weights.items(), family=family, vocab_size=VOCAB))
    shapes = hf_shapes(args, family=family, vocab_size=VOCAB)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in hf_tensors.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(args, family=family, vocab_size=VOCAB)))
    with torch.no_grad():
        return (keys, weights), loaded(folder)(TOKENS).logits


def assert_within_bound(
    title: str, pairs: list[tuple[Model, Tensor]], layouts: Layouts, cases: Iterable[str] = ()
) -> None:
    """cases: what was found is of; all by default."""
    differences: dict[tuple[str, tuple[int, int]], float] = {}
    for layout, logits in logits_by_layout([model for model, _ in pairs], layouts).items():
        for case, actual, (_, expected) in zip(cases or CASES, logits, pairs, strict=True):
            assert actual.shape[-1] == PADDED and expected.shape[-1] == VOCAB and expected.std() > 0.3
            difference = (actual[..., :VOCAB] - expected).abs().max().item()
            differences[case, layout] = difference / max(1.0, expected.abs().max().item())
            print(f"{title:12}{case:22}tp{layout[0]} pp{layout[1]}{differences[case, layout]:10.1e}")
    worst = max(differences, key=lambda case_and_layout: differences[case_and_layout])
    assert differences[worst] <= BOUND, (worst, differences[worst])


# Every layout cuts the last of each class of configurations; of all others a process alone, and the product.
LAST = tuple({kind: case for case, (kind, _) in CASES.items()}.values())


@pytest.mark.parametrize(("cases", "layouts"), [
    pytest.param((), [(1, 1)], id="all"),
    pytest.param(LAST, [(2, 2)], id="last", marks=pytest.mark.more),
    pytest.param(LAST, [(4, 1)], id="last, four ranks", marks=pytest.mark.product),
    pytest.param((), [(2, 1), (1, 2), (2, 2), (4, 1), (4, 2)], id="product", marks=pytest.mark.product),
])  # fmt: skip
def test_transformers_to_ours(cases: tuple[str, ...], layouts: Layouts) -> None:
    assert_within_bound("HF -> ours", [imported(case) for case in cases or CASES], layouts, cases)


@pytest.mark.more
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_scaling_of_every_family_tied_and_untied(scaling: str) -> None:
    """Logits at lengths beyond the first one, in one process."""
    for i, case in enumerate(SCALED):
        tied = (i + [*SCALINGS].index(scaling)) % 2 == 0  # each family and each scaling both ways
        rope = {**SCALINGS[scaling], "rope_theta": 3000.0}
        overrides = {"max_position_embeddings": 8 if scaling == "dynamic" else 32, "tie_word_embeddings": tied}
        (keys, weights), expected = imported(case, rope_parameters=rope, **overrides)
        logits = logits_of({**keys, "max_position_embeddings": 32}, weights, ParallelGroups.single())
        difference = (logits[..., :VOCAB] - expected).abs().max()
        assert difference <= BOUND and keys["no_weight_tying"] != tied, (case, tied, difference)


# What a layout cuts does not hang on where weights come from.
@pytest.mark.parametrize(
    ("cases", "layouts"),
    [pytest.param(LAST, [(1, 1)], id="last"), pytest.param((), LAYOUTS, id="all", marks=pytest.mark.product)],
)
def test_ours_to_a_folder_of_transformers(cases: tuple[str, ...], layouts: Layouts, tmp_path: Path) -> None:
    exports = [exported(case, tmp_path / case.replace(" ", "_")) for case in cases or CASES]
    assert_within_bound("ours -> HF", exports, layouts, cases)
