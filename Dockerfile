# An image with boost and its pinned dependencies; examples/kubernetes.yaml uses it.
#
#   docker build --tag boost:0.1.0 .                                                              CUDA build of torch
#   docker build --tag boost:0.1.0-cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#   docker run --rm boost:0.1.0 plan --model 7b --gpus 64 --gpu h100
#   docker run --rm --gpus all --shm-size 16g --volume "$PWD/work:/work" boost:0.1.0 train demo
#
# The slim image has no CUDA: torch's wheels bring CUDA and NCCL, and the host's container toolkit brings the driver.
# constraints.txt was resolved with Python 3.11. `make image` builds the CPU image wherever docker or podman runs. Tried: buildah, with
# the CPU build of torch, on a Debian 12 base instead of python:3.11-slim. Never built: the CUDA image.
FROM python:3.11-slim

# Triton compiles its launchers with the system's C compiler (train.compile, the default on GPUs).
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# PyPI's build of torch for Linux is a CUDA build. For another CUDA version, set TORCH_INDEX=https://download.pytorch.org/whl/cu130.
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple "torch==$TORCH"

# Install torch first, so that code changes do not download it again.
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY boost boost
RUN pip install --no-cache-dir --constraint constraints.txt ".[data]"

RUN groupadd --gid 1000 boost \
    && useradd --uid 1000 --gid boost --create-home boost \
    && install --directory --owner boost --group boost /work
USER boost
WORKDIR /work
ENTRYPOINT ["boost"]
CMD ["--help"]
