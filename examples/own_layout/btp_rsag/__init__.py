"""A layout in two files: `spec.py` says where weights lie and which collectives a step issues, `runtime.py` issues them."""
