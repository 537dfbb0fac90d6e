# A workstation, or a cluster of which nothing is known: everything lies in the repository.
# shellcheck shell=bash
export NEOX_CHECKPOINT_DIR="${NEOX_CHECKPOINT_DIR:-checkpoints}"
export NEOX_LOG_DIR="${NEOX_LOG_DIR:-logs}"
export NEOX_PIPELINE_LOG_DIR="${NEOX_PIPELINE_LOG_DIR:-logs}"
export NEOX_DATA_DIR="${NEOX_DATA_DIR:-data}"
export NEOX_GPUS_PER_NODE="${NEOX_GPUS_PER_NODE:-1}"
export NEOX_NODES_PRETRAIN="${NEOX_NODES_PRETRAIN:-1}"
export NEOX_NODES="${NEOX_NODES:-1}"
