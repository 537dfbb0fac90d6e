"""Names of files, `latest`, and finding a checkpoint."""

from pathlib import Path

from megatron.checkpointing import find_checkpoint
from megatron.checkpointing.layout import layer_file, list_checkpoints, model_file, read_latest, step_of, zero_file
from tests.checkpointing.golden import RUNS, fails


def test_names_are_neox_names() -> None:
    ckpt = RUNS["neox_pp2_mp2"] / "ckpt" / "global_step3"
    for layer in (0, 2, 3, 4, 5, 7, 8):
        assert all((ckpt / layer_file(layer, rank)).is_file() for rank in (0, 1))
    assert all((ckpt / model_file(rank)).is_file() for rank in range(4))
    assert zero_file(1, 0, False) == "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    assert zero_file(10, 12, True) == "bf16_zero_pp_rank_10_mp_rank_12_optim_states.pt"
    assert layer_file(102, 11) == "layer_102-model_11-model_states.pt"


def test_golden_directories() -> None:
    ckpt = RUNS["neox_pp2_mp2"] / "ckpt"
    assert read_latest(ckpt) == "global_step3"
    assert find_checkpoint(ckpt).name == "global_step3"
    assert find_checkpoint(ckpt, 0).name == "global_step0"
    assert [p.name for p in list_checkpoints(ckpt)] == ["global_step0", "global_step3"]
    fails("iteration 2.* 0, 3", find_checkpoint, ckpt, 2)
    fails("global_step3: .*`load`.*`iteration`", find_checkpoint, ckpt / "global_step3")


def test_natural_order_and_unfinished(tmp_path: Path) -> None:
    for name in ("global_step2", "global_step10", "global_step100", ".tmp_global_step200", "global_stepx"):
        (tmp_path / name).mkdir()
    (tmp_path / "global_step300").write_text("a file")
    assert [step_of(p) for p in list_checkpoints(tmp_path)] == [2, 10, 100]
    assert list_checkpoints(tmp_path / "none") == []
    fails("`latest`.* 2, 10, 100", find_checkpoint, tmp_path)


def test_latest(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "latest").write_text("0\n")
    assert find_checkpoint(tmp_path).name == "0"
    assert find_checkpoint(tmp_path, 0).name == "0"
    (tmp_path / "0").rename(tmp_path / "global_step0")
    assert find_checkpoint(tmp_path).name == "global_step0"
    (tmp_path / "latest").write_text("global_step7")
    fails("global_step7.* 0", find_checkpoint, tmp_path)
    for bad in ("", "../x", ".."):
        (tmp_path / "latest").write_text(bad)
        fails("latest", find_checkpoint, tmp_path)
    fails("no such directory", find_checkpoint, tmp_path / "typo")
