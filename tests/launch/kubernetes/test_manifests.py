"""Rendered manifests against the schemas of those who read them, and what stands in them."""

import copy
import re
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.launch.kubernetes import KINDS, as_yaml, pod_config, read_site, render
from megatron.neox_arguments.reading.yaml_loader import ConfigLoader
from tests.launch.kubernetes.schemas import CHECKS, complaints
from tests.launch.runs import ROOT
from tools.k8s import main

SITES = sorted((ROOT / "kubernetes" / "sites").glob("*.yml"))
CONTAINER = str(ROOT / "configs" / "container_setup.yml")


def documents(site: Path, *settings: str) -> list[dict[str, Any]]:
    read = read_site(site)
    manifests = render(read, pod_config([CONTAINER], read, settings), tuple(KINDS))
    return list(yaml.safe_load_all("".join(map(as_yaml, manifests))))


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.stem)
def test_every_manifest_passes_the_schemas(site: Path) -> None:
    bodies = documents(site)
    assert {body["kind"] for body in bodies} >= set(CHECKS)
    assert {f"{b['kind']} {b['metadata']['name']}": complaints(b) for b in bodies if complaints(b)} == {}


# Below these any name goes: labels, resources, variables.
FREE = {"labels", "annotations", "data", "matchLabels", "limits", "requests", "nodeSelector"}


def keys(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all keys that have a name of Kubernetes'."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in children:
        if isinstance(name, str):
            yield (*path, name)
        if name not in FREE:
            yield from keys(inner, (*path, name))


def misspelt(document: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    wrong = copy.deepcopy(document)
    *parents, name = path
    target = reduce(getitem, parents, wrong)
    target[name + name[-1]] = target.pop(name)
    return wrong


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.product)])
def test_typos_are_caught_by_the_schemas(stride: int) -> None:
    """In the first key of each name of a kind, or in some of these, of all kinds."""
    bodies = documents(SITES[0])
    places = {(body["kind"], path[-1]): (body, path) for body in reversed(bodies) for path in reversed([*keys(body)])}
    chosen = sorted(places)[::stride]
    assert {kind for kind, _ in chosen} == set(CHECKS) and len(places) > 100
    assert [place for place in chosen if not complaints(misspelt(*places[place]))] == []


def find_document(bodies: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    return next(body for body in bodies if body["kind"] == kind and name in body["metadata"]["name"])


def test_the_job_equals_the_known_one() -> None:
    """Replicas, resources, variables and claims of the image that it replaces."""
    bodies = documents(SITES[1])
    job = find_document(bodies, "PyTorchJob")["spec"]
    replicas = {name: replica["replicas"] for name, replica in job["pytorchReplicaSpecs"].items()}
    assert replicas == {"Master": 1, "Worker": 3}
    assert job["nprocPerNode"] == "1"
    for replica in job["pytorchReplicaSpecs"].values():
        [container] = replica["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"cpu": "6", "memory": "20Gi", "nvidia.com/gpu": "1"}
        assert {"name": "pytorchjob-port", "containerPort": 23456} in container["ports"]
        assert replica["template"]["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
        security = (replica["template"]["spec"]["securityContext"], container["securityContext"])
        assert security[0]["runAsNonRoot"] and not security[1]["allowPrivilegeEscalation"]
        assert "runAsUser" not in security[0] and "runAsUser" not in security[1], "OpenShift chooses it"
    variables = find_document(bodies, "ConfigMap", "environment")["data"]
    assert variables == {
        "EPOCHS": "4", "BATCH_SIZE": "8", "LEARNING_RATE": "5e-5", "WORLD_SIZE": "4", "MASTER_PORT": "23456",
        "NCCL_DEBUG": "INFO", "DATA_DIR": "/shared/data", "OUTPUT_DIR": "/shared/models",
        "HF_HOME": "/workspace/huggingface",
    }  # fmt: skip
    claims = {body["metadata"]["name"]: body["spec"] for body in bodies if body["kind"] == "PersistentVolumeClaim"}
    assert claims.keys() == {"trained-models-pvc", "workspace-pvc"}
    assert all(spec["accessModes"] == ["ReadWriteMany"] for spec in claims.values())
    trainer = find_document(bodies, "TrainJob")["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 1)
    assert trainer["command"] == container["command"]


def test_both_jobs_mount_what_they_name() -> None:
    for site in SITES:
        bodies = documents(site)
        maps = {body["metadata"]["name"] for body in bodies if body["kind"] == "ConfigMap"}
        runtime = find_document(bodies, "TrainingRuntime")["spec"]["template"]["spec"]["replicatedJobs"][0]
        pods = [runtime["template"]["spec"]["template"]["spec"]]
        pods += [
            r["template"]["spec"] for r in find_document(bodies, "PyTorchJob")["spec"]["pytorchReplicaSpecs"].values()
        ]
        assert find_document(bodies, "TrainJob")["spec"]["runtimeRef"]["name"] == read_site(site).name
        for pod in pods:
            [container] = pod["containers"]
            assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
            mounted = {v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v}
            assert mounted | {source["configMapRef"]["name"] for source in container["envFrom"]} == maps
            claims = {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
            assert claims == set(read_site(site).claims)


def test_secrets_and_variables_of_this_machine_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets are named and never written; variables get their values in the pods."""
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_machine")
    bodies = documents(SITES[1])
    assert "hf_of_this_machine" not in str(bodies)
    container = find_document(bodies, "PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"][
        "containers"
    ]
    reference = {"name": "neox-secrets", "key": "HF_TOKEN", "optional": True}
    assert container[0]["env"][0] == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}
    monkeypatch.setenv("EPOCHS", "many")
    bodies = documents(SITES[1])
    assert find_document(bodies, "ConfigMap", "config")["data"] == {"container_setup.yml": Path(CONTAINER).read_text()}
    assert "EPOCHS" in find_document(bodies, "ConfigMap", "config")["data"]["container_setup.yml"]


def test_kubectl_reads_every_text_as_a_text() -> None:
    """Kubernetes' YAML takes 5e-5 for a number, as our loader of configurations does, and PyYAML does not."""
    site = read_site(SITES[1])
    for manifest in render(site, pod_config([CONTAINER], site), tuple(KINDS)):
        text = as_yaml(manifest)
        assert yaml.load(text, Loader=ConfigLoader) == yaml.safe_load(text)
        assert not re.search(r": (y|n|yes|no|on|off)$", text, re.MULTILINE)


@pytest.mark.parametrize(("settings", "message"), [
    (["train_batch_size=6"], "train_batch_size: .*6 .* 8 x"),
    (["pipe_parallel_size=8"], "4 ranks .*pipe_parallel_size 8"),
    (["num_layer=3"], "num_layer: .*num_layers"),
    (["save=/tmp/run"], "save: /tmp/run .*claim"),
    (["save=null", "save_best=null", "save_hf=null", "demo_prompts=null"], "save: .*not set.*pod"),
    (["restart=true"], "restart: .*pod"),
    (["hostfile=hosts"], "hostfile: .*operator"),
    (["master_port=1234"], "master_port: .*operator"),
])  # fmt: skip
def test_what_pods_cannot_run_is_refused(settings: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", CONTAINER, "--site", str(SITES[1]), "--set", *settings]) == 1
    out, err = capsys.readouterr()
    assert out == "" and re.search(message, err) and "Traceback" not in err
    assert all(line.startswith("k8s.py: error: ") for line in err.splitlines())


def test_a_mistake_in_a_file_is_told_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(CONTAINER).read_text().replace("num_layers:", "num_layer:")
    (tmp_path / "a.yml").write_text(text)
    line = next(i for i, row in enumerate(text.splitlines(), 1) if row.startswith("num_layer:"))
    assert main(["render", str(tmp_path / "a.yml"), "--site", str(SITES[1])]) == 1
    assert re.search(f"{tmp_path}/a.yml:{line}: num_layer: .*num_layers", capsys.readouterr().err)


def test_files_and_settings_of_the_command(tmp_path: Path) -> None:
    first_file, second_file = tmp_path / "a" / "run.yml", tmp_path / "b" / "run.yml"
    for file, part in zip((first_file, second_file), Path(CONTAINER).read_text().split("# model:", 1), strict=True):
        file.parent.mkdir()
        file.write_text("# " + part)
    site = read_site(SITES[1])
    config = pod_config([str(first_file), str(second_file)], site)
    assert list(config.files) == ["1-run.yml", "2-run.yml"]
    assert config.command[:5] == ["python", "deepy.py", "train.py", "/etc/neox/1-run.yml", "/etc/neox/2-run.yml"]
    added = ("rendezvous_timeout_s=1800", "metrics_port=8000", "metrics_host=0.0.0.0")
    assert pod_config([CONTAINER], site).settings == added
    overrides = ["max_restarts=3", "rendezvous_timeout_s=60", "metrics_port=9000", "metrics_host=10.0.0.1"]
    config = pod_config([CONTAINER], site, overrides)
    assert (config.settings, config.metrics_port) == ((*overrides, "max_restarts=0"), 9000)


def test_the_command_writes_a_file_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["render", CONTAINER, "--site", str(SITES[0]), "--kind", "TrainJob", "--output", str(tmp_path / "out")]
    assert main(words) == 0
    files = sorted((tmp_path / "out").iterdir())
    assert [str(file) for file in files] == capsys.readouterr().out.splitlines()
    kinds = "Namespace PersistentVolumeClaim ConfigMap ConfigMap PodMonitor TrainingRuntime TrainJob".split()
    assert [yaml.safe_load(file.read_text())["kind"] for file in files] == kinds
    (tmp_path / "taken").write_text("")
    assert main([*words[:-1], str(tmp_path / "taken")]) == 1
    assert capsys.readouterr().err.count("k8s.py: error: ") == 1


def test_what_no_claim_has_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", CONTAINER, "--site", str(SITES[1])]) == 0
    (note,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("k8s.py: note: ")]
    assert "/shared/data (system_prompt_file, train_data_paths" in note and "--target baked" in note
    site = tmp_path / "site.yml"
    data = "claims:\n  datasets-pvc: {path: /shared/data, size: 100Gi}"
    site.write_text(re.sub(r"^claims:.*", data, SITES[1].read_text(), flags=re.MULTILINE))
    assert main(["render", CONTAINER, "--site", str(site)]) == 0
    assert not capsys.readouterr().err
