#!/usr/bin/env bash
# Make .venv with uv, at the versions of constraints.txt, and check it:
#   bash setup_uv_env.sh [--cpu | --cuda 12.6] [--torch 2.11.0] [--flash-attn] [--transformer-engine]
#
#   --cpu                 torch without CUDA
#   --cuda VERSION        what the driver serves, where that of this machine is another (a login node)
#   --torch VERSION       2.13.0 or 2.11.0; otherwise the one that suits the driver
#   --flash-attn          also flash-attn, compiled here (needs nvcc; takes long)
#   --transformer-engine  also Transformer-Engine, its torch part compiled here (needs nvcc)
#
# PY names the interpreter, Python 3.11 or newer. What pip is configured with (index, extra indexes, links,
# certificate) is handed to uv. Typed again it goes on where it stopped.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

readonly FLASH_ATTN=flash-attn==2.8.3.post2
readonly TRANSFORMER_ENGINE_VERSION=2.20.2
readonly VENV=.venv
readonly UNFINISHED=$VENV/unfinished # there while packages are installed

die() {
  printf 'setup_uv_env.sh: error: %s\n' "$@" >&2
  exit 1
}

build=() kind='' extras=() # build: for torch_builds.py; kind: the one asked for, cpu or cuda
while (($#)); do
  case $1 in
    --cpu) kind=cpu build+=("$1") ;;
    --cuda | --torch)
      [[ -n ${2:-} ]] || die "$1 needs a version, as $1 $([[ $1 == --cuda ]] && echo 12.6 || echo 2.11.0)"
      [[ $1 == --torch ]] || kind=cuda
      build+=("$1" "$2")
      shift
      ;;
    --flash-attn | --transformer-engine) extras+=("${1#--}") ;;
    -h | --help) sed -n '2,12s/^# \{0,1\}//p' "$0" && exit 0 ;;
    *) die "$1 is not an option; known are --cpu, --cuda, --torch, --flash-attn, --transformer-engine" ;;
  esac
  shift
done
[[ $kind != cpu || ${#extras[@]} == 0 ]] || die "--${extras[0]} needs CUDA; leave out --cpu"

PY=${PY:-python3}
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

pip_config=$("$PY" -m pip config list 2>/dev/null || true)
# What pip is configured with by that name, by its variable or its files; nothing when it is not.
pip_setting() {
  local section value
  for section in :env: install global; do
    value=$(sed -n "s/^$section\\.$1='\\(.*\\)'\$/\\1/p" <<<"$pip_config" | sed 's/\\n/ /g; s/^ *//; s/ *$//; s/  */ /g')
    if [[ -n $value ]]; then
      echo "$value"
      return
    fi
  done
}

find_uv() {
  if command -v uv >/dev/null; then
    command -v uv
  elif [[ -x .cache/uv/bin/uv ]]; then
    echo "$PWD/.cache/uv/bin/uv"
  elif "$PY" -m venv .cache/uv >&2 && .cache/uv/bin/python -m pip install --quiet uv >&2; then
    echo "$PWD/.cache/uv/bin/uv"
  else
    die "uv is missing and $PY could not install it (see above); install it (pip install uv) and type this again"
  fi
}

install() { # WHAT ARGUMENTS...: one call of uv pip install
  local what=$1
  shift
  echo "setup_uv_env.sh: $what"
  touch "$UNFINISHED"
  if ! "$UV" pip install --python "$VENV/bin/python" -c "$VENV/constraints.txt" "$@"; then
    [[ $* != *--no-build-isolation* ]] || rm "$UNFINISHED" # compiling failed: nothing was written yet
    die "installing $what failed (see above). Typed again, this goes on here." \
      "No connection? Name an index that can be reached: PIP_INDEX_URL=URL, or pip config set global.index-url URL."
  fi
  rm "$UNFINISHED"
}

has_torch() { # VERSION: whether .venv has it; one without +cu126 or the like is any build
  "$VENV/bin/python" - "$1" 2>/dev/null <<'X'
import sys
from importlib.metadata import version
found = version("torch")
sys.exit(sys.argv[1] not in (found, found.partition("+")[0]))
X
}

install_torch() { # by uv; by pip where uv fails on torch's own index, as it has, also without saying so
  echo "setup_uv_env.sh: ${torch[0]}"
  touch "$UNFINISHED"
  local again=()
  if [[ -n $kind ]] && has_torch "${torch[0]#*==}" &&
    ! "$VENV/bin/python" -c "import torch; assert bool(torch.version.cuda) == ('$kind' == 'cuda')" 2>/dev/null; then
    again=(--reinstall-package torch)
  fi
  if ! "$UV" pip install --python "$VENV/bin/python" ${again[@]+"${again[@]}"} "${torch[@]}" ||
    ! has_torch "${torch[0]#*==}"; then
    echo "setup_uv_env.sh: uv did not install ${torch[0]}; now with pip"
    # shellcheck disable=SC2015
    "$UV" pip install --quiet --python "$VENV/bin/python" pip &&
      "$VENV/bin/python" -m pip install --quiet ${again:+--force-reinstall} "${torch[@]}" && has_torch "${torch[0]#*==}" ||
      die "installing ${torch[0]} failed, with pip too (see above). Typed again, this goes on here." \
        "No connection? Name an index that can be reached: PIP_INDEX_URL=URL, or pip config set global.index-url URL."
  fi
  rm "$UNFINISHED"
}

UV=$(find_uv)

index=$(pip_setting index-url) more=$(pip_setting extra-index-url)
links=$(pip_setting find-links) cert=$(pip_setting cert)
[[ -z $index ]] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
[[ -z $more ]] || export UV_INDEX=${UV_INDEX:-$more}
export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match} # as pip: of several indexes the best
[[ -z $links ]] || export UV_FIND_LINKS=${UV_FIND_LINKS:-${links// /,}}
[[ -z $cert ]] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$cert}
export UV_LINK_MODE=${UV_LINK_MODE:-copy} # the cache is often on another file system

# Of a package that was being written when this was interrupted uv thinks that it is there. It keeps what it fetched.
if [[ -e $UNFINISHED ]] || ! new_enough "$VENV/bin/python"; then
  # Without one of our own uv brings a Python.
  python=3.11
  if new_enough "$PY"; then python=$(command -v "$PY"); fi
  "$UV" venv --quiet --clear --python "$python" "$VENV" ||
    die "no environment could be made (see above); name a Python 3.11 or newer: PY=/path/to/python3.11"
fi
command -v uv >/dev/null || ln -sf "$UV" "$VENV/bin/uv" # for `uv run`, once .venv is activated

found=$("$VENV/bin/python" -I megatron/launch/torch_builds.py --pip "$PY" ${build[@]+"${build[@]}"}) ||
  die "no build of torch suits this machine (see above); --cpu, --cuda and --torch name one"
read -ra torch <<<"$found"
sed "s/^torch==.*/${torch[0]}/" constraints.txt >"$VENV/constraints.txt"
install_torch
install pip pip # for `make`
install "everything of neox[dev]" -e '.[dev]'

if ((${#extras[@]})); then
  command -v nvcc >/dev/null || [[ -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]] ||
    die "--${extras[0]} compiles CUDA code and finds no nvcc; load the CUDA toolkit's module or set CUDA_HOME"
  cuda=$("$VENV/bin/python" -c 'import torch; print((torch.version.cuda or "").split(".")[0])')
  [[ -n $cuda ]] || die "--${extras[0]} needs a torch with CUDA; the one in $VENV has none"
  export MAX_JOBS=${MAX_JOBS:-4} # each compiler takes gigabytes
  install "what is needed to compile" 'setuptools>=77' wheel ninja packaging psutil pybind11
  for extra in "${extras[@]}"; do
    case $extra in
      flash-attn) install "$FLASH_ATTN" --no-build-isolation "$FLASH_ATTN" ;;
      transformer-engine)
        install "$extra" --no-build-isolation "transformer-engine[core_cu$cuda,pytorch]==$TRANSFORMER_ENGINE_VERSION"
        ;;
    esac
  done
fi
touch "$VENV/installed" # `make` need not install again

echo
chosen=$("$VENV/bin/python" -m megatron.launch.nccl) # says which, and why
eval "$chosen"
cat <<X
  export NCCL_LIBRARY=${NCCL_LIBRARY:-}
  LD_PRELOAD=\$NCCL_LIBRARY uv run python deepy.py train.py ...
Activate: source $VENV/bin/activate; look at the machine: python deepy.py doctor

X
NEOX_UV_EXTRAS="${extras[*]-}" "$VENV/bin/python" -m pytest -q tests/test_uv_install.py
