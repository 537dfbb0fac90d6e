# Isambard-AI: four GH200 to a node, Slingshot. PROJECTDIR and LOCALDIR are the cluster's own variables.
# shellcheck shell=bash
project=${PROJECTDIR:?is not set: it is the folder of your project, which Isambard sets at login}/public
export NEOX_CHECKPOINT_DIR="${NEOX_CHECKPOINT_DIR:-$project/checkpoints}"
export NEOX_LOG_DIR="${NEOX_LOG_DIR:-$project/logs/neox-training}"
export NEOX_DATA_DIR="${NEOX_DATA_DIR:-$project/data}"
export NEOX_TOKENIZER_DIR="${NEOX_TOKENIZER_DIR:-$project/tokenizers/gpt-neox-instruct-tokenizer}"
export NEOX_CHAT_TEMPLATE_DIR="${NEOX_CHAT_TEMPLATE_DIR:-$project/chat_templates}"
export TMPDIR="${LOCALDIR:-/tmp}"
export NEOX_GPUS_PER_NODE="${NEOX_GPUS_PER_NODE:-4}"
export NEOX_NODES_PRETRAIN="${NEOX_NODES_PRETRAIN:-64}" # pre-training and mid-training
export NEOX_NODES="${NEOX_NODES:-16}"                   # everything that begins with a trained model
export NEOX_MODULES="${NEOX_MODULES:-brics/nccl/2.26.6-1}"
export NEOX_FABRIC="${NEOX_FABRIC-slingshot}" # NEOX_FABRIC= for none
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-hsn}"
export FI_MR_CACHE_MONITOR="${FI_MR_CACHE_MONITOR:-userfaultfd}"
# Between TCP, which costs a factor of 17, and one Slingshot card of 25 GB/s; raise it to what the log of a good job says.
export NEOX_MIN_ALLREDUCE_GB_S="${NEOX_MIN_ALLREDUCE_GB_S:-15}"
