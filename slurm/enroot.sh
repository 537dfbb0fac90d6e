#!/usr/bin/env bash
# enroot.sh COMMAND...: runs it in the container NEOX_CONTAINER, in this folder and with this task's variables.
set -eu

# A file is started as it is where the node can mount it. Elsewhere it is unpacked once, on the node's own disk, under a
# name that changes with the file.
image=$NEOX_CONTAINER
if ! command -v squashfuse >/dev/null || ! command -v fuse-overlayfs >/dev/null; then
    image=$(basename "$NEOX_CONTAINER" .sqsh)-$(stat -c %Y "$NEOX_CONTAINER")
    enroot list | grep -qx "$image" || enroot create --name "$image" "$NEOX_CONTAINER" >&2
fi

options=()
IFS=, read -ra mounts <<<"${NEOX_CONTAINER_MOUNTS:-}"
for mount in ${mounts[@]+"${mounts[@]}"}; do options+=(--mount "$mount"); done
# enroot hands on no variable by itself. The image's own programs, libraries and home are not the host's.
while read -r name; do
    case $name in
        PATH | LD_LIBRARY_PATH | LD_PRELOAD | NCCL_LIBRARY | PYTHON* | VIRTUAL_ENV | HOME | SHELL | PWD | OLDPWD | SHLVL | _) ;;
        *) options+=(--env "$name") ;;
    esac
done < <(compgen -e)

# shellcheck disable=SC2016  # the shell in the container expands these
exec enroot start ${options[@]+"${options[@]}"} "$image" sh -c 'cd "$0" && exec "$@"' "$PWD" "$@"
