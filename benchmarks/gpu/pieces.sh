# For one.sh, two.sh, contest.sh and worth.sh: pieces of at most ten minutes, each of which writes its result immediately; finished
# ones are skipped.
#
#   OUT=folder DEVICE=cuda|cpu SMALL=1 PYTHON=python BOOST=boost
#
# SMALL=1 is a dry run: it runs the same commands on small models, so that everything but the hardware is tested before a GPU is
# available. DEVICE=cpu implies SMALL=1; with DEVICE=cuda, SMALL=1 is for a software GPU (docs/verify.md).

OUT=${OUT:-benchmarks/gpu/results}
DEVICE=${DEVICE:-cuda}
[ "$DEVICE" = cuda ] || SMALL=1
SMALL=${SMALL:-}
PYTHON=${PYTHON:-python}
BOOST=${BOOST:-"$PYTHON -m boost.cli.main"}
LIMIT_S=${LIMIT_S:-600}
mkdir -p "$OUT"
failed=()
if $PYTHON -c 'import sys, torch; sys.exit(not torch.__version__.startswith("2.11."))'; then
    export PYTHONPATH=$PWD/benchmarks/gpu/torch211${PYTHONPATH:+:$PYTHONPATH}
fi

piece() { # NAME COMMAND...
    local name=$1 begun=$SECONDS code=0
    shift
    if [ -e "$OUT/$name.done" ]; then
        echo "$name: already done"
        return
    fi
    echo "== $name: $*"
    timeout --kill-after 20 "$LIMIT_S" "$@" >"$OUT/$name.log" 2>&1 || code=$?
    tail -n 12 "$OUT/$name.log"
    if [ "$code" = 0 ]; then
        echo "$((SECONDS - begun)) s" >"$OUT/$name.done"
    else
        echo "$name: exit code $code after $((SECONDS - begun)) s; full log: $OUT/$name.log"
        failed+=("$name")
    fi
}

finish() {
    if [ ${#failed[@]} = 0 ]; then
        echo "all pieces are done: $OUT"
    else
        echo "failed: ${failed[*]}; rerun this script to retry them"
        exit 1
    fi
}
