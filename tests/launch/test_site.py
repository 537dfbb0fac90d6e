"""What belongs to a cluster: its file as jobs and tools read it. No Slurm is needed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.launch import LaunchError
from megatron.launch.site import site_variables
from megatron.launch.slurm import sbatch_line
from megatron.neox_arguments import NeoXArgs
from tests.training.runs import BASE

ROOT = Path(__file__).resolve().parents[2]
# What a cluster's shell has: `module`, which puts a library on LD_LIBRARY_PATH.
JOB = """\
module() { [ "$1 $2" = "load brics/nccl/2.26.6-1" ] && export LD_LIBRARY_PATH=$MODULES; }
set -x
source "$1" || exit 1
set +x
for name in NCCL_NET FI_PROVIDER NCCL_CROSS_NIC NCCL_NET_GDR_LEVEL NCCL_SOCKET_IFNAME FI_MR_CACHE_MONITOR \\
    NCCL_LIBRARY LD_PRELOAD NEOX_CHECKPOINT_DIR NEOX_NODES; do
    printf '%s=%s\\n' "$name" "${!name:-}"
done
printf 'secret of %s letters\\n' "${#A_SECRET}"
"""
PAIRS = {
    "dataset_impl": "pairwise", "pack_impl": "unpacked", "eod_mask_loss": False, "data_path": None,
    "pos_train_data_paths": ["a"], "neg_train_data_paths": ["b"],
}  # fmt: skip


@pytest.fixture
def job(tmp_path):
    """Source job.sh in a clone, as the batch files do."""
    clone = tmp_path / "neox"
    shutil.copytree(ROOT / "slurm", clone / "slurm")
    (tmp_path / ".env").write_text("A_SECRET=tr0ub4dor\nB=$NOT_SET\n")

    def run(**env: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": "/usr/bin:/bin", "PYTHON": "python3", "NEOX_SITE": "isambard", "PROJECTDIR": "/p", **env}
        command = ["bash", "-c", JOB, "job", str(clone / "slurm" / "job.sh")]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    return run


def test_a_job_on_slingshot(job, tmp_path):
    library = tmp_path / "modules" / "libnccl.so.2"
    library.parent.mkdir()
    library.touch()
    done = job(MODULES=str(library.parent), NEOX_NODES="8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "NCCL_NET=AWS Libfabric",
        "FI_PROVIDER=cxi",
        "NCCL_CROSS_NIC=1",
        "NCCL_NET_GDR_LEVEL=PHB",
        "NCCL_SOCKET_IFNAME=hsn",
        "FI_MR_CACHE_MONITOR=userfaultfd",
        f"NCCL_LIBRARY={library}",
        f"LD_PRELOAD={library}",
        "NEOX_CHECKPOINT_DIR=/p/public/checkpoints",
        "NEOX_NODES=8",
        "secret of 9 letters",
    ]
    assert "tr0ub4dor" not in done.stderr, "not under `bash -x` either"


def test_what_is_missing_ends_the_job(job, tmp_path):
    done = job(MODULES=str(tmp_path))
    assert done.returncode == 1
    assert "error: the system's NCCL is not found" in done.stderr
    assert "module load brics/nccl/0 failed" in job(NEOX_MODULES="brics/nccl/0").stderr


def test_commands_take_what_the_environment_says_before_the_site():
    env = {"PATH": "/usr/bin:/bin", "NEOX_SITE": "isambard", "PROJECTDIR": "/p", "NEOX_DATA_DIR": "/d"}
    site = site_variables(env)
    assert (site["NEOX_DATA_DIR"], site["NEOX_CHAT_TEMPLATE_DIR"]) == ("/d", "/p/public/chat_templates")
    assert site_variables({}) == {}
    with pytest.raises(LaunchError, match=r"NEOX_SITE=mars: there is no .*; there are isambard, local"):
        site_variables({**env, "NEOX_SITE": "mars"})


@pytest.mark.parametrize(("keys", "nodes"), [({}, 64), ({"train_impl": "dpo", **PAIRS}, 16)])
def test_as_many_nodes_as_the_site_gives_to_this_kind_of_run(keys, nodes):
    env = {"PATH": "/usr/bin:/bin", "NEOX_SITE": "isambard", "PROJECTDIR": "/p"}
    line = sbatch_line(NeoXArgs.from_dict({**BASE, **keys}), env)
    log = "/p/public/logs/neox-training/%x-%j.out"
    assert line == f"sbatch --nodes={nodes} --gres=gpu:4 --output={log} pretrain_neox.sbatch"
