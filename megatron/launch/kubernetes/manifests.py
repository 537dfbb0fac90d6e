"""Renders the Kubernetes objects of a job.

They are a namespace, volume claims, ConfigMaps, a PodMonitor, and the job itself for Kubeflow's Training
Operator (PyTorchJob) or Trainer (TrainJob).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from megatron.launch.kubernetes.config_files import FOLDER, PodConfig
from megatron.launch.kubernetes.site import Site

Json = dict[str, Any]

GRACE_S = 300  # from SIGTERM to SIGKILL: for the step to end and a checkpoint to be written
_ENVIRONMENT_NOTE = """\
# Variables that are the same in all pods. The operator gives each pod MASTER_ADDR, MASTER_PORT and its index
# (PyTorchJob: RANK and WORLD_SIZE; both: PET_NODE_RANK, PET_NNODES, PET_NPROC_PER_NODE), which win over the
# variables here; deepy.py gives each rank its RANK, LOCAL_RANK and WORLD_SIZE. An index must not be set here:
# all pods would have the same one.
"""
_PYTORCHJOB_NOTE = """\
# restartPolicy OnFailure restarts only the container that failed. When a pod is lost, deepy.py ends the ranks of all
# pods with an error, so all containers restart, meet again, and resume from the last checkpoint.
# backoffLimit counts the restarts of all containers.
"""
_RUNTIME_NOTE = """\
# A pod that ends with an error fails its job (backoffLimit 0), and the job set restarts all pods (maxRestarts).
"""


@dataclass(frozen=True)
class Manifest:
    """One Kubernetes object. body: its fields. note: comment lines above it in the YAML file."""

    body: Mapping[str, Any]
    note: str = ""

    @property
    def file_name(self) -> str:
        """Returns the name of the object's file, such as `pytorchjob-neox.yaml`."""
        return f"{self.body['kind'].lower()}-{self.body['metadata']['name']}.yaml"


def render(site: Site, config: PodConfig, kinds: tuple[str, ...] = ("PyTorchJob",)) -> list[Manifest]:
    """Returns the Kubernetes objects of a job in the order in which to apply them. kinds: the kinds of job to
    render, from KINDS."""
    documents = [
        _manifest("v1", "Namespace", {"name": site.namespace}),
        *(_claim(site, name) for name, claim in site.claims.items() if claim["size"]),
        _manifest("v1", "ConfigMap", _metadata(site, _environment_map(site)), _ENVIRONMENT_NOTE,
                  data=site.environment()),
        _manifest("v1", "ConfigMap", _metadata(site, _config_map(site)), data=dict(config.files)),
    ]  # fmt: skip
    for kind in kinds:
        documents += KINDS[kind](site, config)
    return documents


def as_yaml(manifest: Manifest) -> str:
    """Returns the object as a YAML document, starting with `---`."""
    text = yaml.dump(dict(manifest.body), Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return f"---\n{manifest.note}{text}"


def _manifest(version: str, kind: str, metadata: Json, note: str = "", **fields: Any) -> Manifest:
    """Returns a Kubernetes object. version: its apiVersion. note: comment lines above it. fields: `spec` or
    `data`."""
    return Manifest({"apiVersion": version, "kind": kind, "metadata": metadata, **fields}, note)


def _claim(site: Site, name: str) -> Manifest:
    spec: Json = {
        "accessModes": ["ReadWriteMany"],  # all pods read and write it, on whatever node they are
        "resources": {"requests": {"storage": site.claims[name]["size"]}},
    }
    if site.storage_class is not None:
        spec["storageClassName"] = site.storage_class
    # Without the job's labels: the claim outlives the job, and other jobs share it.
    return _manifest("v1", "PersistentVolumeClaim", {"name": name, "namespace": site.namespace}, spec=spec)


def _pytorchjob(site: Site, config: PodConfig) -> list[Manifest]:
    def replica(count: int, scraped: bool) -> Json:
        container = _container_details(site, config, scraped)
        port = int(site.environment()["MASTER_PORT"])
        container["ports"].append(
            {"name": "pytorchjob-port", "containerPort": port}
        )  # the operator sets MASTER_PORT to it
        main: Json = {"name": "pytorch", "image": site.image}  # the name that the operator looks for
        main |= {"command": config.command, "resources": _resources(site), **container}
        metadata = _pod_metadata(site, config.metrics_port if scraped else None)
        return {
            "replicas": count, "restartPolicy": "OnFailure",
            "template": {"metadata": metadata, "spec": _pod_spec(site, main)},
        }  # fmt: skip

    replicas = {"Master": replica(1, True)}
    if site.replicas > 1:
        replicas["Worker"] = replica(site.replicas - 1, False)
    spec = {
        "nprocPerNode": str(site.gpus),
        "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": site.restarts * site.replicas},
        "pytorchReplicaSpecs": replicas,
    }
    rank_0 = {"training.kubeflow.org/job-name": site.name, "training.kubeflow.org/replica-type": "master"}
    job = _manifest("kubeflow.org/v1", "PyTorchJob", _job_metadata(site), _PYTORCHJOB_NOTE, spec=spec)
    return [*_pod_monitor(site, config, "pytorchjob", rank_0), job]


def _trainjob(site: Site, config: PodConfig) -> list[Manifest]:
    pod = _pod_spec(site, {"name": "node", **_container_details(site, config)})  # the name that the operator looks for
    template = {"metadata": _pod_metadata(site, config.metrics_port), "spec": {"restartPolicy": "Never", **pod}}
    job = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "template": template},
        },
    }
    metadata = _metadata(site, site.name)
    metadata["labels"]["trainer.kubeflow.org/framework"] = "torch"
    runtime = {
        "mlPolicy": {"numNodes": site.replicas, "torch": {}},
        "template": {"spec": {"failurePolicy": {"maxRestarts": site.restarts}, "replicatedJobs": [job]}},
    }
    train_job = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": site.name},
        "trainer": {
            "numNodes": site.replicas, "numProcPerNode": site.gpus, "image": site.image, "command": config.command,
            "resourcesPerNode": _resources(site),
        },
    }  # fmt: skip
    rank_0 = {"jobset.sigs.k8s.io/jobset-name": site.name, "batch.kubernetes.io/job-completion-index": "0"}
    version = "trainer.kubeflow.org/v1alpha1"
    return [
        *_pod_monitor(site, config, "trainjob", rank_0),
        _manifest(version, "TrainingRuntime", metadata, _RUNTIME_NOTE, spec=runtime),
        _manifest(version, "TrainJob", _job_metadata(site), spec=train_job),
    ]


KINDS: Mapping[str, Callable[[Site, PodConfig], list[Manifest]]] = {"PyTorchJob": _pytorchjob, "TrainJob": _trainjob}
"""The kinds of job, each with the function that returns its Kubernetes objects."""


def _pod_monitor(site: Site, config: PodConfig, kind: str, rank_0: Mapping[str, str]) -> list[Manifest]:
    """Returns the PodMonitor by which OpenShift's monitoring of user workloads finds the metrics; [] if the
    run serves none.

    kind: the suffix of the PodMonitor's name.
    rank_0: labels of the pod that serves metrics.
    """
    if not config.metrics_port:
        return []
    spec = {
        "selector": {"matchLabels": dict(rank_0)},
        "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics", "interval": "30s"}],
    }
    return [_manifest("monitoring.coreos.com/v1", "PodMonitor", _metadata(site, f"{site.name}-{kind}"), spec=spec)]


def _metadata(site: Site, name: str) -> Json:
    return {"name": name, "namespace": site.namespace, "labels": _labels(site)}


def _job_metadata(site: Site) -> Json:
    metadata = _metadata(site, site.name)
    if site.queue is not None:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = site.queue
    return metadata


def _labels(site: Site) -> Json:
    """Returns the labels of all objects of a job."""
    return {"app.kubernetes.io/name": "neox", "app.kubernetes.io/instance": site.name, **site.labels}


def _pod_metadata(site: Site, scraped_port: int | None = None) -> Json:
    """Returns the labels and annotations of a pod.

    scraped_port: the metrics port, which annotations tell Prometheus; None: no such annotations.
    """
    annotations = {"sidecar.istio.io/inject": "false"}  # its proxy would stand between the ranks
    if scraped_port is not None:
        annotations |= {
            "prometheus.io/scrape": "true", "prometheus.io/port": str(scraped_port), "prometheus.io/path": "/metrics",
        }  # fmt: skip
    return {"labels": _labels(site), "annotations": {**annotations, **site.annotations}}


def _pod_spec(site: Site, container: Json) -> Json:
    """Returns the spec of a pod with this container. The spec sets no user id, so that the cluster chooses it
    (OpenShift: at random)."""
    volumes: list[Json] = [
        *({"name": name, "persistentVolumeClaim": {"claimName": name}} for name in site.claims),
        {"name": "config", "configMap": {"name": _config_map(site)}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": site.shared_memory}},
    ]
    spec: Json = {
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": volumes,
    }
    if site.node_selector:
        spec["nodeSelector"] = dict(site.node_selector)
    if site.image_pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": site.image_pull_secret}]
    return spec


def _container_details(site: Site, config: PodConfig, scraped: bool = True) -> Json:
    """Returns a container without name and command: environment, ports, mounts and security context.

    scraped: whether rank 0 may run in this container. Only then the metrics port is opened.
    """
    # Port 0 lets the system choose a port, which nobody would know.
    has_port = config.metrics_port and scraped
    mounts: list[Json] = [
        *({"name": name, "mountPath": path} for name, path in site.volumes().items()),
        {"name": "config", "mountPath": str(FOLDER), "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    return {
        "envFrom": [{"configMapRef": {"name": _environment_map(site)}}],
        "env": [_from_secret(variable, str(place)) for variable, place in site.secrets.items()],
        "ports": [{"name": "metrics", "containerPort": config.metrics_port}] if has_port else [],
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def _resources(site: Site) -> Json:
    """Returns the resources of each pod: requests, and limits equal to them."""
    amounts = {"cpu": str(site.cpus), "memory": site.memory, site.gpu_resource: str(site.gpus)}
    return {"requests": amounts, "limits": dict(amounts)}


def _environment_map(site: Site) -> str:
    """Returns the name of the ConfigMap that holds the environment variables."""
    return f"{site.name}-environment"


def _config_map(site: Site) -> str:
    """Returns the name of the ConfigMap that holds the configuration files."""
    return f"{site.name}-config"


def _from_secret(variable: str, place: str) -> Json:
    """Returns an environment variable whose value comes from a secret. If the secret does not exist, the
    variable is unset.

    place: `SECRET/KEY`.
    """
    name, _, key = place.partition("/")
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key, "optional": True}}}


class _Dumper(yaml.SafeDumper):
    """Writes readable YAML: multi-line texts as blocks, and repeated values in full instead of anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # kubectl's YAML reads 5e-5 as a number and y as true, PyYAML does not: such texts are quoted.
    unquoted = re.fullmatch(r"[A-Za-z/_-]{2}.*", text)
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None if unquoted else "'"
    )


_Dumper.add_representer(str, _text)
