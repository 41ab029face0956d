#!/bin/bash
# boost train on several nodes of a Slurm cluster: one torchrun per node, one process per GPU.
#
#   sbatch --nodes 2 --gpus-per-node 8 --time 12:00:00 examples/slurm.sh run.toml --parallel.tp 8 --parallel.dp 2
#
# All arguments after the script's name are passed to `boost train`. tp x pp x dp x cp must equal nodes x GPUs per node, with TP
# (preferably PP x TP) inside a node. run.dir and data.store must be on a file system that all nodes share. Two minutes before
# the time limit, the run saves and the job is requeued; the run then resumes from that checkpoint.

#SBATCH --job-name=boost
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
# Whole nodes; otherwise, each node's task would get one core for all of its processes.
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
# After a node failure or a preemption, Slurm itself requeues the job.
#SBATCH --requeue
# Signal only this shell (B:), 120 s before the limit. Increase the time if a checkpoint takes longer.
#SBATCH --signal=B:USR1@120

set -euo pipefail

# How many seconds a node's processes have to save before torchrun kills them: less than the 120 s above.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}

# If nodes have several networks, set the fast one for gloo and NCCL. gloo also needs it if a node's own name resolves to a
# loopback address (`getent hosts $(hostname)`), which no other node can reach.
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Two jobs that share a node need different ports; the system assigns no ephemeral ports below 32768.
port=$((20000 + SLURM_JOB_ID % 10000))

# One array task per replica of a run with in-step recovery.
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || export BOOST_REPLICA=$SLURM_ARRAY_TASK_ID

# A mistake ends the job here, once, with exit code 2, before anything starts. --resume comes first, so that another --resume
# among the arguments overrides it.
command=(train --resume auto "$@")
boost launch --check -- "${command[@]}"

# srun forwards SIGUSR1 to every node. SIGTERM would make srun kill its tasks at once.
requeue='' step='' interrupted=''
# shellcheck disable=SC2329 # called by the traps
forward() {
    interrupted=1
    [[ -z $step ]] || kill -USR1 "$step" 2>/dev/null || true
}
trap 'requeue=1; forward' USR1
# scancel --batch. To scancel and preemption, Slurm adds a SIGTERM to srun's tasks; of several signals, only the first counts.
trap 'forward' TERM

# --max-restarts handles a process that dies; --requeue handles a node that dies.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none \
    boost launch \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:$port" \
    --rdzv-id "$SLURM_JOB_ID" \
    --max-restarts "${MAX_RESTARTS:-3}" \
    -- "${command[@]}" &
step=$!

# A signal interrupts `wait`, not srun.
while true; do
    interrupted='' code=0
    wait "$step" || code=$?
    [[ -n $interrupted ]] || break
done

# A preempted run that saves within the partition's GraceTime is over before Slurm would requeue it.
if [[ $(scontrol show job "$SLURM_JOB_ID") =~ PreemptTime=[0-9] ]]; then
    requeue=1
fi
# 0: the run finished anyway. 2: a mistake; it would not help to run again.
if [[ -n $requeue && $code -ne 0 && $code -ne 2 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
