"""What a rank sets for the libraries it uses."""

import os
import socket
import sys

import pytest

from megatron.launch import enter
from megatron.launch.devices import interface_to
from tests.model.stages import small


@pytest.mark.parametrize(
    "backend, given, expected",
    [
        ("nccl", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("nccl", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
        ("gloo", {}, {}),
    ],
)
def test_memory_of_gpus_is_in_segments_that_grow(
    backend: str, given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", given)
    enter(small(distributed_backend=backend))
    assert {name: value for name, value in given.items() if "ALLOC" in name} == expected


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere gloo is left alone")
def test_gloo_takes_the_interface_that_leads_to_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On machines with GPUs too, for objects and CPU tensors. What the user has set stays."""
    here = next(address for _, _, _, _, (address, *_) in socket.getaddrinfo(socket.gethostname(), 0, socket.AF_INET))

    def interface(world_size: int, local_world_size: int, given: str | None = None) -> str | None:
        with monkeypatch.context() as patch:
            patch.setenv("PYTORCH_ALLOC_CONF", "as it is")
            for name in ("GLOO_SOCKET_IFNAME", "SLURM_STEP_ID"):
                patch.delenv(name, raising=False)
            values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local_world_size}
            for name, value in {**values, "MASTER_ADDR": here, "MASTER_PORT": 29500}.items():
                patch.setenv(name, str(value))
            if given is not None:
                patch.setenv("GLOO_SOCKET_IFNAME", given)
            enter(small(distributed_backend="nccl"))
            chosen = os.environ.get("GLOO_SOCKET_IFNAME")
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
        return chosen

    assert interface(1, 1) is None
    assert interface(4, 4) == "lo"
    assert interface(8, 4) == interface_to(here) is not None
    assert interface(8, 4, "hsn0") == "hsn0"
