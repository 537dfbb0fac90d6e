"""Checks manifests by the schemas of the API server and of Kubeflow's operators."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes_validate
from kubeflow.training import models as v1
from kubeflow_trainer_api import models as v2

RELEASE = "1.33"
# spec of PodMonitor (prometheus-operator 0.91): the properties of each level, {} for text and numbers.
_POD_MONITOR: dict[str, Any] = {
    "selector": {"matchLabels": dict, "matchExpressions": list},
    "podMetricsEndpoints": [{name: {} for name in (
        "port", "portNumber", "path", "interval", "scheme", "scrapeTimeout", "honorLabels", "honorTimestamps")}],
    "namespaceSelector": {"any": {}, "matchNames": list},
    "jobLabel": {}, "podTargetLabels": list, "sampleLimit": {},
}  # fmt: skip


def complaints(document: Mapping[str, Any]) -> list[str]:
    """Returns the faults of a manifest."""
    if (kind := document.get("kind")) not in CHECKS or document.get("apiVersion") != CHECKS[kind][0]:
        return [f"no kind {kind} in {document.get('apiVersion')}"]
    return list(CHECKS[kind][1](copy.deepcopy(dict(document))))


def _core(document: dict[str, Any]) -> Iterator[str]:
    try:
        kubernetes_validate.validate(document, RELEASE, strict=True)
    except kubernetes_validate.ValidationError as problem:
        yield f"{list(problem.path)}: {problem.message}"


def _pod(template: dict[str, Any]) -> Iterator[str]:
    yield from _core({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template})


def _metadata(document: Mapping[str, Any]) -> Iterator[str]:
    """Checks the metadata of a custom resource, which the operators' classes do not look into."""
    yield from _core({"apiVersion": "v1", "kind": "ConfigMap", "metadata": document.get("metadata")})


def _pytorchjob(document: dict[str, Any]) -> Iterator[str]:
    yield from _metadata(document)
    yield from _as_class(v1.KubeflowOrgV1PyTorchJob, document, "")
    replicas = document.get("spec", {}).get("pytorchReplicaSpecs", {})
    yield from (f"no such replica: {name}" for name in set(replicas) - {"Master", "Worker"})
    for replica in replicas.values():
        containers = replica.get("template", {}).get("spec", {}).get("containers", [])
        if [container.get("name") for container in containers] != ["pytorch"]:
            yield "the operator wants a container named pytorch"


def _as_class(cls: Any, value: dict[str, Any], path: str) -> Iterator[str]:
    """Keys that a class of kubeflow-training does not have, and values of another type."""
    attributes = {name: attribute for attribute, name in cls.attribute_map.items()}
    for name, inner in value.items():
        if name not in attributes:
            yield f"{path}.{name}: no such key"
        else:
            yield from _as_type(cls.openapi_types[attributes[name]], inner, f"{path}.{name}")


def _as_type(kind: str, value: Any, path: str) -> Iterator[str]:
    if kind.startswith("dict(str, "):
        for name, inner in value.items():
            yield from _as_type(kind[len("dict(str, ") : -1], inner, f"{path}.{name}")
    elif kind == "V1PodTemplateSpec":
        yield from _pod(value)
    elif hasattr(v1, kind):
        yield from _as_class(getattr(v1, kind), value, path)
    elif kind in ("int", "str") and type(value).__name__ != kind:
        yield f"{path}: {value!r} is no {kind}"


def _model_mismatches(model: Any, document: dict[str, Any]) -> Iterator[str]:
    """Values that a pydantic class of kubeflow-trainer-api refuses, and keys that it drops."""
    yield from _metadata(document)
    try:
        parsed_document = model.from_dict(document)
    except ValueError as problem:
        yield str(problem)
        return
    yield from (f"{path}: no such key" for path in _lost(document, parsed_document.to_dict(), ""))


def _lost(document: Any, parsed: Any, path: str) -> Iterator[str]:
    if isinstance(document, dict):
        for name, value in document.items():
            if not isinstance(parsed, dict) or name not in parsed:
                yield f"{path}.{name}"
            else:
                yield from _lost(value, parsed[name], f"{path}.{name}")
    elif isinstance(document, list):
        for i, value in enumerate(document):
            yield from _lost(value, parsed[i] if isinstance(parsed, list) and i < len(parsed) else None, f"{path}[{i}]")


def _trainjob(document: dict[str, Any]) -> Iterator[str]:
    yield from _model_mismatches(v2.TrainerV1alpha1TrainJob, document)
    resources = document.get("spec", {}).get("trainer", {}).get("resourcesPerNode", {})
    yield from _pod({"spec": {"containers": [{"name": "x", "resources": resources}]}})


def _runtime(document: dict[str, Any]) -> Iterator[str]:
    yield from _model_mismatches(v2.TrainerV1alpha1TrainingRuntime, document)
    for job in document.get("spec", {}).get("template", {}).get("spec", {}).get("replicatedJobs", []):
        body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
        yield from _core({**body, "spec": job.get("template", {}).get("spec", {})})


def _pod_monitor(document: dict[str, Any]) -> Iterator[str]:
    yield from _metadata(document)
    yield from (f"{name}: no such key" for name in set(document) - {"apiVersion", "kind", "metadata", "spec"})
    yield from _unknown_keys(document.get("spec"), _POD_MONITOR, "spec")
    if not (document.get("spec") or {}).get("selector") or not document["spec"].get("podMetricsEndpoints"):
        yield "spec: selector and podMetricsEndpoints are required"


def _unknown_keys(value: Any, schema: Any, path: str) -> Iterator[str]:
    if isinstance(schema, type):
        if not isinstance(value, schema):
            yield f"{path}: {value!r} is no {schema.__name__}"
    elif isinstance(schema, list):
        for i, inner in enumerate(value):
            yield from _unknown_keys(inner, schema[0], f"{path}[{i}]")
    elif schema:
        for name, inner in (value or {}).items():
            if name in schema:
                yield from _unknown_keys(inner, schema[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}: no such key"
    elif not isinstance(value, str | int):
        yield f"{path}: {value!r} is not text"


CHECKS: dict[str, Any] = {
    "Namespace": ("v1", _core),
    "PersistentVolumeClaim": ("v1", _core),
    "ConfigMap": ("v1", _core),
    "PyTorchJob": ("kubeflow.org/v1", _pytorchjob),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", _trainjob),
    "TrainingRuntime": ("trainer.kubeflow.org/v1alpha1", _runtime),
    "PodMonitor": ("monitoring.coreos.com/v1", _pod_monitor),
}
