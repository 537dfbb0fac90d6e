# Isambard-AI: four GH200 to a node, Slingshot 11. PROJECTDIR and LOCALDIR are the cluster's own variables.
# shellcheck shell=bash
project=${PROJECTDIR:?is not set: it is the folder of your project, which Isambard sets at login}/public

# What the environment or .env sets is kept; what it sets to nothing (NCCL_ALGO= sbatch ...) is left out, also in the
# job that this one submits in its place.
default() { # NAME VALUE
    case " ${NEOX_LEFT_OUT-} " in *" $1 "*) unset "$1"; return ;; esac
    if [ -n "${!1-unset}" ]; then export "$1=${!1-$2}"; else unset "$1"; export NEOX_LEFT_OUT="${NEOX_LEFT_OUT-} $1"; fi
}

# Folders.
default NEOX_CHECKPOINT_DIR "$project/checkpoints/sf_model_organisms"
default NEOX_LOG_DIR "$project/logs/neox-training"                 # of pretrain_neox.sbatch and run_on_compute.sbatch
default NEOX_PIPELINE_LOG_DIR "$project/logs/checkpoint_pipeline"  # of conversions
default NEOX_DATA_DIR "$project/data"
default NEOX_BASE_TOKENIZER_DIR "$project/data/neox_tokenizer"     # of texts
default NEOX_TOKENIZER_DIR "$project/data/neox_tokenizer_instruct" # of conversations, and its chat template
default NEOX_CHAT_TEMPLATE_DIR "$project/data/neox_tokenizer_instruct"
# Slurm hands on the TMPDIR of the login node; the node's own disk is named apart.
export TMPDIR="${NEOX_TMPDIR:-${LOCALDIR:-/tmp}}"
default TRITON_CACHE_DIR "$TMPDIR/triton-${USER:-neox}" # compiled kernels, kept over jobs; thousands of small files

# Nodes of a job that is submitted without --nodes.
default NEOX_NODES_PRETRAIN 64 # pre-training and mid-training
default NEOX_NODES 16          # everything else that starts from a model
# Configurations of mid-training, which starts from a model too.
default NEOX_MIDTRAINING "*/midtraining/* */midtraining_ga/* *_mid.yml"
default NEOX_GPUS_PER_NODE 4

# The HuggingFace Hub: repositories <org>/<prefix>-<experiment>, but for experiments that NEOX_HUB_NAMES, a JSON file,
# names itself. NEOX_EVAL_TASKS, where it is set, is evaluated after an upload.
default NEOX_HUB_ORG geodesic-research
default NEOX_HUB_PREFIX sfm

# The plugin through which NCCL uses Slingshot, and no NCCL: the system's 2.26.6 is older than torch 2.11 needs. Plugin
# 1.8.1 has a deadlock that 1.17.3 mends; `module avail brics/aws-ofi-nccl` shows whether your cluster has it.
default NEOX_MODULES "PrgEnv-cray cuda/12.6 brics/aws-ofi-nccl/1.8.1"
default TORCH_CUDA_ARCH_LIST 9.0 # the device says 9.0a, which DeepSpeed's builder cannot read

# NCCL.
default NCCL_NET "AWS Libfabric"      # without the plugin NCCL stops, and does not go on over TCP, 17 times slower
default NCCL_SOCKET_IFNAME hsn        # ranks meet over the fast network's interfaces
default NCCL_CROSS_NIC 1              # a ring may use another card on the next node
default NCCL_NET_GDR_LEVEL PHB        # cards read and write GPU memory under the same CPU
default NCCL_GDRCOPY_ENABLE 1         # small messages go to GPU memory without a kernel
default NCCL_ALGO Ring                # reduce-scatter 16 % faster; some versions refuse torch's coalesced one with it
default NCCL_PROTO ^LL128             # this protocol needs stores of 128 bytes that nothing tears apart
default NCCL_MIN_NCHANNELS 4          # four cards to a node
default NCCL_NCHANNELS_PER_NET_PEER 4 # without it 24 % slower
default NCCL_NET_FORCE_FLUSH 0        # a GH200 sees received data in order without it
default NCCL_COLLNET_ENABLE 0         # Slingshot's switches do not reduce
default NCCL_NVLS_ENABLE 0            # nor does NVLink, without an NVSwitch

# libfabric.
default FI_PROVIDER cxi                     # Slingshot's
default FI_MR_CACHE_MONITOR userfaultfd     # the kernel tells of freed memory; hooks on malloc can deadlock
default FI_HMEM_CUDA_USE_GDRCOPY 1          # as NCCL_GDRCOPY_ENABLE
default FI_CXI_DISABLE_HOST_REGISTER 1      # libfabric's own buffers are not registered with CUDA
default FI_CXI_DEFAULT_CQ_SIZE 131072       # completions that may wait, before the queue overflows,
default FI_CXI_DEFAULT_TX_SIZE 2048         # and messages on their way
default FI_CXI_RX_MATCH_MODE hybrid         # the card matches messages, and the CPU once the card's table is full
default FI_CXI_RDZV_PROTO alt_read          # every message is read by its receiver, and none sent ahead
default FI_CXI_RDZV_GET_MIN 0
default FI_CXI_RDZV_THRESHOLD 0
default FI_CXI_RDZV_EAGER_SIZE 0
default FI_CXI_DISABLE_NON_INJECT_MSG_IDC 1 # the card fetches messages from memory, not out of the command
default MPICH_GPU_SUPPORT_ENABLED 0         # Cray's MPI leaves the GPUs alone

# torch.
default TORCH_NCCL_ASYNC_ERROR_HANDLING 1                # a rank that hangs or fails ends the others
default TORCH_NCCL_DUMP_ON_TIMEOUT 1                     # and says which collective it was,
default TORCH_NCCL_TRACE_BUFFER_SIZE 2000                # out of the last 2000
default TORCH_NCCL_AVOID_RECORD_STREAMS 1                # memory of collectives is free again as soon as they end
default CUDA_DEVICE_MAX_CONNECTIONS 1                    # kernels start in order: tensor-parallel communication overlaps
default PYTORCH_CUDA_ALLOC_CONF expandable_segments:True # less memory lost between blocks

# Between TCP, which costs a factor of 17, and one Slingshot card of 25 GB/s; raise it to what the log of a good job says.
default NEOX_MIN_ALLREDUCE_GB_S 15
unset -f default
