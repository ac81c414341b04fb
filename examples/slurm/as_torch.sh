#!/usr/bin/env bash
# Tells a task of srun what torch wants to know, then becomes the command: srun as_torch.sh python train.py
set -eu
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS
# Unless the site knows better, such as an address on a faster network.
export MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)}
export MASTER_PORT=${MASTER_PORT:-29500}
exec "$@"
