"""Checkpoints of runs with `lora`: adapters alone or with what lies below them, bit-equal resumes, other
layouts, and the weights that adapters belong to."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import CheckpointError, read_manifest
from megatron.checkpointing.tensor_files import load_tensors
from megatron.model.weight_map import is_adapter
from megatron.neox_arguments import ConfigError
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import assert_goes_on, losses, stop_after
from tests.training.preference.test_reference import PACKED, PADDED, first_losses, preferences
from tests.training.runs import ADAMW, LAYOUTS, LLAMA, begin, config, run_to_end

LORA = {"r": 4, "alpha": 8, "dropout": 0.1}
DORA = {**LORA, "dora": True, "modules_to_save": ["embed_tokens"]}
BF16 = {"precision": "bfloat16"}
RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "plain, dora and a copy": ("plain", {"lora": DORA}),
    "tp2, both": ("tp2", {"lora": {**LORA, "save": "both"}, **BF16}),
    "pp2, dora and a copy": ("pp2", {"lora": DORA, **BF16}),
    "zero3": ("zero3", {"lora": LORA, **BF16}),
    "zero1": ("zero1", {"lora": DORA, **BF16}),
    "zero3, deepspeed": ("zero3", {"lora": DORA, "engine": "deepspeed"}),
}


def values(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    common = {"train_micro_batch_size_per_gpu": 2, "train_iters": 6, "checkpoint_factor": 3, "warmup": 0.3}
    return config(LLAMA, ADAMW, common, *parts, **more)


@pytest.mark.parametrize("name", with_more(RESUMED, *(set(RESUMED) - {"pp2, dora and a copy"})))
def test_bit_equal(name: str, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[RESUMED[name][0]]
    assert_goes_on(ranks, values(layout, RESUMED[name][1]), tmp_path)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, whose weights others begin with."""
    save = tmp_path_factory.mktemp("base")
    run_ranks(run_to_end, 1, values(train_iters=2, checkpoint_factor=2, save=str(save)))
    return save


def over(base: Path, save: Path, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    begun = {"load": str(base), "finetune": True, "save": str(save), "lora": {**DORA, "dropout": 0.0}}
    return values(begun, *parts, **more)


@pytest.fixture(scope="module")
def through(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters on it, six steps in one process."""
    save = tmp_path_factory.mktemp("through")
    run_ranks(run_to_end, 1, over(base, save))
    return save


@pytest.mark.parametrize(
    ("first", "then"),
    [pytest.param("tp2", "pp2", marks=pytest.mark.more), pytest.param("zero3", "tp2", marks=pytest.mark.product)],
)
def test_on_another_layout(first: str, then: str, base: Path, through: Path, tmp_path: Path) -> None:
    engine = {"engine": "deepspeed" if then == "pp2" else "native"}
    run_ranks(stop_after, LAYOUTS[first][0], over(base, tmp_path, LAYOUTS[first][1], engine), 3)
    run_ranks(run_to_end, LAYOUTS[then][0], over(base, tmp_path, LAYOUTS[then][1], engine))
    assert losses(tmp_path) == pytest.approx(losses(through), rel=1e-5)


def test_it_holds_adapters_alone(base: Path, through: Path) -> None:
    path = through / "global_step6"
    names = {name for file in path.glob("layer_*") for name in load_tensors(file)}
    assert names and all(is_adapter(name) for name in names)
    manifest = read_manifest(path)
    assert manifest is not None and manifest.base is not None
    assert manifest.base["path"] == str(base / "global_step2")


def refusal(rank: int, world_size: int, given: dict[str, Any]) -> str:
    """For the pool."""
    try:
        begin(given)
    except (CheckpointError, ConfigError) as problem:
        return str(problem)
    return "none"


def test_refusals(base: Path, through: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run_ranks(run_to_end, 1, values(train_iters=2, checkpoint_factor=2, save=str(other), seed=4))
    begun = {"load": str(through), "finetune": True, "num_layers": 4, "lora": DORA, "dpo_reference": "on_the_fly"}
    asked: dict[str, dict[str, Any]] = {
        "were trained on other weights than": over(base, through, lora={**DORA, "base": str(other)}),
        "lora: .*alpha": over(base, through, lora={**DORA, "alpha": 9}),
        "holds adapters; set lora as it was": over(base, through, lora=None),
        "to train adapters on its weights": over(base, base, load=None, finetune=False),
        "merge them first": preferences(tmp_path, PADDED, begun, padded_vocab_size=384),
        "keeps what another model gives": preferences(tmp_path, PADDED, {"lora": LORA, "dpo_reference": "cache"}),
        "trains adapters alone": values(lora=LORA, trainable={"head": True}),
        "gate: no linear of this model": values(lora={"target": ["gate"]}),
        "query_key_value is all of": values(lora={"target": ["query_key_value", "k_proj"]}),
        "alone it would no longer be": values(lora={"modules_to_save": ["lm_head"]}),
    }  # fmt: skip
    for text, given in asked.items():
        said = run_ranks(refusal, 1, given)[0]
        assert text.split(".*")[-1] in said, (text, said)


def test_ln_2_at_the_first_step(tmp_path: Path) -> None:
    """The reference is the policy without its adapters, which at first add nothing."""
    for name in ("plain", "tp2", "pp2", "zero3"):
        ranks, layout = LAYOUTS[name]
        runs = [preferences(tmp_path, layout, more, {"lora": DORA}) for more in (PADDED, PACKED, PADDED | BF16)]
        runs = [{key: value for key, value in run.items() if key != "reference_cache_dir"} for run in runs]
        for found in run_ranks(first_losses, ranks, runs):
            assert found == pytest.approx([0.6931472] * 3, abs=1e-6), name
