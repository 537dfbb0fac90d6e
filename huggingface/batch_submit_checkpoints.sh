#!/bin/bash
# Submits one Slurm job per checkpoint of an experiment; each publishes its checkpoint on the Hub. See --help.
#
#   ./huggingface/batch_submit_checkpoints.sh EXPERIMENT [org] [--upload-delay N|random] [--dry-run] ...
set -eu
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3) || { echo "batch_submit_checkpoints.sh: error: no python" >&2; exit 1; }
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m megatron.operations.hub.submission "$@"
