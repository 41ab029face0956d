"""Prints the lower bounds of all dependencies as pip's constraints, so that `make versions` tests them."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
for requirement in (
    *project["dependencies"],
    *(one for group in ("data", "plots", "hf", "peft", "bench") for one in project["optional-dependencies"][group]),
):
    if bound := re.match(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)", requirement):
        print(f"{bound[1]}=={bound[2]}")
