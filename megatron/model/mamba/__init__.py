"""Mamba and Mamba 2, mixers with a state instead of keys and values. `mixers.py` holds the modules,
`selective_scan.py` and `chunk_scan.py` their recurrences in torch's own operations, `convolution.py` the
short convolution before these, `packages.py` kernels of packages in their place, `inputs.py` the inputs
beside hidden states."""

from megatron.model.mamba.inputs import StateInputs, state_inputs
from megatron.model.mamba.mixers import Mamba, Mamba2
from megatron.model.mamba.packages import ScanKernels, choose_scans
