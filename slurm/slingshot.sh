# Slingshot (HPE Cray) for NCCL: libfabric's cxi provider through the AWS OFI plugin, the system's NCCL in place of
# torch's. Sourced by sites that set NEOX_FABRIC=slingshot. What is set already is kept.
# shellcheck shell=bash

export NCCL_NET="${NCCL_NET:-AWS Libfabric}" # named, NCCL stops where the plugin is missing; else it falls back to TCP
export FI_PROVIDER="${FI_PROVIDER:-cxi}"
export NCCL_CROSS_NIC="${NCCL_CROSS_NIC:-1}"
export NCCL_NET_GDR_LEVEL="${NCCL_NET_GDR_LEVEL:-PHB}"

# The system's NCCL: NCCL_LIBRARY, else the first that a module has put on LD_LIBRARY_PATH.
if [ -z "${NCCL_LIBRARY:-}" ]; then
    IFS=: read -ra folders <<<"${LD_LIBRARY_PATH:-}"
    for folder in "${folders[@]}"; do
        if [ -e "$folder/libnccl.so.2" ]; then
            NCCL_LIBRARY=$folder/libnccl.so.2
            break
        fi
    done
fi
if [ ! -e "${NCCL_LIBRARY:-}" ]; then
    echo "error: the system's NCCL is not found (NCCL_LIBRARY=${NCCL_LIBRARY:-}, nor libnccl.so.2 on LD_LIBRARY_PATH);" \
        "load its module in slurm/sites/${NEOX_SITE:-NAME}.sh, or export NCCL_LIBRARY" >&2
    return 1
fi
export NCCL_LIBRARY
export LD_PRELOAD="$NCCL_LIBRARY${LD_PRELOAD:+:$LD_PRELOAD}"
