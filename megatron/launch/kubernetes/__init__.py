"""Manifests for Kubernetes: one more way to render a run, for an operator of Kubeflow to start.

`read_site` reads what a cluster has (`kubernetes/sites/*.yml`), `render` turns it and a run's configuration
into documents, `as_yaml` into text. Nothing here talks to a cluster. In a pod `deepy.py` finds its place
among the others by what the operator puts into its environment (`megatron.launch.manual_nodes`).
"""

from megatron.launch.kubernetes.config_files import pod_config
from megatron.launch.kubernetes.manifests import KINDS, Manifest, as_yaml, render
from megatron.launch.kubernetes.site import Site, read_site
