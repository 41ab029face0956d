#!/bin/bash
# CoLA 60M on C4 as published (arXiv 2502.10940): data, training, and the perplexity to compare. Run it again to resume.
#
#   bash examples/recipes/c4-60m.sh --parallel.dp 8               # all arguments are passed to `boost train`
#   DATA="/data/c4/train --heldout-from /data/c4/validation" bash examples/recipes/c4-60m.sh     # copies of C4's files
#
# By default, it streams 2.6 GB of C4. On CPUs, it takes days; `boost plan --model cola-60m --gpus 8 --gpu h100` predicts GPUs.
set -euo pipefail
trap 'exit 130' INT TERM # otherwise, a run that is stopped, which exits with 0 after its save, would be evaluated

STORE=${STORE:-data/c4} RUN=${RUN:-runs/c4-60m}
# 10,000 steps of 512 x 256 tokens. The publications evaluate on 10M tokens.
read -ra data <<< "${DATA:---hf allenai/c4:en --heldout-split validation}"
boost prepare "${data[@]}" --tokenizer "${TOKENIZER:-t5-base}" --max-tokens "${TOKENS:-1310720000}" --max-heldout-tokens 10000000 \
    --out "$STORE"

boost train cola-60m --data.store "$STORE" --run.dir "$RUN" --resume auto "$@"

# GaLore, LORO and CoLA evaluate on the first 256 tokens of each document.
boost eval "$RUN" --by-document
echo "published: perplexity 34.04 after 10,000 steps (CoLA, arXiv 2502.10940)"
