"""Starts the ranks of a run on one or several machines, and tells each process its rank and world size.

`process_info` reads rank and world size from the environment. `launch` starts a run and waits for its end;
`dry_run` returns the commands that would be started. `set_arch_list` replaces a TORCH_CUDA_ARCH_LIST that
DeepSpeed cannot read. `install_root` returns the folder of scripts and presets. The package `doctor` checks
the machine before a run.
"""

from megatron.launch.cuda_driver import set_arch_list
from megatron.launch.enter import enter
from megatron.launch.environment import install_root, process_info
from megatron.launch.start import dry_run, launch
