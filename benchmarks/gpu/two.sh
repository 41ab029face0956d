#!/usr/bin/env bash
# Checks and benchmarks over NCCL for two or more GPUs (NPROC): about 15 minutes. Resumable: rerun it to continue.
#
#   benchmarks/gpu/two.sh
#   DEVICE=cpu benchmarks/gpu/two.sh          dry run over gloo
set -uo pipefail
cd "$(dirname "$0")/../.."
. benchmarks/gpu/pieces.sh

NPROC=${NPROC:-2}
OUT=$OUT/$NPROC
mkdir -p "$OUT"
if [ "$DEVICE" = cuda ]; then
    rounds=9 quick=() compile=all
else
    rounds=7 quick=(--quick) compile=none
fi
on=(--run.device="$DEVICE")

piece 01-links $BOOST verify --nproc "$NPROC" --only machines collectives links --out "$OUT/links.json" "${on[@]}" --parallel.tp="$NPROC"
for family in cola lax dense; do
    piece "02-layouts-$family" $BOOST verify --nproc "$NPROC" --only layouts --family "$family" --compile "$compile" --out "$OUT/layouts-$family.json" \
        "${on[@]}" --parallel.tp="$NPROC"
done
piece 03-faults $BOOST verify --nproc "$NPROC" --only runs --out "$OUT/runs.json" "${on[@]}" --parallel.tp="$NPROC"
piece 04-calibrate $BOOST plan calibrate --device "$DEVICE" --nproc "$NPROC" --out "$OUT/profile.toml" ${quick[@]+"${quick[@]}"}
piece 05-step $BOOST verify --nproc "$NPROC" --only step --gpu "$OUT/profile.toml" --out "$OUT/step.json" "${on[@]}" --parallel.tp="$NPROC"
if [ "$DEVICE" = cuda ]; then
    piece 06-steps $PYTHON -m benchmarks steps --tp "$NPROC" --hardware "$OUT/profile.toml" --rounds "$rounds" --out "$OUT/steps"
fi
finish
