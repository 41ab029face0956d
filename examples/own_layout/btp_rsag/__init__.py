"""A layout in two files: `spec.py` states how weights are placed and which collectives a step issues; `runtime.py` issues them."""
