#!/usr/bin/env python
"""Renders a run as Kubernetes manifests for Kubeflow's operators; does not contact a cluster.

    python tools/k8s.py render configs/container_setup.yml --site kubernetes/sites/openshift.yml | oc apply -f -
    python tools/k8s.py render MODEL.yml RECIPE.yml --site my-cluster.yml --kind TrainJob --output manifests
    python tools/k8s.py render MODEL.yml RECIPE.yml --site my-cluster.yml --set train_iters=100

CONFIG are configuration files as for `deepy.py train.py`. They are checked for the site's number of ranks,
and copied into the pods unchanged: `${NAME}` is replaced in the pods. --help-site lists the keys of a site
file. docs/kubernetes.md explains all steps from an image to a checkpoint.
"""  # noqa: W505 (lines to copy)

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.launch import install_root  # noqa: E402
from megatron.launch.kubernetes import KINDS, Site, as_yaml, pod_config, read_site, render  # noqa: E402
from megatron.neox_arguments import UserError, yaml_value  # noqa: E402
from megatron.neox_arguments.keys.declaration import keys_of  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402


class _HelpSite(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        print(help_site())
        parser.exit()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    rendering = commands.add_parser("render", help="print or write the manifests", description=__doc__)
    rendering.add_argument(
        "config", nargs="+", metavar="CONFIG", help="configuration files of the run, or presets by name"
    )
    rendering.add_argument(
        "--site", required=True, metavar="FILE", help="file that describes the cluster, such as kubernetes/sites/*.yml"
    )
    rendering.add_argument(
        "--kind", choices=[*KINDS, "both"], default="PyTorchJob",
        help="kind of job: PyTorchJob for the Training Operator (default), TrainJob for Kubeflow Trainer v2, or both",
    )  # fmt: skip
    rendering.add_argument(
        "--output", type=Path, metavar="DIR", help="folder for one file per manifest (default: print all manifests)"
    )
    rendering.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="override keys, as for deepy.py"
    )
    rendering.add_argument("--help-site", nargs=0, action=_HelpSite, help="print the keys of a site file and exit")
    return parser.parse_args(argv)


def help_site() -> str:
    """Returns the text of --help-site: each key of a site file with its default and meaning."""
    lines = []
    for name, key in keys_of(Site).items():
        default = "required" if key.required else yaml_value(key.default)
        lines.append(f"{name} ({default})\n    {key.meaning}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    """Prints the manifests of a run, or writes them into the folder --output. Raises UserError."""
    site = read_site(options.site)
    config = pod_config(options.config, site, options.set, install_root())
    sys.stderr.write("".join(f"k8s.py: note: {note}\n" for note in config.notes))
    manifests = render(site, config, tuple(KINDS) if options.kind == "both" else (options.kind,))
    if options.output is None:
        sys.stdout.write("".join(map(as_yaml, manifests)))
        return
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        for number, manifest in enumerate(manifests):
            file = options.output / f"{number:02d}-{manifest.file_name}"  # kubectl apply reads files by name
            file.write_text(as_yaml(manifest), encoding="utf-8")
            print(file)
    except OSError as problem:
        raise UserError(f"--output: {options.output}: cannot be written ({problem.strerror})") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line of tools/k8s.py, and returns its exit code: 0, or 1 after an error."""
    options = parse(argv)
    try:
        run(options)
    except UserError as problem:
        sys.stderr.write(problem.error_lines("k8s.py"))
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
