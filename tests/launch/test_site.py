"""Settings of a cluster: its file as jobs and tools read it. No Slurm is needed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest

from megatron.launch.environment import LaunchError
from megatron.launch.site import sbatch_line, site_nodes, site_variables, starts_from_a_model
from megatron.neox_arguments import NeoXArgs
from tests.launch.test_nccl import fake_torch, library
from tests.training.runs import BASE

ROOT = Path(__file__).resolve().parents[2]
ENV = {"PATH": "/usr/bin:/bin", "NEOX_SITE": "isambard", "PROJECTDIR": "/p"}
# What a cluster's shell has: `module`. That of the plugin brings an NCCL of its own along.
JOB = """\
module() {
    case $2 in
        PrgEnv-cray | cuda/12.6) ;;
        brics/aws-ofi-nccl/1.8.1) export LD_LIBRARY_PATH=$MODULES ;;
        *) return 1 ;;
    esac
    echo "loaded $2"
}
set -x
source "$1" || exit 1
set +x
env | grep -E '^(NEOX|NCCL|FI|TORCH|MPICH|CUDA|PYTORCH|TRITON|TMPDIR|LD_PRELOAD)'
printf 'secret of %s letters\\n' "${#A_SECRET}"
"""
# What the group that trains there, and the machine, have published until November 2026.
SLINGSHOT = {
    "NCCL_NET": "AWS Libfabric", "NCCL_SOCKET_IFNAME": "hsn", "NCCL_CROSS_NIC": "1", "NCCL_NET_GDR_LEVEL": "PHB",
    "NCCL_COLLNET_ENABLE": "0", "NCCL_PROTO": "^LL128", "NCCL_ALGO": "Ring", "NCCL_MIN_NCHANNELS": "4",
    "NCCL_NCHANNELS_PER_NET_PEER": "4", "NCCL_NVLS_ENABLE": "0", "NCCL_GDRCOPY_ENABLE": "1", "FI_PROVIDER": "cxi",
    "NCCL_NET_FORCE_FLUSH": "0",
    "FI_MR_CACHE_MONITOR": "userfaultfd", "FI_HMEM_CUDA_USE_GDRCOPY": "1", "FI_CXI_DEFAULT_CQ_SIZE": "131072",
    "FI_CXI_DEFAULT_TX_SIZE": "2048", "FI_CXI_DISABLE_HOST_REGISTER": "1", "FI_CXI_RX_MATCH_MODE": "hybrid",
    "FI_CXI_RDZV_GET_MIN": "0", "FI_CXI_RDZV_THRESHOLD": "0", "FI_CXI_RDZV_EAGER_SIZE": "0",
    "FI_CXI_RDZV_PROTO": "alt_read", "FI_CXI_DISABLE_NON_INJECT_MSG_IDC": "1", "MPICH_GPU_SUPPORT_ENABLED": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1", "TORCH_CUDA_ARCH_LIST": "9.0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TMPDIR": "/local", "TRITON_CACHE_DIR": "/local/triton-me",
}  # fmt: skip
PLACES = {"NEOX_CHECKPOINT_DIR": "checkpoints/sf_model_organisms", "NEOX_LOG_DIR": "logs/neox-training",
          "NEOX_PIPELINE_LOG_DIR": "logs/checkpoint_pipeline", "NEOX_DATA_DIR": "data",
          "NEOX_BASE_TOKENIZER_DIR": "data/neox_tokenizer", "NEOX_TOKENIZER_DIR": "data/neox_tokenizer_instruct",
          "NEOX_CHAT_TEMPLATE_DIR": "data/neox_tokenizer_instruct"}  # fmt: skip
PAIRS = {"dataset_impl": "pairwise", "pack_impl": "unpacked", "eod_mask_loss": False, "data_path": None,
         "pos_train_data_paths": ["a"], "neg_train_data_paths": ["b"]}  # fmt: skip


@pytest.fixture
def job(tmp_path):
    """Source job.sh in a clone, as the batch files do, with a torch of which only the files are looked at."""
    clone = tmp_path / "neox"
    shutil.copytree(ROOT / "slurm", clone / "slurm")
    (clone / "megatron").symlink_to(ROOT / "megatron")
    (tmp_path / ".env").write_text("A_SECRET=tr0ub4dor\nB=$NOT_SET\n")

    def run(**env: str) -> tuple[dict[str, str], subprocess.CompletedProcess[str]]:
        job_variables = {
            "PYTHON": sys.executable,
            "LOCALDIR": "/local",
            "USER": "me",
            "PYTHONPATH": str(tmp_path / "packages"),
        }
        command = ["bash", "-c", JOB, "job", str(clone / "slurm" / "job.sh")]
        done = subprocess.run(command, env={**ENV, **job_variables, **env}, capture_output=True, text=True)
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line), done

    return run


def test_a_job_on_slingshot(job, tmp_path):
    torch_nccl = fake_torch(tmp_path / "packages", "2.28.9")
    old = library(tmp_path / "modules" / "libnccl.so.2", "2.26.6")
    job_env = {"NEOX_NODES": "8", "NCCL_ALGO": "", "FI_CXI_RX_MATCH_MODE": "soft", "TMPDIR": "/of/the/login/node"}
    variables, done = job(MODULES=str(Path(old).parent), **job_env)
    assert done.returncode == 0, done.stderr
    loaded = ["loaded PrgEnv-cray", "loaded cuda/12.6", "loaded brics/aws-ofi-nccl/1.8.1"]
    assert [*done.stdout.splitlines()[:3], done.stdout.splitlines()[-1]] == [*loaded, "secret of 9 letters"]
    assert "tr0ub4dor" not in done.stderr, "not under `bash -x` either"
    expected = SLINGSHOT | {name: f"/p/public/{place}" for name, place in PLACES.items()}
    expected |= {"NEOX_NODES": "8", "NEOX_NODES_PRETRAIN": "64", "FI_CXI_RX_MATCH_MODE": "soft"}
    expected |= {"NCCL_LIBRARY": torch_nccl, "LD_PRELOAD": torch_nccl}
    del expected["NCCL_ALGO"]
    assert {name: variables.get(name) for name in expected} == expected
    assert "NCCL_ALGO" not in variables, "set to nothing, it is left out"
    assert len(re.findall(rf"^NCCL: 2.28.9, .*\({torch_nccl}\); 2.26.6 .*\({old}\)", done.stderr, re.M)) == 1
    resubmitted, _ = job(MODULES=str(Path(old).parent), **variables)  # the job that this one submits has its variables
    assert "NCCL_ALGO" not in resubmitted and resubmitted["NCCL_PROTO"] == "^LL128"


def test_an_nccl_that_is_new_enough_is_preloaded(job, tmp_path):
    """The fork's stack: torch 2.5 with 2.21.5, and the module's 2.26.6."""
    fake_torch(tmp_path / "packages", "2.21.5")
    new = library(tmp_path / "modules" / "libnccl.so.2", "2.26.6")
    variables, _ = job(MODULES=str(Path(new).parent))
    assert (variables["NCCL_LIBRARY"], variables["LD_PRELOAD"]) == (new, new)


def test_what_is_missing_ends_the_job(job, tmp_path):
    fake_torch(tmp_path / "packages", "2.28.9")
    _, done = job(NEOX_MODULES="", NCCL_LIBRARY="/gone")
    assert done.returncode == 1 and "error: NCCL_LIBRARY=/gone" in done.stderr
    assert "module load brics/nccl/0 failed" in job(NEOX_MODULES="brics/nccl/0")[1].stderr


def test_every_variable_of_a_site_says_what_it_is_for():
    lines = (ROOT / "slurm/sites/isambard.sh").read_text().splitlines()
    bare = [line for line in lines if re.match("default (NCCL|FI|TORCH|MPICH|CUDA|PYTORCH|TRITON)_", line)]
    assert len(bare) > 30
    # Those of one meaning stand below each other, and the first says it.
    expected = ["FI_CXI_RDZV_GET_MIN", "FI_CXI_RDZV_THRESHOLD", "FI_CXI_RDZV_EAGER_SIZE"]
    assert [line.split()[1] for line in bare if " # " not in line] == expected


def test_commands_take_what_the_environment_says_before_the_site():
    site = site_variables({**ENV, "NEOX_DATA_DIR": "/d"})
    assert (site["NEOX_DATA_DIR"], site["NEOX_LOG_DIR"]) == ("/d", "/p/public/logs/neox-training")
    assert site_variables({}) == {}
    with pytest.raises(LaunchError, match=r"NEOX_SITE=mars: .*isambard, local"):
        site_variables({**ENV, "NEOX_SITE": "mars"})
    log = "/p/public/logs/neox-training/%x-%j.out"
    line = sbatch_line(NeoXArgs.from_dict(BASE), ENV)
    assert line == f"sbatch --nodes=64 --gres=gpu:4 --output={log} pretrain_neox.sbatch"
    with pytest.raises(LaunchError, match="NEOX_NODES_PRETRAIN='many'"):
        sbatch_line(NeoXArgs.from_dict(BASE), {**ENV, "NEOX_NODES_PRETRAIN": "many"})


MODEL, MIDTRAIN = "/configs/sft.yml", "/configs/midtraining_unlearning/midtraining/deep_ignorance/gdiff_N_2.yml"


@pytest.mark.parametrize(("keys", "config", "nodes"), [
    ({}, "/configs/125M.yml", 64),
    ({"load": "base"}, MODEL, 64),  # goes on
    ({"load": "base", "finetune": True}, MODEL, 16),
    ({"load": "hf://org/model"}, MODEL, 16),
    ({"train_impl": "dpo", **PAIRS}, MODEL, 16),
    ({"load": "base", "finetune": True}, MIDTRAIN, 64),
    ({"load": "base", "finetune": True}, "/configs/early_unlearning/tampering/ga_during_midtraining.yml", 16),
    ({"load": "base", "finetune": True}, "/configs/synthetic_alignment_mid.yml", 64),
])  # fmt: skip
def test_as_many_nodes_as_the_site_gives_to_this_kind_of_run(keys, config, nodes):
    args = NeoXArgs.from_dict({**BASE, **keys})
    assert site_nodes(starts_from_a_model(args), [config], site_variables(ENV))[0] == nodes
    assert site_nodes(starts_from_a_model(args), [config], {}) == (None, ANY)
