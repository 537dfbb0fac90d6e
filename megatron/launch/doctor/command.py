"""Runs `python deepy.py doctor`: checks this machine, prints the results, and ends with 1 if a check
failed."""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence

from megatron.launch.cuda_driver import driver_cuda
from megatron.launch.devices import visible_gpus
from megatron.launch.doctor import config, devices, hub, network, software, storage, transport
from megatron.launch.doctor.check import Check, as_json, failed, table, verdict, warning
from megatron.launch.environment import DEFAULT_PORT, LaunchError, port_of
from megatron.launch.nccl import own_nccl
from megatron.launch.site import site_variables
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.integers import parse_integer
from megatron.neox_arguments.values.remote_paths import is_remote
from megatron.process.command_parser import CommandParser
from megatron.process.terminal import has_colours

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
    colours = sys.stdout.isatty() and has_colours()
    sys.stdout.write((as_json(checks) if options.json else table(checks, colours)) + "\n")
    return 1 if verdict(checks) == "failed" else 0


def examine(options: argparse.Namespace, build_tokenizer: Callable[[NeoXArgs], object]) -> list[Check]:
    """Runs every check that the options ask for. Returns the results in the order in which they are
    printed."""
    torch, env = software.read_torch(), os.environ
    names = visible_gpus(env) if torch.version and not torch.problem else []
    gpus, links = devices.read_gpus(names), transport.read_network()
    args, checks = config.read_config(options.conf_file) if options.conf_file else (None, [])
    port = options.port or (args.master_port if args else port_of(env.get("MASTER_PORT") or DEFAULT_PORT))
    site, problem = _site(env)
    serves = driver_cuda()
    several = bool(options.peer) or (args is not None and args.num_nodes > 1)
    results: list[Check | None] = [
        software.python_check(),
        software.torch_check(torch),
        software.deepspeed_check(software.installed("deepspeed")),
        software.packages_check(),
        *software.extras_checks(),
        *software.compiled_checks(gpus=bool(gpus)),
        software.arch_list_check(),
        devices.driver_check(devices.driver_version(), torch, len(gpus), serves),
        *devices.gpu_checks(gpus, options.gpus, serves),
        devices.ability_check(gpus, torch),
        transport.nccl_check(own_nccl(), env, links.loaded),
        transport.transport_check(env, links, several),
        *transport.interface_checks(env, links.interfaces),
        network.hostname_check(),
        network.port_check(port),
        *(network.peer_check(peer, port) for peer in options.peer),
        problem,
        *_disks(options.save or (args.save if args else None) or site.get("NEOX_CHECKPOINT_DIR") or ".", args),
        storage.shared_memory_check(),
        storage.open_files_check(),
        storage.locked_memory_check() if links.infiniband or links.slingshot else None,
        *(hub.model_check(model) for model in options.model),
        *checks,
    ]
    if args is not None:
        results += [*config.data_checks(args), config.load_check(args), config.tokenizer_check(args, build_tokenizer)]
    return [check for check in results if check is not None]


def _site(env: Mapping[str, str]) -> tuple[Mapping[str, str], Check | None]:
    """Returns the variables of the site that NEOX_SITE names (without a site: `env`) and None.

    If the site cannot be read, returns `env` and a failed check.
    """
    try:
        return site_variables(env) or env, None
    except LaunchError as problem:
        return env, failed("site", str(problem), "set NEOX_SITE to the NAME of a file slurm/sites/NAME.sh, or unset it")


def _disks(folder: str, args: NeoXArgs | None) -> list[Check]:
    """Returns two checks of free disk space: in `folder`, for checkpoints, and in the temporary folder.

    args: the configuration, from which the size of a checkpoint is estimated; None: 1 GiB is assumed.
    """
    temporary_folder = tempfile.gettempdir()
    temporary = storage.disk_check("temporary", temporary_folder, storage.GIB // 4, "compiled kernels and small files")
    if is_remote(folder):
        if args is None:
            return [warning("save", f"{folder} is remote and is not checked"), temporary]
        folder = args.save_dir or folder
    num_bytes, label = (config.checkpoint_bytes(args), "a checkpoint") if args else (storage.GIB, "a small checkpoint")
    return [storage.disk_check("save", folder, num_bytes, label), temporary]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="deepy.py doctor", description="Look at this machine, and at a configuration, before a run is started.",
        epilog=_EXAMPLES,
    )  # fmt: skip
    parser.add_argument("conf_file", nargs="*", help="configuration files to check, and the files that they name")
    parser.add_argument("--gpus", metavar="2,3", type=_list, default=[], help="GPUs to check; default: all visible")
    parser.add_argument(
        "--port", metavar="N", type=_port, help="port where ranks meet; default: master_port, MASTER_PORT, 29500"
    )
    parser.add_argument(
        "--peer", metavar="HOST:PORT", action="append", type=_peer, default=[], help="check that this machine answers"
    )
    parser.add_argument(
        "--model", metavar="NAME", action="append", default=[], help="HuggingFace model to check: folder or ORG/NAME"
    )
    parser.add_argument("--save", metavar="DIR", help="folder of checkpoints; default: as in the configuration or site")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _peer(text: str) -> str:
    try:
        network.split_address(text, DEFAULT_PORT)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
    return text


def _port(text: str) -> int:
    number = parse_integer(text)
    if number is None or not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; write a number from 1 to 65535")
    return number
