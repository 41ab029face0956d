#!/bin/sh
# transformers 5.24.0: a GGUF file is loaded with gguf_file and dequantized, so that all weights are float32. save_pretrained then
# raises "The model is quantized with gguf and is not serializable". With model.hf_quantizer = None, the same model is saved and
# loads again with equal logits, after quantization_config is deleted from its config.json.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0 numpy==2.4.6
cat > "$folder/save.py" <<'PYTHON'
import importlib.metadata
import json
import pathlib
import sys

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

folder = pathlib.Path(sys.argv[1])
Q8_0, draw = gguf.GGMLQuantizationType.Q8_0, np.random.default_rng(0)
file = gguf.GGUFWriter(folder / "x.gguf", "llama")
file.add_context_length(64)
file.add_embedding_length(64)
file.add_block_count(1)
file.add_feed_forward_length(128)
file.add_head_count(4)
file.add_head_count_kv(4)
file.add_layer_norm_rms_eps(1e-5)
file.add_rope_dimension_count(16)
file.add_vocab_size(32)
square, wide, tall = (64, 64), (128, 64), (64, 128)
shapes = {"attn_q": square, "attn_k": square, "attn_v": square, "attn_output": square, "ffn_gate": wide, "ffn_up": wide, "ffn_down": tall}
shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()} | {"token_embd": (32, 64), "output": (32, 64)}
for name, shape in shapes.items():
    weight = draw.standard_normal(shape).astype(np.float32)
    file.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, Q8_0), raw_dtype=Q8_0)
for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
    file.add_tensor(f"{name}.weight", np.ones(64, dtype=np.float32))
file.write_header_to_file()
file.write_kv_data_to_file()
file.write_tensors_to_file()
file.close()

print("transformers", transformers.__version__, "gguf", importlib.metadata.version("gguf"))
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="x.gguf")
dtypes = {parameter.dtype for parameter in model.parameters()}
print("dtypes of all parameters:", dtypes)
try:
    model.save_pretrained(folder / "out")
    saved = "saved"
except ValueError as error:
    saved = str(error).partition(" - ")[0]
print("save_pretrained:", saved)
model.hf_quantizer = None
model.save_pretrained(folder / "out")
config = folder / "out" / "config.json"
kept = json.loads(config.read_text())
method = (kept.pop("quantization_config", None) or {}).get("quant_method")
print("quantization_config in config.json:", method)
config.write_text(json.dumps(kept))
tokens = torch.arange(8)[None]
equal = torch.equal(model(tokens).logits, AutoModelForCausalLM.from_pretrained(folder / "out")(tokens).logits)
print("loads again, equal logits:", equal)
expected = {torch.float32}, "The model is quantized with gguf and is not serializable", "gguf", True
sys.exit((dtypes, saved, method, equal) != expected)
PYTHON
"$folder/venv/bin/python" "$folder/save.py" "$folder"
