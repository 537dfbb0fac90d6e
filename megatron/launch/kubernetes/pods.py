"""What is in every pod of a job, whichever operator makes it: container, variables, volumes, rights."""

from typing import Any

from megatron.launch.kubernetes.config_files import FOLDER, PodConfig
from megatron.launch.kubernetes.site import Site

Json = dict[str, Any]

GRACE_S = 300  # from SIGTERM to SIGKILL: for the step to end and a checkpoint to be written


def labels(site: Site) -> Json:
    """Of everything that belongs to a job."""
    return {"app.kubernetes.io/name": "neox", "app.kubernetes.io/instance": site.name, **site.labels}


def pod_metadata(site: Site, scraped_port: int | None = None) -> Json:
    """Labels and annotations of a pod. scraped_port: where a Prometheus that goes by annotations reads it."""
    annotations = {"sidecar.istio.io/inject": "false"}  # its proxy would stand between the ranks
    if scraped_port is not None:
        annotations |= {
            "prometheus.io/scrape": "true", "prometheus.io/port": str(scraped_port), "prometheus.io/path": "/metrics",
        }  # fmt: skip
    return {"labels": labels(site), "annotations": {**annotations, **site.annotations}}


def pod_spec(site: Site, config: PodConfig, container: Json) -> Json:
    """A pod around a container, under whatever user the cluster runs it (OpenShift: a random one)."""
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
    """A container of that name without what it runs: variables, ports, mounts, rights. scraped: rank 0 may be
    in it."""
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
    """What each pod asks for, which is also all that it may take."""
    amounts = {"cpu": str(site.cpus), "memory": site.memory, site.gpu_resource: str(site.gpus)}
    return {"requests": amounts, "limits": dict(amounts)}


def environment_map(site: Site) -> str:
    """The name of the ConfigMap of the variables."""
    return f"{site.name}-environment"


def config_map(site: Site) -> str:
    """The name of the ConfigMap of the configuration files."""
    return f"{site.name}-config"


def _from_secret(variable: str, place: str) -> Json:
    """A variable whose value is in a secret. Where there is none it is unset, and the run says what it
    needs it for."""
    name, _, key = place.partition("/")
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key, "optional": True}}}
