"""A site in a real Slurm: its nodes for a job without --nodes, its logs, its checkpoints."""

import re
from pathlib import Path

import pytest

from tests.checkpointing.test_huggingface import model_folder
from tests.slurm.conftest import Submitter, losses

pytestmark = pytest.mark.slurm
SITE = """\
export NEOX_NODES_PRETRAIN="${NEOX_NODES_PRETRAIN:-2}" NEOX_NODES="${NEOX_NODES:-1}"
export NEOX_LOG_DIR=FOLDER/logs NEOX_PIPELINE_LOG_DIR=FOLDER/pipeline NEOX_CHECKPOINT_DIR=FOLDER/checkpoints
export NEOX_MIDTRAINING='*_mid.yml'
"""


@pytest.fixture
def site(slurm: Submitter, tmp_path: Path):
    """A site of the clone; its logs by job."""
    (slurm.clone / "slurm/sites/two.sh").write_text(SITE.replace("FOLDER", str(tmp_path)))

    def log(job: str, name: str = "neox-training", folder: str = "logs") -> str:
        return (tmp_path / folder / f"{name}-{job}.out").read_text()

    return log


def submitted(log: str) -> list[str]:
    return re.findall(r"^Submitted batch job (\d+)$", log, re.MULTILINE)


def last_job(slurm: Submitter) -> int:
    return max(int(number) for number in re.findall(r"JobId=(\d+)", slurm.cluster.run("scontrol", "show", "job")))


def shown(slurm: Submitter, job: str) -> str:
    return slurm.cluster.run("scontrol", "show", "job", job)


def test_without_nodes_it_is_submitted_again_once(slurm, site, write_config, tmp_path):
    path = write_config(train_batch_size=12)
    job = slurm.submit("--gres=none", "pretrain_neox.sbatch", str(path), "--set", "train_iters=3", NEOX_SITE="two")
    assert "The log goes on in" in slurm.wait(job)
    assert slurm.state(job) == "COMPLETED"
    (new,) = submitted(site(job))
    assert "no --nodes: pre-training has 2 nodes at site two\n" in site(job)
    slurm.wait(new)
    assert slurm.state(new) == "COMPLETED", site(new)
    assert "NumNodes=2" in shown(slurm, new) and "JobName=neox-training" in shown(slurm, new)
    assert not re.search("error|exception|traceback", site(job) + site(new), re.IGNORECASE)
    assert not submitted(site(new)) and last_job(slurm) == int(new)
    assert len(losses(tmp_path / "save")) == 3
    assert "world size" not in site(job) and re.search(r"iteration +3/ +3 .*lm_loss: ", site(new))


@pytest.mark.parametrize("nodes", ["--nodes=1", "-N2"])
def test_nodes_that_are_typed_are_kept(slurm, site, write_config, nodes):
    path = write_config(train_iters=1, train_batch_size=12)
    job = slurm.submit(nodes, "--gres=none", "pretrain_neox.sbatch", str(path), NEOX_SITE="two")
    slurm.wait(job)
    assert slurm.state(job) == "COMPLETED", site(job)
    assert f"NumNodes={nodes[-1]} " in shown(slurm, job)
    assert not submitted(site(job)) and last_job(slurm) == int(job)


def test_from_within_another_job(slurm, site, write_config):
    """SLURM_NTASKS and the like are those of the other one; NEOX_SUBMITTED_BY ends with its own job."""
    path = write_config(train_iters=1, train_batch_size=12)
    inherited = {"SLURM_NTASKS": "1", "SLURM_NPROCS": "1", "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1"}
    job = slurm.submit("--gres=none", "pretrain_neox.sbatch", str(path), NEOX_SITE="two", **inherited)
    slurm.wait(job)
    (new,) = submitted(site(job))
    slurm.wait(new)
    assert slurm.state(new) == "COMPLETED" and "NumNodes=2" in shown(slurm, new)


def test_what_was_asked_for_besides_is_asked_for_again(slurm, site, write_config, tmp_path):
    path = write_config("align_mid.yml", train_iters=1, train_batch_size=12, load=str(tmp_path), finetune=True)
    typed = ("--job-name=my-run", "--cpus-per-task=32", "--mem=500G", "--time=60", "--comment=two words")
    typed += ("--gres=gpu:2", f"--output={tmp_path}/%x-%j.log", f"--error={tmp_path}/%j.err")
    job = slurm.submit(*typed, "pretrain_neox.sbatch", str(path), NEOX_SITE="two", SBATCH_NO_REQUEUE="1")
    slurm.wait(job)
    log = tmp_path / f"my-run-{job}.log"
    assert "mid-training has 2 nodes" in log.read_text()
    (new,) = submitted(log.read_text())
    slurm.wait(new)  # it fails: there is no checkpoint, nor a GPU
    job_record = shown(slurm, new)
    for fact in ("JobName=my-run", "NumNodes=2", "CPUs/Task=32", "MinMemoryNode=500G", "TimeLimit=01:00:00",
                 "Comment=two words", "gpu:2", "Requeue=0", f"StdOut={tmp_path}/my-run-{new}.log",
                 f"StdErr={tmp_path}/{new}.err", f"WorkDir={slurm.clone}"):  # fmt: skip
        assert fact in job_record, job_record


def test_a_conversion_has_the_environment_and_the_site(slurm, site, tmp_path):
    model = model_folder(tmp_path / "model", "gpt_neox")
    (slurm.clone / ".env").write_text(f"PYTHON={slurm.variables['PYTHON']}\nTP=2\n")
    script = "huggingface/convert_hf_to_neox.sbatch"
    job = slurm.submit("--cpus-per-task=1", script, str(model), "12", NEOX_SITE="two", PYTHON="")
    slurm.wait(job, name="convert_hf_to_neox")
    (slurm.clone / ".env").unlink()
    assert slurm.state(job) == "COMPLETED", site(job, "convert_hf_to_neox", "pipeline")
    assert "gpt_neox" in site(job, "convert_hf_to_neox", "pipeline")
    assert (tmp_path / "checkpoints/model/latest").read_text().strip() == "global_step12"
    assert len(list((tmp_path / "checkpoints/model/global_step12").glob("layer_00-model_*"))) == 2
