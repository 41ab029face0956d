#!/bin/bash
# boost train on several nodes of a Slurm cluster: one torchrun a node, one process a GPU.
#
#   sbatch --nodes 2 --gpus-per-node 8 --time 12:00:00 examples/slurm.sh run.toml --parallel.tp 8 --parallel.dp 2
#
# Everything after the script's name goes to `boost train`. tp x pp x dp must be nodes x GPUs a node, with TP (and better
# PP x TP) inside a node. run.dir and data.store must lie on a file system that all nodes share. Two minutes before the
# time limit the run is saved and the job goes back to the queue; started again it goes on from there.

#SBATCH --job-name=boost
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
# Whole nodes: one task a node would otherwise be given one core for all of its processes.
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
# After the failure of a node or a preemption Slurm itself puts the job back.
#SBATCH --requeue
# To this shell alone (B:), 120 s before the limit. More for a model whose checkpoint takes longer than that.
#SBATCH --signal=B:USR1@120

set -euo pipefail

# The processes of a node have so long to save before torchrun kills them: less than the 120 s above. torch 2.11 knows
# neither this variable nor --shutdown-timeout and gives them 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}

# Where nodes have several networks, gloo and NCCL must be told the fast one; gloo also where a node's own name means a
# loopback address to it (`getent hosts $(hostname)`), which no other node can reach.
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Two jobs that share a node must not meet; below 32768 the system gives no port to anybody of its own accord.
port=$((20000 + SLURM_JOB_ID % 10000))

# srun sends SIGUSR1 on to every torchrun. Not SIGTERM: srun takes that as the order to kill its tasks at once.
again='' step='' interrupted=''
# shellcheck disable=SC2329 # the traps call it
pass_on() {
    interrupted=1
    [[ -z $step ]] || kill -USR1 "$step" 2>/dev/null || true
}
trap 'again=1; pass_on' USR1
# Preemption and scancel: Slurm knows by itself whether the job is to run again.
trap 'pass_on' TERM

# torchrun hands signals on, but SIGUSR1 only if it is told to: without, it dies of it and leaves its processes alone.
# --max-restarts is for a process that dies; a node that dies is --requeue's. --resume stands first, so that another
# --resume among the arguments wins.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none \
    torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:$port" \
    --rdzv-id "$SLURM_JOB_ID" \
    --max-restarts "${MAX_RESTARTS:-3}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    -m boost.cli.main train --resume auto "$@" &
step=$!

# A signal ends `wait`, not srun.
while true; do
    interrupted='' code=0
    wait "$step" || code=$?
    [[ -n $interrupted ]] || break
done

# A run that was stopped ends with a code other than 0, one that came to its end all the same with 0.
if [[ -n $again && $code -ne 0 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
