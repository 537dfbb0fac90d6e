"""Logits of every HuggingFace family equal transformers', both directions, in every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpointing.families import check_hf_tensors, from_hf, hf_config, hf_shapes, to_hf
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from tests.checkpointing.family_models import (
    CASES,
    PADDED,
    SCALED,
    SCALINGS,
    VOCAB,
    collected,
    on_disk,
    random_model,
)
from tests.checkpointing.family_runs import LAYOUTS, TOKENS, Model, logits_by_layout, logits_of
from tests.model.stages import random_weights

BOUND = 1e-5  # absolute, of fp32 logits of order 1


def imported(case: str) -> tuple[Model, Tensor]:
    """A transformers model as ours, and its logits."""
    model = random_model(case)
    config, tensors = on_disk(model)
    keys, ours = from_hf(config, tensors.__getitem__, padded_vocab_size=PADDED)
    check_hf_tensors(config, keys, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, case)
    with torch.no_grad():
        return (keys, collected(ours)), model(TOKENS).logits


def exported(case: str, folder: Path) -> tuple[Model, Tensor]:
    """A random model of ours, and the logits of the folder that plain transformers loads."""
    model = random_model(case)
    config, hf_tensors = on_disk(model)
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
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    loaded, loading_info = load(folder, output_loading_info=True)
    assert not any(loading_info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        loading_info
    )
    with torch.no_grad():
        return (keys, weights), loaded.eval()(TOKENS).logits


Layouts = list[tuple[int, int]]


def differences(found: list[tuple[Model, Tensor]], layouts: Layouts) -> list[dict[tuple[int, int], float]]:
    ours = logits_by_layout([model for model, _ in found], layouts)
    rows: list[dict[tuple[int, int], float]] = [{} for _ in found]
    for layout, logits in ours.items():
        for row, actual, (_, expected) in zip(rows, logits, found, strict=True):
            assert actual.shape[-1] == PADDED and expected.shape[-1] == VOCAB and expected.std() > 0.3
            row[layout] = (actual[..., :VOCAB] - expected).abs().max().item()
    return rows


def table(title: str, rows: list[dict[tuple[int, int], float]]) -> str:
    head = f"{title:22}" + "".join(f"{f'tp{tensor} pp{pipe}':>10}" for tensor, pipe in rows[0])
    cells = ("".join(f"{value:10.1e}" for value in row.values()) for row in rows)
    return "\n".join([head, *(f"{case:22}{values}" for case, values in zip(CASES, cells, strict=True))])


def assert_within_bound(title: str, found: list[tuple[Model, Tensor]], layouts: Layouts) -> None:
    rows = differences(found, layouts)
    print("\n" + table(title, rows))
    worst: Any = max((value, case, at) for case, row in zip(CASES, rows, strict=True) for at, value in row.items())
    assert worst[0] <= BOUND, worst


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([(1, 1), (2, 2)], id="some"),
        pytest.param([(2, 1), (1, 2), (4, 1)], id="more", marks=pytest.mark.more),
        pytest.param([(4, 2)], id="eight ranks", marks=pytest.mark.product),
    ],
)
def test_transformers_to_ours(layouts: Layouts) -> None:
    assert_within_bound("HF -> ours", [imported(case) for case in CASES], layouts)


@pytest.mark.more
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_scaling_of_every_family_tied_and_untied(scaling: str) -> None:
    """Logits at lengths beyond the first one, in one process."""
    for case in SCALED:
        for tied in (True, False):
            rope = {**SCALINGS[scaling], "rope_theta": 3000.0}
            more = {"max_position_embeddings": 8 if scaling == "dynamic" else 32, "tie_word_embeddings": tied}
            model = random_model(case, rope_parameters=rope, **more)
            config, tensors = on_disk(model)
            keys, ours = from_hf(config, tensors.__getitem__, padded_vocab_size=PADDED)
            longest = {"max_position_embeddings": 32}
            logits = logits_of({**keys, **longest}, collected(ours), ParallelGroups.single())
            with torch.no_grad():
                difference = (logits[..., :VOCAB] - model(TOKENS).logits).abs().max()
            assert difference <= BOUND and keys["no_weight_tying"] != tied, (case, tied, difference)


# What a layout cuts does not hang on where weights come from.
@pytest.mark.parametrize(
    "layouts", [pytest.param([(1, 1), (2, 1)], id="some"), pytest.param(LAYOUTS, id="all", marks=pytest.mark.product)]
)
def test_ours_to_a_folder_of_transformers(layouts: Layouts, tmp_path: Path) -> None:
    exports = [exported(case, tmp_path / case.replace(" ", "_")) for case in CASES]
    assert_within_bound("ours -> HF", exports, layouts)
