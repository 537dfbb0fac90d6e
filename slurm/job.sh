# Sourced by the batch files of this folder: the repository, .env, the site, the interpreter; then `train`.
# shellcheck shell=bash

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$REPOSITORY" || return 1

# Keys and tokens. Its content is printed nowhere, also under `bash -x`.
for secrets in "$REPOSITORY/.env" "$REPOSITORY/../.env"; do
    if [ -f "$secrets" ]; then
        { case $- in *x*) traced=1 ;; *) traced= ;; esac; set +x; } 2>/dev/null
        set -a
        # shellcheck disable=SC1090
        source "$secrets"
        set +a
        [ -z "$traced" ] || set -x
        break
    fi
done

if [ -n "${NEOX_SITE:-}" ]; then
    site=$REPOSITORY/slurm/sites/$NEOX_SITE.sh
    if [ ! -f "$site" ]; then
        echo "error: NEOX_SITE=$NEOX_SITE: there is no $site; there are: $(cd "$REPOSITORY/slurm/sites" && echo *.sh)" >&2
        return 1
    fi
    # shellcheck disable=SC1090
    source "$site" || return 1
    for module in ${NEOX_MODULES:-}; do
        module load "$module" || { echo "error: $site: module load $module failed" >&2; return 1; }
    done
    # shellcheck disable=SC1090
    [ -z "${NEOX_FABRIC:-}" ] || source "$REPOSITORY/slurm/$NEOX_FABRIC.sh" || return 1
fi

# $PYTHON, else the environment of `make env` or setup_uv_env.sh, else what is on PATH.
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$REPOSITORY/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=$(command -v python3) || { echo "error: no python; run make env" >&2; return 1; }
fi

REQUEUE=124 # deepy.py's exit code: the run was told to stop by USR1, has saved, and is not finished

# train CONFIG...: one launcher on every node of the job; passes signals on and queues the job again when it is due.
train() {
    local again code
    "$PYTHON" -u deepy.py --launcher slurm train.py "$@" &
    local launcher=$!
    trap 'again=1; kill -USR1 "$launcher" 2>/dev/null' USR1
    trap 'again=1; kill -TERM "$launcher" 2>/dev/null' TERM
    while
        again=0
        wait "$launcher"
        code=$?
        [ "$again" = 1 ] # a signal has ended the waiting, not the run
    do :; done
    if [ "$code" = "$REQUEUE" ]; then
        echo "pretrain_neox.sbatch: saved; job $SLURM_JOB_ID is queued again and goes on from there"
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
    exit "$code"
}
