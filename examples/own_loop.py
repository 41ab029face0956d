"""Your own training loop with BTP: a CoLA decoder over the TP ranks and replicas that torchrun starts.

torchrun --nproc-per-node 2 examples/own_loop.py
torchrun --nproc-per-node 4 examples/own_loop.py --dp 2
torchrun --nproc-per-node 8 examples/own_loop.py --dp 2 --layout btp-sp --dim 1024       # on GPUs, with NCCL
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import boost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="btp", help="how layers are sharded over TP ranks (default btp)")
    parser.add_argument("--dp", type=int, default=1, help="replicas, sharded with FSDP2, each a TP group (default 1)")
    parser.add_argument("--dim", type=int, default=128, help="width of the residual stream (default 128)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default 60)")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
    mesh = init_device_mesh(device, (args.dp, dist.get_world_size() // args.dp), mesh_dim_names=("dp", "tp"))
    replica = mesh["dp"].get_local_rank()

    # Bytes as tokens: this file is the corpus. All TP ranks of a replica get the same sequences.
    text = torch.tensor(list(Path(__file__).read_bytes()))
    length, batch = 64, 8
    draw = torch.Generator().manual_seed(0)

    model = boost.nn.Decoder(vocab_size=256, dim=args.dim, heads=8, layers=2, layout=args.layout, mesh=mesh)
    if args.dp > 1:
        for block in model.layers:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        starts = torch.randint(len(text) - length - 1, (batch,), generator=draw)
        tokens = torch.stack([text[start : start + length + 1] for start in starts.chunk(args.dp)[replica]]).to(device)
        loss = model(tokens[:, :-1], tokens[:, 1:])  # mean cross-entropy, the same on all TP ranks
        loss.backward()  # gradients are complete: nothing is left to reduce over TP
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the whole model: parameters are DTensors
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps - 1:
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            if dist.get_rank() == 0:
                print(f"step {step:4d}  loss {loss.item():.4f}  gradient norm {norm.item():.3f}", flush=True)

    whole = sum(parameter.numel() for parameter in model.parameters())
    shards = (parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in model.parameters())
    held = sum(shard.numel() for shard in shards)
    if dist.get_rank() == 0:
        print(f"each of {dist.get_world_size()} ranks holds {held / 1e6:.2f}M of {whole / 1e6:.2f}M parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
