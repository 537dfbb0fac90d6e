"""Declares the keys of a run's publication on the Hub, its report and its monitoring."""

from dataclasses import dataclass
from typing import Literal

from megatron.neox_arguments.keys.declaration import new_key


@dataclass(frozen=True)
class OperationsKeys:
    """Configuration keys for publishing a run's checkpoints, writing its report, and serving its metrics to a
    monitoring system."""

    push_to_hub: bool = new_key(
        False,
        "Upload checkpoints to the HuggingFace Hub during the run, as revisions global_step<N>, the last one as "
        "main; needs HF_TOKEN",
    )
    hub_model_id: str | None = new_key(
        None, "Repository of push_to_hub, ORGANISATION/NAME; unset: derived from the site and the experiment"
    )
    hub_strategy: Literal["end", "every_save", "all_checkpoints"] = new_key(
        "every_save",
        "Uploads of push_to_hub. end: the last checkpoint; every_save: each, in HuggingFace's format; "
        "all_checkpoints: each, also in GPT-NeoX's format",
    )
    report: bool = new_key(False, "Write a page of the run's curves, events and configuration into save at its end")
    metrics_port: int | None = new_key(
        None, "Port of rank 0 for /metrics (Prometheus) and /status; unset: none", ge=0, le=65535
    )
    metrics_host: str = new_key(
        "127.0.0.1",
        "Address of metrics_port: this machine only; 0.0.0.0: open to the network, as in a pod",
    )
