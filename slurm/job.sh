# Sourced by the batch files: the repository, .env, the site, the log, the interpreter, NCCL; then `train` or `run`.
# shellcheck shell=bash

# The log as the #SBATCH lines of the batch files name it; --output names another.
default_log=$PWD/logs/${SLURM_JOB_NAME:-}-${SLURM_JOB_ID:-}.out
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
    # The log goes on in the site's folder: that of NEOX_LOG_DIR, or of the variable that the batch file names.
    site_log=${site_log:-NEOX_LOG_DIR}
    folder=${!site_log:-}
    if [ -n "$folder" ] && [ /dev/stdout -ef "$default_log" ]; then
        log=$folder/${default_log##*/}
        if ! { mkdir -p "$folder" && touch "$log"; }; then
            echo "error: $site: no log can be written to $folder" >&2
            return 1
        fi
        if ! [ "$log" -ef "$default_log" ]; then
            echo "The log goes on in $log"
            exec >>"$log" 2>&1
        fi
    fi
    for module in ${NEOX_MODULES:-}; do
        module load "$module" || { echo "error: $site: module load $module failed" >&2; return 1; }
    done
fi

# $PYTHON, else the environment of `make env` or setup_uv_env.sh, else what is on PATH.
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$REPOSITORY/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=$(command -v python3) || { echo "error: no python; run make env" >&2; return 1; }
fi

# torch's own NCCL, or this machine's where that is not older; it says which. Sets NCCL_LIBRARY and LD_PRELOAD. Without
# torch there is nothing to choose: the job may be the one that installs it.
if "$PYTHON" -c 'import sys, importlib.util as u; sys.exit(u.find_spec("torch") is None)'; then
    chosen=$("$PYTHON" -m megatron.launch.nccl) || return 1
    eval "$chosen"
fi

REQUEUE=124 # deepy.py's exit code: the run was told to stop by USR1, has saved, and is not finished
GO_ON=3     # of megatron.launch.submit: this job has the nodes that it is to have

# train CONFIG...: one launcher on every node of the job; passes signals on and queues the job again when it is due.
# A job that was submitted without --nodes submits itself again with the site's, and ends.
train() {
    local code
    if [ -n "${NEOX_SITE:-}" ]; then
        "$PYTHON" -m megatron.launch.submit "$@"
        code=$?
        [ "$code" = "$GO_ON" ] || exit "$code"
    fi
    unset NEOX_SUBMITTED_BY # it is of this job, not of those submitted from within
    supervise --launcher slurm train.py "$@"
}

# supervise WORD...: deepy.py with these words, signals passed on; the job is queued again when it is due, and ends.
supervise() {
    local again code
    "$PYTHON" -u deepy.py "$@" &
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
        echo "job.sh: saved; job $SLURM_JOB_ID is queued again and goes on from there"
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
    exit "$code"
}

# run COMMAND...: in the place of the batch file; `python` is the environment's, or the container's.
run() {
    if [ -n "${NEOX_CONTAINER:-}" ]; then
        [ "$1" != "$PYTHON" ] || set -- "${NEOX_CONTAINER_PYTHON:-python3}" "${@:2}"
        exec "$PYTHON" -m megatron.launch.container "$@"
    fi
    PATH=$(dirname "$PYTHON"):$PATH
    exec "$@"
}
