# A cluster of eight GPUs to a node with InfiniBand, whose jobs run in an enroot container. NEOX_SHARED is a folder that
# all nodes see; docs/slurm.md tells how to make the image. The host needs a Python with PyYAML, and no torch.
# shellcheck shell=bash
shared=${NEOX_SHARED:?is not set: name a folder that all nodes see, such as /shared/$USER}
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

default() { # NAME VALUE: what the environment or .env sets is kept
    export "$1=${!1:-$2}"
}

# The container.
default NEOX_CONTAINER "$shared/containers/neox.sqsh"
default NEOX_CONTAINER_MOUNTS "$shared:$shared,$repository:$repository" # the same paths inside and outside
default NEOX_CONTAINER_PYTHON python3
if srun --help 2>/dev/null | grep -q -e --container-image; then
    default NEOX_CONTAINER_RUNTIME pyxis # Slurm's plugin, where the cluster has it
else
    default NEOX_CONTAINER_RUNTIME enroot
fi
# enroot's hooks give these devices and libraries to the container.
default NVIDIA_VISIBLE_DEVICES all
default NVIDIA_DRIVER_CAPABILITIES compute,utility
default MELLANOX_VISIBLE_DEVICES all # the cards of InfiniBand; without them NCCL goes on over TCP

# Folders.
default NEOX_CHECKPOINT_DIR "$shared/checkpoints"
default NEOX_LOG_DIR "$shared/logs"
default NEOX_PIPELINE_LOG_DIR "$shared/logs"
default NEOX_DATA_DIR "$shared/data"

# Nodes of a job that is submitted without --nodes.
default NEOX_NODES_PRETRAIN 2
default NEOX_NODES 1
default NEOX_GPUS_PER_NODE 8

default NCCL_NET IB # NCCL stops where it finds no InfiniBand, and does not go on over TCP
default PYTORCH_CUDA_ALLOC_CONF expandable_segments:True # less memory lost between blocks
unset -f default
