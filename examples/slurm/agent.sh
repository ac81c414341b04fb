#!/usr/bin/env bash
# One node's agent, which starts its ranks. agent.sbatch and replaced.sbatch say what it needs to know.
exec keepstep run --job "$GPT_JOB" --redundancy copies:2 --nnodes 2 --nproc-per-node 1 \
    --rdzv-endpoint "$GPT_ENDPOINT" examples/gpt.py "$@"
