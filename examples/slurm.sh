#!/bin/bash
# The language model on two nodes, with one process for each of their GPUs:
#
#     sbatch examples/slurm.sh --steps 100000 --batch 256
#
# Two minutes before its time is over, SLURM sends SIGUSR1 to all processes. They save, and end with exit code 75. The
# job is then queued again under its number, and goes on from its checkpoint. So it does after a node has failed, or if
# the signal comes while Python still loads JAX: it then ends the processes with 128 plus its number, and nothing is lost.

#SBATCH --job-name=train_lm
#SBATCH --partition=gpu         # yours
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4     # one process for each GPU: JAX takes the GPU of its number on the node,
#SBATCH --gpus-per-node=4       # so each process sees all of them; --gpus-per-task would hide them
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120       # long enough to finish a step and write a checkpoint
#SBATCH --requeue
#SBATCH --open-mode=append      # one log for all turns

# In the environment of your choice, with `pip install -e ".[cluster,examples]" "jax[cuda12]"`.
checkpoint=${CHECKPOINT:-$PWD/runs/$SLURM_JOB_ID}  # a folder that all nodes reach; the number stays the same
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/runs/compiled} # a job that is queued again compiles nothing

srun --kill-on-bad-exit=1 \
    python examples/train_lm.py --devices all --checkpoint "$checkpoint" --every 500 --stopped 75 "$@"
code=$?
case "$code" in
75 | 138 | 143) scontrol requeue "$SLURM_JOB_ID" ;; # saved; SIGUSR1 or SIGTERM in the first seconds
esac
exit "$code"
