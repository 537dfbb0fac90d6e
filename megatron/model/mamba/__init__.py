"""Mamba, Mamba 2 and short convolutions: mixers that keep a state of fixed size instead of keys and values.

mixers.py and short_convolution.py hold the modules. selective_scan.py and chunk_scan.py compute their
recurrences, and convolution.py the convolution before these, with torch operations. packages.py replaces
these by kernels of installed packages. inputs.py prepares the inputs besides hidden states. context.py hands
states between context ranks.
"""

from megatron.model.mamba.inputs import StateInputs, shared_row_inputs, state_inputs
from megatron.model.mamba.mixers import Mamba, Mamba2
from megatron.model.mamba.packages import ScanKernels, choose_scans, with_delta_rules
from megatron.model.mamba.short_convolution import ShortConv
