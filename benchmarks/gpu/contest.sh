#!/usr/bin/env bash
# The contest for fifteen minutes on one GPU: pieces of at most two minutes, each A against B in one process, interleaved, written as
# it goes. Resumable: rerun it until it says that all pieces are done. The order is that of what decides most.
#
#   benchmarks/gpu/contest.sh                     run from the repository root, with boost installed for $PYTHON
#   DEVICE=cpu benchmarks/gpu/contest.sh          dry run with small models; on a software GPU, SMALL=1
#
# The published CoLA code is read from $COLA (default ../CoLA) if it is there; this runs that code, so read it first.
set -uo pipefail
cd "$(dirname "$0")/../.."
LIMIT_S=${LIMIT_S:-150}
. benchmarks/gpu/pieces.sh

for name in build peers attention gemms float8; do
    # Exit code 3: more contests are left than fit in a piece.
    for part in 1 2 3 4; do
        piece "$name-$part" bash -c '"$@"; code=$?; [ "$code" = 3 ] && code=0; exit "$code"' piece \
            "$PYTHON" -m benchmarks.gpu.contest "$name" --device "$DEVICE" ${SMALL:+--small} \
            --cola "${COLA:-../CoLA}" --out "$OUT/contest.json"
        grep -q "more to do" "$OUT/$name-$part.log" || break
    done
done
finish
