#!/usr/bin/env bash
# Checks and benchmarks for one GPU: about 45 minutes on an H100. Resumable: rerun it to continue.
#
#   benchmarks/gpu/one.sh                     run from the repository root, with boost installed for $PYTHON
#   DEVICE=cpu benchmarks/gpu/one.sh          dry run with small models
set -uo pipefail
cd "$(dirname "$0")/../.."
. benchmarks/gpu/pieces.sh

if [ -z "$SMALL" ]; then
    # Four models and their optimizers are in memory at once, so each has a third of the 1B model's blocks.
    model=(boost-1b) single=(--model.layers=8) rounds=9 quick=() steps=(--validate) own=()
    shares=(--dim 4096 --ffn 11008 --heads 32 --layers 4 --seq 4096 --micro-batches 1 4) kernels=()
else
    model=(demo --train.seq_len=64 --train.micro_batch=2 --train.global_batch=2 --model.layers=2) single=() rounds=7 quick=(--quick --force) steps=()
    own=("${model[@]}" --parallel.tp=1)
    shares=(--dim 128 --ffn 352 --heads 4 --layers 2 --seq 64 --micro-batches 1 4) kernels=(--tokens 256 --width 128)
fi
on=(--run.device="$DEVICE")

piece 01-verify $BOOST verify ${own[@]+"${own[@]}"} --nproc 1 --only machines layouts step --compile all --out "$OUT/verify.json" "${on[@]}"
piece 02-same-as-the-cpu env BOOST_TEST_DEVICE="$DEVICE" $PYTHON -m pytest -p no:cacheprovider -m cuda -rf tests/measure/test_devices_agree.py
piece 02-graphs env BOOST_TEST_DEVICE="$DEVICE" $PYTHON -m pytest -p no:cacheprovider -m cuda -rf tests/train/test_graphs_on_gpus.py
piece 03-processes-share-it env BOOST_TEST_DEVICE="$DEVICE" $PYTHON -m pytest -p no:cacheprovider -m cuda -rf tests/parallel/test_late.py
for compile in none kernels blocks; do
    piece "04-shares-$compile" $PYTHON -m benchmarks.gpu.shares --device "$DEVICE" --compile "$compile" "${shares[@]}" \
        --out "$OUT/shares-$compile.json" --traces "$OUT/traces-$compile"
    if [ "$DEVICE" = cuda ]; then
        piece "04-shares-$compile-graphs" $PYTHON -m benchmarks.gpu.shares --compile "$compile" --graphs "${shares[@]}" \
            --out "$OUT/shares-$compile-graphs.json" --traces "$OUT/traces-$compile-graphs"
    fi
done
piece 05-kernels $PYTHON -m benchmarks.gpu.kernels --device "$DEVICE" ${kernels[@]+"${kernels[@]}"} --out "$OUT/kernels.json"
piece 06-single $PYTHON -m benchmarks single "${model[@]}" ${single[@]+"${single[@]}"} "${on[@]}" --rounds "$rounds" --out "$OUT/single"
piece 07-recompute $PYTHON -m benchmarks recompute "${model[@]}" --tp 1 "${on[@]}" --rounds "$rounds" --out "$OUT/recompute"
piece 08-calibrate $BOOST plan calibrate --device "$DEVICE" --nproc 1 --out "$OUT/profile.toml" ${quick[@]+"${quick[@]}"}
if [ ${#steps[@]} -gt 0 ]; then
    piece 09-validate $PYTHON -m benchmarks validation --measure --hardware "$OUT/profile.toml" --out "$OUT/validation"
fi
finish
