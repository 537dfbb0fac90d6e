"""The table of attention backends: its names, the layers that ask for one, and a new one."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.model import build_stage
from megatron.model.attention import AttentionInputs, choose_backends
from megatron.model.attention.backends import AttentionOptions, Sdpa
from megatron.model.specs import attention_spec
from megatron.mpu import ParallelGroups
from tests.model.stages import chosen, document_batch, random_batch, random_weights, small, stage_with
from tests.model.test_attention import no_gpu_is_tried

ROOT = Path(__file__).resolve().parents[2]
KERNEL = "aten::_scaled_dot_product_"
MIXED: dict[str, Any] = {
    "num_layers": 4,
    "attention_config": [[["flash", "global"], 1], [["global", "flash"], 1]],
}


@torch.no_grad()
@pytest.mark.parametrize(
    "asked, backend, kernels",
    [
        (MIXED["attention_config"], "math", ["flash", "math", "math", "flash"]),
        (MIXED["attention_config"], "flash", ["flash"] * 4),
        ([[["flash"], 4]], "math", ["math"] * 4),  # all the same: the key decides, as ever
        (None, "math", ["math"] * 4),
    ],
)
def test_a_layer_runs_what_attention_config_names(asked: Any, backend: str, kernels: list[str]) -> None:
    args, log_lines = small(num_layers=4, attention_config=asked, attention_backend=backend), list[str]()
    build_stage(args, ParallelGroups.single(), log=log_lines.append)
    assert not log_lines, "each is what was asked for"
    stage = stage_with(args, random_weights(args))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        stage(None, random_batch(args))
    ran = [event.name for event in profile.events() or () if event.name.startswith(KERNEL)]
    assert ["flash" if "flash" in name else "math" for name in ran] == kernels


@torch.no_grad()
def test_layers_of_both_kinds_see_the_same() -> None:
    """Packed rows: documents by themselves or under a mask."""
    args, plain = small(**MIXED, attention_backend="math"), small(num_layers=4)
    weights, batch = random_weights(plain), document_batch(plain)
    mixed, expected = (stage_with(one, weights)(None, batch) for one in (args, plain))
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)


def test_on_a_gpu_layers_of_one_kind_may_mask_what_others_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu_is_tried(monkeypatch)
    args, log_lines = small(**MIXED, attention_backend="math", precision="bfloat16"), list[str]()
    specs = [attention_spec(args, block) for block in range(4)]
    chosen = choose_backends(args, torch.device("cuda"), specs, log_lines.append)
    assert [chosen[spec.backend].supports_varlen(spec.window) for spec in specs] == [True, False, False, True]
    assert specs[0].inputs == specs[3].inputs != specs[1].inputs == specs[2].inputs


@pytest.mark.parametrize(
    "asked, capability, said, at_length, at_others",
    [
        ("auto", (9, 0), "cudnn, at other lengths than 16 flash", "Cudnn", "Flash"),
        ("auto", (8, 0), "flash", "Flash", "Flash"),
        ("cudnn", (9, 0), "cudnn", "Cudnn", "Cudnn"),
        ("cudnn", (8, 0), "cudnn", "Cudnn", "Cudnn"),
    ],
)
def test_cudnn_runs_rows_of_training_on_gpus_it_is_fast_on(
    asked: str, capability: tuple[int, int], said: str, at_length: str, at_others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gpu_is_tried(monkeypatch, capability)
    args, ran = small(attention_backend=asked, precision="bfloat16"), list[str]()
    monkeypatch.setattr(Sdpa, "run", lambda self, q, *_: ran.append(type(self).__name__) or q)
    backends = chosen(args, "cuda")
    assert backends.name == said
    for length in (args.seq_length, args.seq_length - 1):
        x = torch.zeros(length, 1, 4, 8)
        backends.attend(x, x, x, AttentionInputs(), AttentionOptions())
    assert ran == [at_length, at_others]


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_a_layer_that_cannot_have_its_kernel_has_that_of_the_others(backend: str) -> None:
    log_lines: list[str] = []
    build_stage(
        small(**MIXED, attention_dropout=0.1, attention_backend=backend), ParallelGroups.single(), log_lines.append
    )
    assert any(re.match("attention_config: flash chose .*with dropout math", line) for line in log_lines), log_lines


MEAN = '''"""Attention that looks at nothing: the mean of the values so far."""

import torch

from megatron.model.attention.backends import AttentionBackend


class Mean(AttentionBackend):
    def supports(self, call):
        return "it has no mask" if call.masked or call.documents else super().supports(call)

    def run(self, q, k, v, inputs, options):
        means = v.cumsum(0) / torch.arange(1, len(v) + 1).view(-1, 1, 1, 1)
        return means.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
'''
RUN = """
from tests.training.runs import config, curves

print([part.losses for part in curves(0, 1, [config(attention_backend=name) for name in ("math", "mean")], steps=2)])
"""


def test_a_backend_is_one_file_and_one_entry(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "megatron/model/attention/mean.py").write_text(MEAN)
    table, entry = tmp_path / "megatron" / "neox_arguments" / "keys" / "attention.py", '("flash", "backends.Varlen"),'
    assert table.read_text().count(entry) == 1
    table.write_text(table.read_text().replace(entry, f'{entry} ("mean", "mean.Mean"),'))
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    exact, mean = json.loads(done.stdout.splitlines()[-1])
    assert len(mean) == 2 and mean[1] < mean[0] and all(a != b for a, b in zip(exact, mean, strict=True))
