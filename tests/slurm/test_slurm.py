"""sbatch pretrain_neox.sbatch as it is typed in a real Slurm, and a site's nodes for a job without any."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpointing.test_huggingface import model_folder
from tests.launch.runs import write_program
from tests.launch.test_container import ENROOT
from tests.slurm.conftest import ROOT, Submitter, losses

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Losses of the same configuration as deepy.py trains it here, by number of ranks; trained once."""
    losses_by_ranks: dict[int, list[float]] = {}

    def run(path: Path, ranks: int) -> list[float]:
        if ranks not in losses_by_ranks:
            save = tmp_path_factory.mktemp("local") / "save"
            words = ["--num_gpus", str(ranks), "train.py", str(path), "--set", f"save={save}"]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, "deepy.py", *words], cwd=ROOT, env=env, check=True, timeout=120)
            losses_by_ranks[ranks] = losses(save)
        return losses_by_ranks[ranks]

    return run


@pytest.mark.parametrize(("options", "ranks"), [
    (("--ntasks-per-node=2",), 2),
    (("--nodes=2",), 2),
    (("--nodes=2", "--ntasks=3", "--ntasks-per-node=2"), 3),
], ids=["two tasks", "two nodes", "three tasks on two nodes"])  # fmt: skip
def test_trains_as_on_one_machine(slurm, write_config, local, options, ranks, tmp_path):
    path = write_config(train_batch_size=12)
    log = slurm.completed(slurm.submit(*options, "--gres=none", "pretrain_neox.sbatch", str(path)))
    assert losses(tmp_path / "save") == pytest.approx(local(path, ranks), rel=1e-6)
    # What people grep a job's log for.
    assert len(re.findall(r"iteration +\d+/ +6 .*lm_loss: ", log)) == 6
    assert re.search(f"save.*{tmp_path}/save", log)
    assert not re.search("error|exception|traceback", log, re.IGNORECASE)


@pytest.mark.parametrize("stop_kind", ["USR1", "requeue", "finetune"])
def test_told_to_stop_it_saves_is_queued_again_and_ends_as_if_it_had_not(
    slurm, write_config, local, stop_kind, tmp_path
):
    """finetune: the weights come from elsewhere once; a job that comes back goes on with its own."""
    keys = {"train_iters": 60, "checkpoint_factor": 1000, "train_batch_size": 12}
    if stop_kind == "finetune":
        base = write_config("base.yml", train_iters=2, checkpoint_factor=2, save=str(tmp_path / "base"))
        subprocess.run([sys.executable, "deepy.py", "train.py", str(base)], cwd=ROOT, check=True, timeout=120)
        keys |= {"load": str(tmp_path / "base"), "finetune": True}
    uninterrupted, save = tmp_path / "whole", tmp_path / "save"
    options = ("--gres=none", "--nodes=2", "--ntasks-per-node=1", "pretrain_neox.sbatch")
    slurm.wait(slurm.submit(*options, str(write_config("whole.yml", **keys, save=str(uninterrupted)))))
    job = slurm.submit(*options, str(write_config(**keys)))
    slurm.wait(job, lambda: len(re.findall("iteration +[1-9]", slurm.log(job))) >= 3)
    if stop_kind == "requeue":  # what a scheduler does when it wants the nodes back: no notice but SIGTERM
        slurm.cluster.run("scontrol", "requeue", job)
    else:
        slurm.cluster.run("scancel", "--signal=USR1", "--batch", job)
    slurm.wait(job, lambda: "Restarts=1" in slurm.record(job))
    log = slurm.completed(job)  # Slurm holds a job that comes back until its first credential has expired
    assert (save / "latest").read_text().strip() == "global_step60"
    assert losses(save) == losses(uninterrupted)
    if stop_kind != "requeue":
        assert f"job {job} is queued again" in log
        log_lines = "\n".join(line for line in log.splitlines() if "DUE TO JOB REQUEUE" not in line)  # slurmstepd's
        assert not re.search("error|exception|traceback", log_lines, re.IGNORECASE)


def test_other_names_options_and_secrets(slurm, write_config, tmp_path):
    (slurm.clone / ".env").write_text("NEOX_TEST_SECRET=tr0ub4dor\nWANDB_API_KEY='a b'\nB=$NOT_SET\n")
    path = write_config(train_iters=1)
    extra = ("--gres=none", "--cpus-per-task=32", "--mem=500G", "--job-name=my-run")
    job = slurm.submit(*extra, "pretrain_neox.sbatch", str(path), "--set", "hidden_size=16", NEOX_SITE="local")
    log = slurm.completed(job, "my-run")
    assert "tr0ub4dor" not in log and re.search(r"hidden_size.*16", log)
    assert re.search("mem=500G|MinMemoryNode=500G", slurm.record(job))
    script = "echo len ${#NEOX_TEST_SECRET}; type python"
    job = slurm.submit("--gres=none", "run_on_compute.sbatch", "bash", "-c", script)
    log = slurm.wait(job, name="run-on-compute")
    assert "len 9" in log and os.path.dirname(sys.executable) in log
    (slurm.clone / ".env").unlink()


@pytest.mark.parametrize(("words", "variables", "message"), [
    (("model.yml",), {}, "model.yml is a relative path"),
    ((), {}, "usage: sbatch"),
    (("/nowhere/model.yml",), {}, "/nowhere/model.yml"),
    (("/nowhere/model.yml",), {"NEOX_SITE": "mars"}, "no .*/mars.sh; there are: enroot.sh isambard.sh local.sh"),
    (("/nowhere/model.yml",), {"NEOX_SITE": "isambard"}, "PROJECTDIR.*is not set"),
])  # fmt: skip
def test_what_cannot_run_says_why(slurm, words, variables, message):
    job = slurm.submit("--gres=none", "pretrain_neox.sbatch", *words, **variables)
    log = slurm.wait(job)
    assert slurm.state(job) == "FAILED" and re.search(message, log), log


def test_gpus_that_torch_does_not_see(slurm, write_config):
    """Four are pretended here: a node whose driver is gone must not go on with its CPU."""
    job = slurm.submit("pretrain_neox.sbatch", str(write_config()))
    log = slurm.wait(job)
    assert slurm.state(job) == "FAILED" and re.search("4 GPUs, .*torch sees 0", log), log


def test_ranks_that_srun_starts_itself(slurm, write_config, local, tmp_path):
    """A batch file of one's own, without deepy.py."""
    path = write_config(train_batch_size=12)
    wrapped = f"srun --ntasks=2 {sys.executable} train.py {path}"
    slurm.completed(slurm.submit("--ntasks=2", "--output=logs/neox-training-%j.out", "--wrap", wrapped))
    assert losses(tmp_path / "save") == pytest.approx(local(path, 2), rel=1e-6)


def test_in_a_container(slurm, write_config, local, tmp_path):
    """The site of enroot, whose image has a Python and a shell but no Slurm; enroot itself is a stand-in."""
    (tmp_path / "image").mkdir()
    for name in ("sh", "env"):
        (tmp_path / "image" / name).symlink_to(f"/usr/bin/{name}")
    (tmp_path / "neox.sqsh").touch()
    write_program(tmp_path / "bin/enroot", ENROOT.replace("PATH=/usr/bin:/bin", f"PATH={tmp_path}/image"))
    variables = {
        "NEOX_SITE": "enroot", "NEOX_SHARED": str(tmp_path), "NEOX_CONTAINER": str(tmp_path / "neox.sqsh"),
        "NEOX_CONTAINER_PYTHON": sys.executable, "NOTES": str(tmp_path / "notes"),
        "PATH": f"{tmp_path}/bin:{slurm.cluster.environment['PATH']}",
    }  # fmt: skip
    path = write_config(train_batch_size=12)
    job = slurm.submit("--nodes=2", "--gres=none", "pretrain_neox.sbatch", str(path), **variables)
    slurm.wait(job)
    log = (tmp_path / f"logs/neox-training-{job}.out").read_text()
    assert slurm.state(job) == "COMPLETED", log
    assert losses(tmp_path / "save") == pytest.approx(local(path, 2), rel=1e-6)
    assert not re.search("error|exception|traceback", log, re.IGNORECASE)
    unpacked = f"neox-{int((tmp_path / 'neox.sqsh').stat().st_mtime)}"
    assert (tmp_path / "notes").read_text().count(f"start {unpacked}\n") == 2
    command = ("run_on_compute.sbatch", "python", "-c", "import os; print('sees', os.environ['PATH'])")
    (tmp_path / "image/python").symlink_to(sys.executable)
    job = slurm.submit("--gres=none", *command, **variables)
    slurm.wait(job)
    assert f"sees {tmp_path}/image\n" in (tmp_path / f"logs/run-on-compute-{job}.out").read_text()


def test_a_queued_job_is_found_by_its_name(slurm, write_config):
    job = slurm.submit("--gres=none", "--begin=now+1hour", "pretrain_neox.sbatch", str(write_config()))
    command = ("bash", "-c", "squeue -u $USER | grep neox-training")
    # squeue's own column has eight letters.
    columns = {"USER": "root", "SQUEUE_FORMAT": "%.18i %.9P %.20j %.8u %.2t %.10M %.6D %R"}
    assert slurm.cluster.run(*command, **columns).split()[0] == job
    slurm.cluster.run("scancel", job)


SITE = """\
export NEOX_NODES_PRETRAIN="${NEOX_NODES_PRETRAIN:-2}" NEOX_NODES="${NEOX_NODES:-1}"
export NEOX_LOG_DIR=FOLDER/logs NEOX_PIPELINE_LOG_DIR=FOLDER/pipeline NEOX_CHECKPOINT_DIR=FOLDER/checkpoints
export NEOX_MIDTRAINING='*_mid.yml'
"""


@pytest.fixture
def site(slurm: Submitter, tmp_path: Path):
    (slurm.clone / "slurm/sites/two.sh").write_text(SITE.replace("FOLDER", str(tmp_path)))

    def log(job: str, name: str = "neox-training", folder: str = "logs") -> str:
        return (tmp_path / folder / f"{name}-{job}.out").read_text()

    return log


def submitted(log: str) -> list[str]:
    return re.findall(r"^Submitted batch job (\d+)$", log, re.MULTILINE)


def last_job(slurm: Submitter) -> int:
    return max(int(number) for number in re.findall(r"JobId=(\d+)", slurm.cluster.run("scontrol", "show", "job")))


def test_without_nodes_it_is_submitted_again_once(slurm, site, write_config, tmp_path):
    path = write_config(train_batch_size=12)
    job = slurm.submit("--gres=none", "pretrain_neox.sbatch", str(path), "--set", "train_iters=3", NEOX_SITE="two")
    assert "The log goes on in" in slurm.wait(job)
    assert slurm.state(job) == "COMPLETED"
    (new,) = submitted(site(job))
    assert "no --nodes: pre-training has 2 nodes at site two\n" in site(job)
    slurm.wait(new)
    assert slurm.state(new) == "COMPLETED", site(new)
    assert "NumNodes=2" in slurm.record(new) and "JobName=neox-training" in slurm.record(new)
    assert not re.search("error|exception|traceback", site(job) + site(new), re.IGNORECASE)
    assert not submitted(site(new)) and last_job(slurm) == int(new)
    assert len(losses(tmp_path / "save")) == 3
    assert "world size" not in site(job) and re.search(r"iteration +3/ +3 .*lm_loss: ", site(new))


@pytest.mark.parametrize("nodes", ["--nodes=1", "-N2"])
def test_typed_nodes_are_used(slurm, site, write_config, nodes):
    path = write_config(train_iters=1, train_batch_size=12)
    job = slurm.submit(nodes, "--gres=none", "pretrain_neox.sbatch", str(path), NEOX_SITE="two")
    slurm.wait(job)
    assert slurm.state(job) == "COMPLETED", site(job)
    assert f"NumNodes={nodes[-1]} " in slurm.record(job)
    assert not submitted(site(job)) and last_job(slurm) == int(job)


def test_from_within_another_job(slurm, site, write_config):
    """SLURM_NTASKS and the like are those of the other one; NEOX_SUBMITTED_BY ends with its own job."""
    path = write_config(train_iters=1, train_batch_size=12)
    inherited = {"SLURM_NTASKS": "1", "SLURM_NPROCS": "1", "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1"}
    job = slurm.submit("--gres=none", "pretrain_neox.sbatch", str(path), NEOX_SITE="two", **inherited)
    slurm.wait(job)
    (new,) = submitted(site(job))
    slurm.wait(new)
    assert slurm.state(new) == "COMPLETED" and "NumNodes=2" in slurm.record(new)


def test_what_was_asked_for_besides_is_asked_for_again(slurm, site, write_config, tmp_path):
    path = write_config("align_mid.yml", train_iters=1, train_batch_size=12, load=str(tmp_path), finetune=True)
    options = ("--job-name=my-run", "--cpus-per-task=32", "--mem=500G", "--time=60", "--comment=two words")
    options += ("--gres=gpu:2", f"--output={tmp_path}/%x-%j.log", f"--error={tmp_path}/%j.err")
    job = slurm.submit(*options, "pretrain_neox.sbatch", str(path), NEOX_SITE="two", SBATCH_NO_REQUEUE="1")
    slurm.wait(job)
    log = tmp_path / f"my-run-{job}.log"
    assert "mid-training has 2 nodes" in log.read_text()
    (new,) = submitted(log.read_text())
    slurm.wait(new)  # it fails: there is no checkpoint, nor a GPU
    job_record = slurm.record(new)
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
