"""The documents of a job: a namespace, claims, ConfigMaps, what monitoring reads, and the job itself for
Kubeflow's Training Operator (PyTorchJob) or Trainer (TrainJob)."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from megatron.launch.kubernetes.config_files import PodConfig
from megatron.launch.kubernetes.pods import (
    Json,
    config_map,
    container_details,
    environment_map,
    labels,
    pod_metadata,
    pod_spec,
    resources,
)
from megatron.launch.kubernetes.site import Site

_ENVIRONMENT_NOTE = """\
# What is the same for all pods. The operator gives each pod MASTER_ADDR, MASTER_PORT and its place
# (PyTorchJob: RANK and WORLD_SIZE; both: PET_NODE_RANK, PET_NNODES, PET_NPROC_PER_NODE), which come before
# these; deepy.py gives each rank its RANK, LOCAL_RANK and WORLD_SIZE. None of those may stand here: every pod
# would take itself for the same one.
"""
_PYTORCHJOB_NOTE = """\
# restartPolicy OnFailure starts a container that ended again, alone. When a pod is lost deepy.py ends the ranks of all
# pods with an error, so all containers start again, meet again, and go on from the last checkpoint.
# backoffLimit counts the restarts of all containers.
"""
_RUNTIME_NOTE = """\
# A pod that ends with an error fails its job (backoffLimit 0), and the job set starts all pods anew (maxRestarts).
"""


@dataclass(frozen=True)
class Manifest:
    """One Kubernetes object. body: its fields. note: comment lines above it."""

    body: Mapping[str, Any]
    note: str = ""

    @property
    def file_name(self) -> str:
        """Returns the name of the object's file, such as `pytorchjob-neox.yaml`."""
        return f"{self.body['kind'].lower()}-{self.body['metadata']['name']}.yaml"


def render(site: Site, config: PodConfig, kinds: tuple[str, ...] = ("PyTorchJob",)) -> list[Manifest]:
    """Returns the Kubernetes objects of a job in the order in which to apply them. kinds: the kinds of job to
    render, from KINDS."""
    documents = [_namespace(site), *(_claim(site, name) for name, claim in site.claims.items() if claim["size"])]
    documents += [_environment(site), _config(site, config)]
    for kind in kinds:
        documents += KINDS[kind](site, config)
    return documents


def as_yaml(manifest: Manifest) -> str:
    """Returns the object as a YAML document, starting with `---`."""
    text = yaml.dump(dict(manifest.body), Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return f"---\n{manifest.note}{text}"


def _namespace(site: Site) -> Manifest:
    return Manifest({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": site.namespace}})


def _claim(site: Site, name: str) -> Manifest:
    spec: Json = {
        "accessModes": ["ReadWriteMany"],  # all pods read and write it, on whatever node they are
        "resources": {"requests": {"storage": site.claims[name]["size"]}},
    }
    if site.storage_class is not None:
        spec["storageClassName"] = site.storage_class
    # Not labelled as the job's: it outlives it, and other jobs share it.
    metadata = {"name": name, "namespace": site.namespace}
    return Manifest({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec})


def _environment(site: Site) -> Manifest:
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(site, environment_map(site))}
    return Manifest({**body, "data": site.environment()}, _ENVIRONMENT_NOTE)


def _config(site: Site, config: PodConfig) -> Manifest:
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(site, config_map(site))}
    return Manifest({**body, "data": dict(config.files)})


def _pytorchjob(site: Site, config: PodConfig) -> list[Manifest]:
    def replica(count: int, scraped: bool) -> Json:
        container = container_details(site, config, "pytorch", scraped)  # the name that the operator looks for
        port = int(site.environment()["MASTER_PORT"])
        container["ports"].append({"name": "pytorchjob-port", "containerPort": port})  # it makes MASTER_PORT of this
        spec = {"image": site.image, "command": config.command, "resources": resources(site)}
        return {
            "replicas": count,
            "restartPolicy": "OnFailure",
            "template": {
                "metadata": pod_metadata(site, config.metrics_port if scraped else None),
                "spec": pod_spec(site, config, {"name": container.pop("name"), **spec, **container}),
            },
        }

    replicas = {"Master": replica(1, True)}
    if site.replicas > 1:
        replicas["Worker"] = replica(site.replicas - 1, False)
    spec = {
        "nprocPerNode": str(site.gpus),
        "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": site.restarts * site.replicas},
        "pytorchReplicaSpecs": replicas,
    }
    body = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": _job_metadata(site), "spec": spec}
    rank_0 = {"training.kubeflow.org/job-name": site.name, "training.kubeflow.org/replica-type": "master"}
    return [*_pod_monitor(site, config, "pytorchjob", rank_0), Manifest(body, _PYTORCHJOB_NOTE)]


def _trainjob(site: Site, config: PodConfig) -> list[Manifest]:
    container = container_details(site, config, "node")  # the name that the operator looks for
    pod = pod_spec(site, config, container)
    job = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": 0,
                "template": {
                    "metadata": pod_metadata(site, config.metrics_port),
                    "spec": {"restartPolicy": "Never", **pod},
                },
            },
        },
    }
    metadata = _metadata(site, site.name)
    metadata["labels"]["trainer.kubeflow.org/framework"] = "torch"
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata,
        "spec": {
            "mlPolicy": {"numNodes": site.replicas, "torch": {}},
            "template": {"spec": {"failurePolicy": {"maxRestarts": site.restarts}, "replicatedJobs": [job]}},
        },
    }
    body = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _job_metadata(site),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": site.name},
            "trainer": {
                "numNodes": site.replicas,
                "numProcPerNode": site.gpus,
                "image": site.image,
                "command": config.command,
                "resourcesPerNode": resources(site),
            },
        },
    }
    rank_0 = {"jobset.sigs.k8s.io/jobset-name": site.name, "batch.kubernetes.io/job-completion-index": "0"}
    monitor = _pod_monitor(site, config, "trainjob", rank_0)
    return [*monitor, Manifest(runtime, _RUNTIME_NOTE), Manifest(body)]


KINDS: Mapping[str, Callable[[Site, PodConfig], list[Manifest]]] = {"PyTorchJob": _pytorchjob, "TrainJob": _trainjob}
"""Jobs by their kind: what is to be applied for one."""


def _pod_monitor(site: Site, config: PodConfig, kind: str, rank_0: Mapping[str, str]) -> list[Manifest]:
    """Returns the PodMonitor for OpenShift's monitoring of user workloads, which ignores annotations; [] if
    there are no metrics.

    kind: the end of its name.
    rank_0: labels of the pod that serves metrics.
    """
    if not config.metrics_port:
        return []
    body = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _metadata(site, f"{site.name}-{kind}"),
        "spec": {
            "selector": {"matchLabels": dict(rank_0)},
            "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics", "interval": "30s"}],
        },
    }
    return [Manifest(body)]


def _metadata(site: Site, name: str) -> Json:
    return {"name": name, "namespace": site.namespace, "labels": labels(site)}


def _job_metadata(site: Site) -> Json:
    metadata = _metadata(site, site.name)
    if site.queue is not None:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = site.queue
    return metadata


class _Dumper(yaml.SafeDumper):
    """Writes readable YAML: multi-line texts as blocks, and repeated values in full instead of anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # kubectl's YAML takes 5e-5 for a number and y for true, which PyYAML does not: such text in quotes.
    unquoted = re.fullmatch(r"[A-Za-z/_-]{2}.*", text)
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None if unquoted else "'"
    )


_Dumper.add_representer(str, _text)
