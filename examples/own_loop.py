"""A training loop of your own with BTP: a CoLA decoder sharded over the processes that torchrun starts.

torchrun --nproc-per-node 2 examples/own_loop.py
torchrun --nproc-per-node 8 examples/own_loop.py --layout btp-sp --dim 1024       # on GPUs, with NCCL
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import boost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="btp", help="how layers are sharded over TP ranks (default btp)")
    parser.add_argument("--dim", type=int, default=128, help="width of the residual stream (default 128)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default 60)")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))

    # Bytes as tokens: this file is the corpus. All TP ranks get the same batches.
    text = torch.tensor(list(Path(__file__).read_bytes()))
    length, batch = 64, 8
    draw = torch.Generator().manual_seed(0)

    model = boost.nn.Decoder(vocab_size=256, dim=args.dim, heads=8, layers=2, layout=args.layout, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        starts = torch.randint(len(text) - length - 1, (batch,), generator=draw)
        tokens = torch.stack([text[start : start + length + 1] for start in starts]).to(device)
        loss = model(tokens[:, :-1], tokens[:, 1:])  # mean cross-entropy, the same on all TP ranks
        loss.backward()  # gradients are complete: nothing is left to reduce over TP
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)

    held = sum(parameter.numel() for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(f"each of {dist.get_world_size()} TP ranks holds {held / 1e6:.2f}M parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
