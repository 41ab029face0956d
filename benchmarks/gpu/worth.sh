#!/usr/bin/env bash
# Is low-rank training worth it? Trains dense, svd, cola and lax models of 60M shapes for the same time on one GPU: 12 minutes.
# Resumable: rerun it to continue. More seeds, and therefore data orders, take 11 minutes each.
#
#   STORE=build/worth.tar.xz benchmarks/gpu/worth.sh        run from the repository root, with boost installed for $PYTHON
#   SEEDS="0 1 2" STORE=build/worth.tar.xz benchmarks/gpu/worth.sh
#   DEVICE=cpu benchmarks/gpu/worth.sh                   dry run with small models, on the text of this repository
#
# STORE is a token store, or one packed with tar, which is unpacked to $OUT/store. benchmarks/gpu/corpus.py says how to make both.
set -uo pipefail
cd "$(dirname "$0")/../.."
. benchmarks/gpu/pieces.sh
SEEDS=${SEEDS:-0}

if [ -z "$SMALL" ]; then
    STORE=${STORE:?the token store, such as build/worth.tar.xz} size=(--train.micro_batch=128) time=(--seconds 150 --every 20)
else
    STORE=${STORE:-$OUT/store.tar.xz} time=(--seconds 6 --every 2 --eval-tokens 2000)
    size=(--model.dim=32 --model.ffn_dim=48 --model.layers=2 --model.heads=4 --model.vocab_size=320)
    size+=(--train.seq_len=32 --train.global_batch=4 --train.micro_batch=4 --train.compute_dtype=float32)
    if [ ! -e "$STORE" ]; then
        piece 00-prepare $BOOST prepare docs README.md --tokenizer train:300 --out "$OUT/prepared"
        piece 00-pack tar -cJf "$STORE" -C "$OUT/prepared" .
    fi
fi
if [ -f "$STORE" ]; then
    piece 00-unpack $PYTHON -m tarfile -e "$STORE" "$OUT/store"
    STORE=$OUT/store
fi
for seed in $SEEDS; do
    for family in dense svd cola lax; do
        rank=() && [ -z "$SMALL" ] || [ "$family" = dense ] || rank=(--model.rank=8)
        piece "worth-$family-$seed" $PYTHON -m benchmarks.gpu.worth train "$family" "$STORE" --out "$OUT" --device "$DEVICE" \
            --seed "$seed" "${time[@]}" "${size[@]}" ${rank[@]+"${rank[@]}"}
    done
done
piece worth-compare $PYTHON -m benchmarks.gpu.worth compare "$OUT"
finish
