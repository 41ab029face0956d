#!/usr/bin/env bash
# Checks and benchmarks over NCCL for two or more GPUs (NPROC): about half an hour. Resumable: rerun it to continue.
#
#   benchmarks/gpu/two.sh
#   DEVICE=cpu benchmarks/gpu/two.sh          dry run over gloo
set -uo pipefail
cd "$(dirname "$0")/../.."
. benchmarks/gpu/pieces.sh

NPROC=${NPROC:-2}
OUT=$OUT/$NPROC
mkdir -p "$OUT"
if [ -z "$SMALL" ]; then
    rounds=9 quick=() compile=all short=(--train.steps=200 --train.compute_dtype=bfloat16) own=()
else
    rounds=7 quick=(--quick --force) compile=none short=(--train.steps=50 --train.seq_len=32 --model.layers=2)
    own=(demo --train.seq_len=64 --model.layers=2)
fi
on=(--run.device="$DEVICE")

piece 01-links $BOOST verify --nproc "$NPROC" --only machines collectives links --out "$OUT/links.json" "${on[@]}" --parallel.tp="$NPROC"
# Verify one layout at a time: compiling all of them exceeds a piece's time limit, and finished pieces are not repeated.
for family in cola lax dense; do
    for layout in $($PYTHON -c "from boost.config import load; from boost.config.layouts import layouts_of
print(*layouts_of(load(None, ['--model.family=$family']).model), 'dp', 'cp', 'pp')"); do
        piece "02-layouts-$family-$layout" $BOOST verify --nproc "$NPROC" --only layouts --family "$family" --layout "$layout" \
            --compile "$compile" --out "$OUT/layouts-$family-$layout.json" "${on[@]}" --parallel.tp="$NPROC"
    done
done
piece 03-faults $BOOST verify --nproc "$NPROC" --only runs --out "$OUT/runs.json" "${on[@]}" --parallel.tp="$NPROC"
piece 04-calibrate $BOOST plan calibrate --device "$DEVICE" --nproc "$NPROC" --out "$OUT/profile.toml" ${quick[@]+"${quick[@]}"}
piece 05-step $BOOST verify ${own[@]+"${own[@]}"} --nproc "$NPROC" --only step --gpu "$OUT/profile.toml" --out "$OUT/step.json" "${on[@]}" --parallel.tp="$NPROC"
if [ -z "$SMALL" ]; then
    piece 06-steps $PYTHON -m benchmarks steps --tp "$NPROC" --hardware "$OUT/profile.toml" --rounds "$rounds" --out "$OUT/steps"
fi

# Runs that the checks above do not cover: isolated documents with overlapped halves, a replica that is killed and rejoins, and
# three kinds of parallelism at once.
piece 07-data $BOOST prepare --stdlib --heldout 0.001 --out "$OUT/store"
run() { # NAME FLAG...: a run of the demo, resumed if it was interrupted
    local name=$1
    shift
    piece "$name" $BOOST train demo "${on[@]}" "${short[@]}" --data.store "$OUT/store" --run.dir "$OUT/$name" --resume auto "$@"
}
run 08-documents --parallel.tp "$NPROC" --parallel.overlap halves --data.isolate_documents true --train.micro_batch 1 \
    --train.recompute low-rank+attention-output
run 09-recovery --parallel.tp 1 --parallel.dp "$NPROC" --train.global_batch "$((4 * NPROC))" --run.recovery in-step \
    --inject-fault "kill@20:$((NPROC - 1))" --inject-fault "wait@40:0"
if [ "$((NPROC % 8))" = 0 ]; then
    run 10-pp-dp-tp --parallel.pp 2 --parallel.dp "$((NPROC / 4))" --parallel.tp 2 --train.global_batch "$((2 * NPROC))" --train.micro_batch 1
fi
finish
