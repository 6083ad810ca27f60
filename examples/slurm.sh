#!/usr/bin/env bash
# Four nodes of eight devices: sbatch examples/slurm.sh --data /path/to/text
# Tensor parallelism stays inside a node; parameters are sharded over one node's remaining
# ranks and replicated over the nodes, so that only gradients cross the network.
#SBATCH --job-name=fsdp_tp
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
# A checkpoint is written when SIGTERM comes, 120 s before the end; torchrun gives it 110 s.
#SBATCH --signal=TERM@120
#SBATCH --output=slurm-%j.log
set -euo pipefail

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun torchrun \
  --nnodes "$SLURM_NNODES" \
  --nproc-per-node 8 \
  --rdzv-id "$SLURM_JOB_ID" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$head_node:29500" \
  -m fsdp_tp.train \
  --tensor-parallel-degree 2 \
  --hybrid-shard-degree 4 \
  --global-batch-size 256 \
  --precision bf16 \
  --output "runs/$SLURM_JOB_ID" \
  "$@"
