"""Sets up the software GPU once, for one version of torch, in FOLDER/VERSION (`make softgpu`):

venv             a CUDA build of torch from the package index, and the project's dependencies; some 7 GB
libcuda.so.1     runtime.cpp, nccl.cpp and nothing.c

python tests/softgpu/setup.py .softgpu --torch 2.13.0
python tests/softgpu/setup.py .softgpu --venv PATH       # an existing environment that has them
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
VERSION = "import torch; assert torch.version.cuda, 'not a CUDA build'; print(torch.__version__.partition('+')[0])"


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def new_venv(venv: Path, torch: str) -> None:
    """Installs torch first and alone; otherwise, other packages' requirements would affect pip's choice of its build."""
    if not (venv / "bin" / "python").exists():
        output(sys.executable, "-m", "venv", venv)
    environment = os.environ | {"PIP_FIND_LINKS": ""}  # wheel folders often contain CPU builds
    pip: list[str | Path] = [venv / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    for words in ([f"torch=={torch}"], ["--constraint", "constraints.txt", "--editable", ".[dev]"]):
        subprocess.run([*pip, *words], check=True, cwd=REPOSITORY, env=environment)


def build(home: Path) -> None:
    """Compiles the library against the CUDA headers that torch's wheels bring. The folder crt is only in Triton's copy."""
    packages = Path(output(home / "venv/bin/python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"))
    (cuda,) = (path.parent for path in packages.glob("nvidia/*/include/cuda_runtime_api.h"))
    objects = []
    for source in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.c")]):
        compiler = ["g++", "-std=c++17", "-O2", "-Wall"] if source.suffix == ".cpp" else ["gcc", "-w"]
        headers = [f"-I{folder}" for folder in (cuda, packages / "triton/backends/nvidia/include")]
        objects.append(home / f"{source.stem}.o")
        output(*compiler, *headers, "-fPIC", "-c", source, "-o", objects[-1])
    # Triton looks for the driver under this name.
    output("g++", "-shared", "-Wl,-soname,libcuda.so.1", "-o", home / "libcuda.so.new", *objects, "-ldl", "-lpthread")
    (home / "libcuda.so.new").replace(home / "libcuda.so.1")
    for path in objects:
        path.unlink()
    link(home / "libcuda.so", Path("libcuda.so.1"))  # for the linker


def link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--torch", metavar="VERSION")
    chosen.add_argument("--venv", type=Path)
    args = parser.parse_args()
    folder = args.folder.resolve()  # pip runs in the repository
    if args.venv is None:
        home = folder / args.torch
        home.mkdir(parents=True, exist_ok=True)
        new_venv(home / "venv", args.torch)
    version = output((args.venv or home / "venv") / "bin" / "python", "-c", VERSION)
    if args.venv is not None:
        home = folder / version
        home.mkdir(parents=True, exist_ok=True)
        link(home / "venv", args.venv.resolve())
    build(home)
    print(f"ready: {home} (torch {version})")


if __name__ == "__main__":
    main()
