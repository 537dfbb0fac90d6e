"""Processes: who this process is, and how the ranks of a run are started on this machine and on others.

`process_info` reads rank and world from the environment; `launch` starts a run and sees it to its end,
`dry_run` says what would be started; `set_arch_list` mends a variable that DeepSpeed cannot read;
`install_root` is where scripts and presets are. `doctor` looks at the machine before a run.
"""

from megatron.launch.cuda_driver import set_arch_list
from megatron.launch.enter import enter
from megatron.launch.environment import install_root, process_info
from megatron.launch.start import dry_run, launch
