"""Keys of what is done with a run beside training it: the Hub, reports, monitoring."""

from dataclasses import dataclass
from typing import Literal

from megatron.neox_arguments.keys.declaration import new_key


@dataclass(frozen=True)
class OperationsKeys:
    """Publishing a run's checkpoints, its report, and its numbers for a monitoring system."""

    push_to_hub: bool = new_key(
        False,
        "Upload checkpoints to the HuggingFace Hub while the run goes on, as revisions global_step<N> and the last one "
        "as main; needs HF_TOKEN",
    )
    hub_model_id: str | None = new_key(
        None, "Repository that push_to_hub writes, ORGANISATION/NAME; unset: as the site and the experiment say"
    )
    hub_strategy: Literal["end", "every_save", "all_checkpoints"] = new_key(
        "every_save",
        "What push_to_hub uploads. end: the last checkpoint; every_save: each, in HuggingFace's format; "
        "all_checkpoints: each, also in GPT-NeoX's format",
    )
    report: bool = new_key(False, "Write a page of the run's curves, events and configuration into save at its end")
    metrics_port: int | None = new_key(
        None, "Port at which rank 0 answers /metrics (Prometheus) and /status; unset: none is opened", ge=0, le=65535
    )
    metrics_host: str = new_key(
        "127.0.0.1",
        "Address at which metrics_port is open: this machine alone; 0.0.0.0: whoever reaches it, as in a pod",
    )
