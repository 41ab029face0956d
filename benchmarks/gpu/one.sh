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
else
    model=(demo --train.seq_len=64 --train.micro_batch=2 --train.global_batch=2 --model.layers=2) single=() rounds=7 quick=(--quick --force) steps=()
    own=("${model[@]}" --parallel.tp=1)
fi
on=(--run.device="$DEVICE")

piece 01-verify $BOOST verify ${own[@]+"${own[@]}"} --nproc 1 --only machines layouts step --compile all --out "$OUT/verify.json" "${on[@]}"
piece 02-same-as-the-cpu env BOOST_TEST_DEVICE="$DEVICE" $PYTHON -m pytest -p no:cacheprovider -m cuda -rf tests/measure/test_devices_agree.py
piece 02-graphs env BOOST_TEST_DEVICE="$DEVICE" $PYTHON -m pytest -p no:cacheprovider -m cuda -rf tests/train/test_graphs_on_gpus.py
piece 03-processes-share-it env BOOST_TEST_DEVICE="$DEVICE" $PYTHON -m pytest -p no:cacheprovider -m cuda -rf tests/parallel/test_late.py
for name in layouts kernels; do
    piece "04-$name" $PYTHON -m benchmarks.gpu.contest "$name" --device "$DEVICE" ${SMALL:+--small} --seconds "$LIMIT_S" --out "$OUT/contest.json"
done
piece 05-single $PYTHON -m benchmarks single "${model[@]}" ${single[@]+"${single[@]}"} "${on[@]}" --rounds "$rounds" --out "$OUT/single"
piece 06-recompute $PYTHON -m benchmarks recompute "${model[@]}" --tp 1 "${on[@]}" --rounds "$rounds" --out "$OUT/recompute"
piece 07-calibrate $BOOST plan calibrate --device "$DEVICE" --nproc 1 --out "$OUT/profile.toml" ${quick[@]+"${quick[@]}"}
if [ ${#steps[@]} -gt 0 ]; then
    piece 08-validate $PYTHON -m benchmarks validation --measure --hardware "$OUT/profile.toml" --out "$OUT/validation"
fi
finish
