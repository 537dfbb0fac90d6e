"""Whatever reads a checkpoint refuses one in which a bit is flipped; nothing is made of it."""

import ast
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import CheckpointError, DamagedError, OpenCheckpoint, read_manifest, reshard
from megatron.checkpointing.adapters import open_adapter, open_base, open_with_base, write_adapters, write_merged
from megatron.checkpointing.adapters.exporting import export_peft
from megatron.checkpointing.adapters.merging import compare_merged
from megatron.checkpointing.adapters.sources import AdapterSource
from megatron.checkpointing.averaging import average
from megatron.checkpointing.huggingface import export_hf
from megatron.checkpointing.huggingface.mamba_ssm import export_mamba_ssm
from megatron.checkpointing.initial_weights import write_initial_weights
from megatron.checkpointing.manifest import ParallelLayout
from megatron.checkpointing.opening import open_checkpoint
from megatron.checkpointing.saved_config import load_checkpoint_args
from megatron.checkpointing.upcycling import upcycle, upcycled_args
from megatron.generation.model import load_model
from megatron.generation.multi_lora import with_adapters
from megatron.model.weight_map import adapter_params
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.operations.hub.conversion import convert, neox_files
from megatron.tokenizer import build_tokenizer
from tests.methods.distillation.runs import student
from tests.pool import run_ranks
from tests.training.runs import LLAMA, config, run_to_end
from tools.ckpts import inspect_checkpoints, verify

ROOT = Path(__file__).parents[2]
KEYS = config(LLAMA, num_layers=2, hidden_size=16, intermediate_size=24, train_iters=1, checkpoint_factor=1)
LORA = {"r": 2, "alpha": 4, "target": ["dense"]}
LOG = logging.getLogger("test")
# Each is given a checkpoint in which a weight is damaged, and a folder to write to.
Reader = Callable[[Path, Path], Any]


def args_of(path: Path) -> NeoXArgs:
    return load_checkpoint_args(path)[0]


def flip(path: Path, name: str) -> None:
    """One bit in the middle of a file: of torch's, a number of a tensor, which still loads."""
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints: `model` and `other` in layer files, `one_file` in mp_rank; and adapters over two."""
    place = tmp_path_factory.mktemp("sound")
    for name, overrides in {"model": {}, "other": {"seed": 7}, "one_file": {"pipe_parallel_size": 0}}.items():
        keys = {**KEYS, "save": str(place / name), "padded_vocab_size": 384, **overrides}
        write_initial_weights(NeoXArgs.from_dict(keys), None)
    for name in ("model", "one_file"):
        base = open_base(place / name)
        args = base.args.replace(lora=LORA)
        values = {
            n: {spec.name: torch.full(spec.shape, 0.1) for spec in layer_specs}
            for n, layer_specs in adapter_params(args).items()
        }
        source = AdapterSource(place, args, lambda layer, values=values: values.get(layer, {}))  # type: ignore[misc]
        peft = export_peft(source, place / f"peft_{name}", base=str(place / name))
        base, (source,) = open_with_base([peft])
        write_adapters(base, source, place / f"lora_{name}")
    return place


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Path:
    """A copy of all; the test says where a bit is flipped."""
    return Path(shutil.copytree(sound, tmp_path / "damaged"))


def trains(path: Path, out: Path, **keys: Any) -> None:
    values = {**KEYS, "load": str(path.parent), "finetune": True, "save": str(out), **keys}
    run_ranks(run_to_end, 1, values)


def model_of(path: Path, **keys: Any) -> Any:
    args = NeoXArgs.from_dict({**KEYS, "load": str(path.parent), **keys})
    return load_model(args, ParallelGroups.single(), build_tokenizer(args), LOG)


def serve(path: Path, out: Path) -> None:
    with_adapters(replace(model_of(other_checkpoint(path)), source=str(path)), {"a": str(lora_of(path))}, LOG)


def lora_of(path: Path) -> Path:
    return path.parents[1] / f"lora_{path.parent.name}" / path.name


def merge(path: Path, out: Path) -> None:
    base, sources = open_with_base([lora_of(path)], path)
    write_merged(base, [(source, 1.0) for source in sources], out)


def imports_adapters(path: Path, out: Path) -> None:
    write_adapters(open_base(path), open_adapter(lora_of(path)), out)


def compares(path: Path, out: Path) -> None:
    base, (source,) = open_with_base([lora_of(path)], path)
    compare_merged(base, source)


def upcycles(path: Path, out: Path) -> None:
    expert_keys = {"moe_num_experts": 2, "moe_top_k": 2, "moe_router_type": "topk", "norm_topk_prob": True}
    experts = {key: (value, "test") for key, value in expert_keys.items()}
    dense = args_of(path)
    upcycle(path, out, dense, upcycled_args(dense, experts))


def inspect(path: Path, out: Path) -> None:
    with pytest.raises(SystemExit) as exit_info:
        inspect_checkpoints.main([str(path)])
    raise CheckpointError(str(exit_info.value.code))


def other_checkpoint(path: Path) -> Path:
    return path.parents[1] / "other" / path.name


READERS: dict[str, Reader] = {
    "convert_neox_to_hf.py": lambda path, out: export_hf(path, args_of(path), out, tokenizer=False),
    "convert_neox_to_mamba_ssm.py": lambda path, out: export_mamba_ssm(path, args_of(path), out),
    "reshard.py": lambda path, out: reshard(path, out, args_of(path), ParallelLayout(1, 1, 2, 0, "fp32", 2)),
    "average.py": lambda path, out: average([other_checkpoint(path), path], out),
    "upcycle.py": upcycles,
    "adapter.py merge": merge,
    "adapter.py import": imports_adapters,
    "adapter.py verify": compares,
    "upload, GPT-NeoX's format": lambda path, out: neox_files(path, "a/b", "a"),
    "upload, HuggingFace's": convert,
    "generate, serve, evaluate": lambda path, out: model_of(path),
    "adapters of a server": serve,
    "run: finetune": trains,
    "run: weights below adapters": lambda path, out: trains(path, out, lora=LORA),
    "run: teacher": lambda path, out: run_ranks(run_to_end, 1, student(str(path.parent))),
    "inspect_checkpoints.py": inspect,
}
ADAPTER_READERS: dict[str, Reader] = {
    "adapter.py export": lambda path, out: export_peft(open_adapter(path), out),
    "adapter.py merge": lambda path, out: write_merged(*_opened_adapter(path), out),
    "adapters of a server": lambda path, out: with_adapters(model_of(base_of(path)), {"a": str(path)}, LOG),
    "generate, with adapters": lambda path, out: model_of(path),
    "run: adapters alone": lambda path, out: trains(path, out, lora=LORA),
}


def _opened_adapter(path: Path) -> tuple[Any, list[tuple[Any, float]]]:
    base, (source,) = open_with_base([path])
    return base, [(source, 1.0)]


def base_of(path: Path) -> Path:
    return path.parents[1] / "model" / path.name


ONE_FILE = ("generate, serve, evaluate", "run: teacher", "adapter.py merge")


@pytest.mark.parametrize(
    ("reader", "kind"), [*((reader, "model") for reader in READERS), *((reader, "one_file") for reader in ONE_FILE)]
)
def test_a_flipped_bit_is_refused(reader: str, kind: str, damaged: Path, tmp_path: Path) -> None:
    path = damaged / kind / "global_step0"
    name = {"model": "layer_02-model_00-model_states.pt", "one_file": "mp_rank_00_model_states.pt"}[kind]
    flip(path, name)
    with pytest.raises((CheckpointError, AssertionError), match=rf"damaged: {name} \(checksum"):
        READERS[reader](path, tmp_path / "out")
    assert not list(tmp_path.glob("out/global_step*")), "something was made of it"


@pytest.mark.parametrize("reader", ADAPTER_READERS)
def test_a_flipped_bit_of_adapters_is_refused(reader: str, damaged: Path, tmp_path: Path) -> None:
    path = damaged / "lora_model" / "global_step0"
    flip(path, "layer_02-model_00-model_states.pt")
    with pytest.raises((CheckpointError, AssertionError), match=r"damaged: layer_02-\S+ \(checksum"):
        ADAPTER_READERS[reader](path, tmp_path / "out")
    assert not list(tmp_path.glob("out/global_step*"))


def test_files_beside_the_weights_are_checked_too(damaged: Path, tmp_path: Path) -> None:
    path = damaged / "model" / "global_step0"
    manifest = read_manifest(path)
    assert manifest is not None
    (name,) = (name for name in manifest.files if name.startswith("mp_rank"))
    flip(path, name)
    with pytest.raises(DamagedError, match=name):
        open_checkpoint(path)
    opened = OpenCheckpoint(path)
    opened.file("layer_02-model_00-model_states.pt")  # the others can be read
    with pytest.raises(DamagedError, match=name):
        opened.tensors(name)
    assert OpenCheckpoint(path, verified=False).file(name) == path / name
    assert verify.check(damaged / "other" / "global_step0")


# -- no reader is forgotten ----------------------------------------------------------------------------------

OPENERS = {"OpenCheckpoint", "open_checkpoint", "open_base", "open_adapter", "open_with_base"}
RAW = {"load_tensors", "torch.load", "safe_open"}
HEADERS, JUST_WRITTEN = "names, dtypes and shapes alone", "what it has just written itself"
SCHEDULE = "the schedule alone; the run of the branch reads the weights"
COPIES = "tests/training/checkpoint/test_local_saves.py flips bits of a copy"
# Who opens a checkpoint, and one of the readers above that goes through it.
READER_OF_OPENER = {
    "megatron/checkpointing/adapters/base.py open_base": "adapter.py merge",
    "megatron/checkpointing/adapters/sources.py open_adapter": "adapter.py merge",
    "megatron/checkpointing/adapters/sources.py open_with_base": "adapter.py merge",
    "megatron/checkpointing/averaging.py average": "average.py",
    "megatron/checkpointing/huggingface/exporting.py export_hf": "convert_neox_to_hf.py",
    "megatron/checkpointing/huggingface/importing.py import_hf": JUST_WRITTEN,
    "megatron/checkpointing/huggingface/mamba_ssm.py export_mamba_ssm": "convert_neox_to_mamba_ssm.py",
    "megatron/checkpointing/neox_optimizer.py _groups_of": "reshard.py",
    "megatron/checkpointing/opening.py open_checkpoint": "reshard.py",
    "megatron/checkpointing/opening.py verify": "upload, GPT-NeoX's format",
    "megatron/checkpointing/optimizer_files.py OptimizerFiles": "reshard.py",
    "megatron/checkpointing/resharding.py reshard": "reshard.py",
    "megatron/checkpointing/upcycling.py upcycle": "upcycle.py",
    "megatron/checkpointing/weight_files.py describe_checkpoint": HEADERS,
    "megatron/checkpointing/weight_files.py open_weight_files": "convert_neox_to_hf.py",
    "megatron/checkpointing/weights.py has_score_head": HEADERS,
    "megatron/generation/multi_lora.py with_adapters": "adapters of a server",
    "megatron/generation/model.py _merging_loader": "generate, with adapters",
    "megatron/generation/model.py load_model": "generate, serve, evaluate",
    "megatron/operations/hub/conversion.py convert": "upload, HuggingFace's",
    "megatron/training/checkpoint/local_saves.py LocalSaves": COPIES,
    "megatron/training/checkpoint/resume.py CheckpointLoader": "run: finetune",
    "megatron/experiments/branch.py _Choice": SCHEDULE,
    "megatron/training/checkpoint/source.py _with_manifest": "run: finetune",
    "megatron/training/checkpoint/writer.py CheckpointWriter": "adapter.py export",
    "megatron/methods/distillation/teacher.py Teacher": "run: teacher",
    "tools/ckpts/adapter.py _base_args": HEADERS,
    "tools/ckpts/adapter.py export": "adapter.py export",
    "tools/ckpts/adapter.py import_": "adapter.py import",
    "tools/ckpts/adapter.py merge": "adapter.py merge",
    "tools/ckpts/adapter.py verify": "adapter.py verify",
    "tools/ckpts/inspect_checkpoints.py show": "inspect_checkpoints.py",
    "tools/ckpts/inspect_checkpoints.py compare": "inspect_checkpoints.py",
}
# Who reads a file of tensors without opening a checkpoint, and why that is right.
RAW_READERS = {
    "megatron/checkpointing/huggingface/folder.py HFFolder": "HuggingFace's, which has no manifest",
    "megatron/checkpointing/huggingface/folder.py load_named": "HuggingFace's and Meta's",
    "megatron/checkpointing/manifest.py saved_model": "GPT-NeoX's, which has no manifest",
    "megatron/checkpointing/neox_optimizer.py _FlatZeroState": "GPT-NeoX's",
    "megatron/checkpointing/tensor_files.py verify_finite": "called once the files are checked; looks for NaN",
    "megatron/checkpointing/opening.py OpenCheckpoint": "the gate itself",
    "megatron/checkpointing/tensor_files.py load_tensors": "the function itself",
    "megatron/checkpointing/weights.py gather_layers": "files that were just written",
    "megatron/training/deepspeed/engine.py DeepSpeedEngine": "a file that the checkpointer has checked",
    "tools/compare_commits.py digest_of_tensors": "compares the files of two runs byte by byte",
}


def calls_of(names: set[str]) -> Iterator[str]:
    """`file function` of every call of one of these functions."""
    folders = ("megatron", "tools", "huggingface", "post-training", "slurm")
    for file in sorted([*ROOT.glob("*.py"), *(file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py"))]):
        text = file.read_text(encoding="utf-8")
        for node in ast.parse(text).body if any(name in text for name in names) else ():
            for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
                if isinstance(call.func, ast.Name | ast.Attribute) and ast.unparse(call.func) in names:
                    yield f"{file.relative_to(ROOT).as_posix()} {getattr(node, 'name', '')}".strip()


def test_every_reader_of_checkpoints_is_here() -> None:
    """A new one gets a line in the tables, and stands among the readers that a flipped bit is put under."""
    assert set(calls_of(OPENERS)) == READER_OF_OPENER.keys()
    assert set(calls_of(RAW)) == RAW_READERS.keys()
    assert (
        set(READER_OF_OPENER.values()) - {HEADERS, JUST_WRITTEN, SCHEDULE, COPIES}
        <= READERS.keys() | ADAPTER_READERS.keys()
    )
