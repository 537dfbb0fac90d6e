"""Processes: who this process is, and how the ranks of a run are started on this machine and on others.

`process_info` reads rank and world from the environment; `launch` starts a run and sees it to its
end, `dry_run` says what would be started; `show_stacks_on_signal` lets a launcher ask a rank where it is;
`set_arch_list` mends a variable that DeepSpeed cannot read; `home` is where scripts and presets are. `doctor` looks at
the machine before a run.
"""

from megatron.launch.arch_list import set_arch_list
from megatron.launch.environment import enter, process_info
from megatron.launch.home import home
from megatron.launch.stacks import show_stacks_on_signal
from megatron.launch.start import dry_run, launch

__all__ = [
    "dry_run",
    "enter",
    "home",
    "launch",
    "process_info",
    "set_arch_list",
    "show_stacks_on_signal",
]
