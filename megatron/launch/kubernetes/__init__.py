"""Renders a run as Kubernetes manifests, which an operator of Kubeflow starts.

`read_site` reads the description of a cluster (`kubernetes/sites/*.yml`). `render` turns it and a run's
configuration into Kubernetes objects, and `as_yaml` turns an object into text. Nothing here talks to a
cluster. In a pod, `deepy.py` learns the pod's index from environment variables that the operator sets
(`megatron.launch.manual_nodes`).
"""

from megatron.launch.kubernetes.config_files import pod_config
from megatron.launch.kubernetes.manifests import KINDS, Manifest, as_yaml, render
from megatron.launch.kubernetes.site import Site, read_site
