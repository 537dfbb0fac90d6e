"""`python deepy.py doctor`: look at everything, show it, and say by the exit code whether a run could
start."""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence

from megatron.launch.cuda_driver import driver_cuda
from megatron.launch.devices import visible_gpus
from megatron.launch.doctor.check import Check, as_json, failed, table, verdict, warning
from megatron.launch.doctor.config import (
    checkpoint_bytes,
    data_checks,
    load_check,
    read_config,
    tokenizer_check,
)
from megatron.launch.doctor.devices import ability_check, driver_check, driver_version, gpu_checks, read_gpus
from megatron.launch.doctor.hub import model_check
from megatron.launch.doctor.network import hostname_check, peer_check, port_check, split_address
from megatron.launch.doctor.software import (
    arch_list_check,
    compiled_checks,
    deepspeed_check,
    extras_checks,
    installed,
    packages_check,
    python_check,
    read_torch,
    torch_check,
)
from megatron.launch.doctor.storage import (
    GIB,
    disk_check,
    locked_memory_check,
    open_files_check,
    shared_memory_check,
)
from megatron.launch.doctor.transport import interface_checks, nccl_check, read_network, transport_check
from megatron.launch.environment import DEFAULT_PORT, LaunchError, port_of
from megatron.launch.nccl import own_nccl
from megatron.launch.site import site_variables
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.remote_paths import is_remote
from megatron.process.command_parser import CommandParser

_EXAMPLES = """\
examples:
  python deepy.py doctor
  python deepy.py doctor configs/125M.yml configs/local_setup.yml
  python deepy.py doctor --gpus 2,3 --port 29500 --peer 10.0.0.1:29500 --model ORG/NAME
  python deepy.py doctor --save /scratch/run --json
exit code: 0 when a run could start here (warnings allowed), 1 when something failed
"""


def main(argv: Sequence[str], build_tokenizer: Callable[[NeoXArgs], object]) -> int:
    """Runs the checks that the command line asks for and prints them. Returns 0, or 1 if one failed.

    build_tokenizer: builds the tokenizer of a configuration; if it raises, the check of the tokenizer fails.
    """
    options = _parser().parse_intermixed_args(argv)
    checks = examine(options, build_tokenizer)
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    sys.stdout.write((as_json(checks) if options.json else table(checks, colours)) + "\n")
    return 1 if verdict(checks) == "failed" else 0


def examine(options: argparse.Namespace, build_tokenizer: Callable[[NeoXArgs], object]) -> list[Check]:
    """Runs every check that the options ask for. Returns the results in the order in which they are
    printed."""
    torch, env = read_torch(), os.environ
    names = visible_gpus(env) if torch.version and not torch.problem else []
    gpus, network = read_gpus(names), read_network()
    args, problems = read_config(options.conf_file) if options.conf_file else (None, [])
    checks: list[Check | None] = [*problems]
    if args is not None:
        checks += [*data_checks(args), load_check(args), tokenizer_check(args, build_tokenizer)]
    port = options.port or (args.master_port if args else port_of(env.get("MASTER_PORT") or DEFAULT_PORT))
    site, problem = _site(env)
    serves = driver_cuda()
    several = bool(options.peer) or (args is not None and args.num_nodes > 1)
    results: list[Check | None] = [
        python_check(),
        torch_check(torch),
        deepspeed_check(installed("deepspeed")),
        packages_check(),
        *extras_checks(),
        *compiled_checks(gpus=bool(gpus)),
        arch_list_check(),
        driver_check(driver_version(), torch, len(gpus), serves),
        *gpu_checks(gpus, options.gpus, serves),
        ability_check(gpus, torch),
        nccl_check(own_nccl(), env, network.loaded),
        transport_check(env, network, several),
        *interface_checks(env, network.interfaces),
        hostname_check(),
        port_check(port),
        *(peer_check(peer, port) for peer in options.peer),
        problem,
        *_disks(options.save or (args.save if args else None) or site.get("NEOX_CHECKPOINT_DIR") or ".", args),
        shared_memory_check(),
        open_files_check(),
        locked_memory_check() if network.infiniband or network.slingshot else None,
        *(model_check(model) for model in options.model),
        *checks,
    ]
    return [check for check in results if check is not None]


def _site(env: Mapping[str, str]) -> tuple[Mapping[str, str], Check | None]:
    """Returns the variables of the site that NEOX_SITE names (without a site: `env`) and None.

    If the site cannot be read, returns `env` and a failed check.
    """
    try:
        return site_variables(env) or env, None
    except LaunchError as problem:
        return env, failed("site", str(problem), "export NEOX_SITE=NAME of slurm/sites/NAME.sh, or unset it")


def _disks(folder: str, args: NeoXArgs | None) -> list[Check]:
    """Returns the checks of two disks: of `folder`, for checkpoints, and of the temporary folder.

    args: the configuration, which gives the size of a checkpoint; None: 1 GiB is assumed.
    """
    temporary_folder = tempfile.gettempdir()
    temporary = disk_check("temporary", temporary_folder, GIB // 4, "compiled kernels and small files")
    if is_remote(folder):
        if args is None:
            return [warning("save", f"{folder} is remote and is not checked"), temporary]
        folder = args.save_dir or folder
    num_bytes, label = (checkpoint_bytes(args), "a checkpoint") if args else (GIB, "a small checkpoint")
    return [disk_check("save", folder, num_bytes, label), temporary]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="deepy.py doctor", description="Look at this machine, and at a configuration, before a run is started.",
        epilog=_EXAMPLES,
    )  # fmt: skip
    parser.add_argument("conf_file", nargs="*", help="configuration files: validated, and what they name looked for")
    parser.add_argument("--gpus", metavar="2,3", type=_list, default=[], help="GPUs that the run will use; all visible")
    parser.add_argument(
        "--port", metavar="N", type=_port, help="where ranks meet; else master_port, MASTER_PORT, 29500"
    )
    parser.add_argument(
        "--peer", metavar="HOST:PORT", action="append", type=_peer, default=[], help="a machine to be reached"
    )
    parser.add_argument(
        "--model", metavar="NAME", action="append", default=[], help="a HuggingFace model: folder or ORG/NAME"
    )
    parser.add_argument("--save", metavar="DIR", help="folder of checkpoints; else that of the configuration or site")
    parser.add_argument("--json", action="store_true", help="for machines")
    return parser


def _list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _peer(text: str) -> str:
    try:
        split_address(text, DEFAULT_PORT)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
    return text


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; name one from 1 to 65535")
    return int(text)
