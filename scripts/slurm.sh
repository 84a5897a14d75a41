#!/bin/bash
# A training job under SLURM, on any number of nodes, that goes on after its time limit:
#
#     sbatch --nodes=4 scripts/slurm.sh --config llama3_8b.toml --checkpoint.enable
#
# 300 seconds before the limit every process of the job gets SIGUSR1: all ranks finish the same step, save it and end
# with status 75, and the job is queued again. So it is when SLURM preempts it. Make the time longer than a save takes,
# which the log tells ("saved step ..."). Any other status ends the job for good.
#SBATCH --job-name=dmuon-titan
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -u

# SLURM runs a copy of this file, in the folder from which it was submitted.
RUN_TRAIN=${RUN_TRAIN:-$SLURM_SUBMIT_DIR/run_train.sh}
export RUN_TRAIN NNODES=$SLURM_JOB_NUM_NODES
if [ "$NNODES" -gt 1 ]; then
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
    export MASTER_ADDR MASTER_PORT
fi

# SIGTERM, by which SLURM preempts, reaches this shell too: it waits for its tasks all the same.
trap : TERM
srun bash -c 'export NODE_RANK=$SLURM_NODEID; exec "$RUN_TRAIN" "$@"' run_train "$@" &
tasks=$!
while true; do
    wait "$tasks"
    status=$?
    kill -0 "$tasks" 2>/dev/null || break
done
wait "$tasks" # the signal may have come as they ended
last=$?
[ "$last" -eq 127 ] || status=$last
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
