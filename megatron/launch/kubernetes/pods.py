"""The parts of every pod of a job, for any operator: container, variables, volumes, rights."""

from typing import Any

from megatron.launch.kubernetes.config_files import FOLDER, PodConfig
from megatron.launch.kubernetes.site import Site

Json = dict[str, Any]

GRACE_S = 300  # from SIGTERM to SIGKILL: for the step to end and a checkpoint to be written


def labels(site: Site) -> Json:
    """Returns the labels of all objects of a job."""
    return {"app.kubernetes.io/name": "neox", "app.kubernetes.io/instance": site.name, **site.labels}


def pod_metadata(site: Site, scraped_port: int | None = None) -> Json:
    """Returns labels and annotations of a pod.

    scraped_port: the metrics port, for a Prometheus that reads annotations; None: no such annotations.
    """
    annotations = {"sidecar.istio.io/inject": "false"}  # its proxy would stand between the ranks
    if scraped_port is not None:
        annotations |= {
            "prometheus.io/scrape": "true", "prometheus.io/port": str(scraped_port), "prometheus.io/path": "/metrics",
        }  # fmt: skip
    return {"labels": labels(site), "annotations": {**annotations, **site.annotations}}


def pod_spec(site: Site, config: PodConfig, container: Json) -> Json:
    """Returns the spec of a pod with this container. The cluster chooses the user id (OpenShift: a random
    one)."""
    volumes: list[Json] = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in site.claims]
    volumes.append({"name": "config", "configMap": {"name": config_map(site)}})
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": site.shared_memory}})
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


def container_details(site: Site, config: PodConfig, name: str, scraped: bool = True) -> Json:
    """Returns a container without its command: environment variables, ports, mounts and security context.

    scraped: whether rank 0 may run in this container. Only then the metrics port is opened.
    """
    ports: list[Json] = []
    if config.metrics_port and scraped:  # 0 lets the system choose, and nobody could say where to look
        ports.append({"name": "metrics", "containerPort": config.metrics_port})
    mounts: list[Json] = [{"name": name, "mountPath": path} for name, path in site.volumes().items()]
    mounts.append({"name": "config", "mountPath": str(FOLDER), "readOnly": True})
    mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return {
        "name": name,
        "envFrom": [{"configMapRef": {"name": environment_map(site)}}],
        "env": [_from_secret(variable, str(place)) for variable, place in site.secrets.items()],
        "ports": ports,
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def resources(site: Site) -> Json:
    """Returns the resources that each pod requests. Its limits are the same."""
    amounts = {"cpu": str(site.cpus), "memory": site.memory, site.gpu_resource: str(site.gpus)}
    return {"requests": amounts, "limits": dict(amounts)}


def environment_map(site: Site) -> str:
    """Returns the name of the ConfigMap that holds the environment variables."""
    return f"{site.name}-environment"


def config_map(site: Site) -> str:
    """Returns the name of the ConfigMap that holds the configuration files."""
    return f"{site.name}-config"


def _from_secret(variable: str, place: str) -> Json:
    """Returns an environment variable whose value comes from a secret. If the secret does not exist, the
    variable is unset.

    place: `SECRET/KEY`.
    """
    name, _, key = place.partition("/")
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key, "optional": True}}}
