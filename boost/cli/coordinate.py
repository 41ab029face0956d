"""`boost coordinate`: hosts the key-value store that replicas on several machines coordinate through (in-step recovery)."""

import argparse
import signal
import socket
import time

from boost.errors import ConfigError

PORT = 29410


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "coordinate",
        description="Hosts the key-value store through which the replicas of a run agree on membership\n"
        "(run.recovery = 'in-step'). It does no computation. Start a new one for each run, before the replicas,\n"
        "on a machine that stays up, such as the login node. Stop it with Ctrl-C after the run. Anyone who can\n"
        "reach the port can disrupt the run: do not expose it outside the cluster.",
        epilog="examples:\n"
        f"  boost coordinate --port {PORT}\n\n"
        "then start one torchrun per replica:\n"
        f"  BOOST_REPLICA=0 BOOST_COORDINATOR=login:{PORT} boost launch --nproc-per-node 8 --max-restarts 100 \\\n"
        "      -- train run.toml --parallel.tp 8 --parallel.dp 16 --run.recovery in-step",
    )
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"TCP port (default {PORT})")
    return parser


def run(args: argparse.Namespace) -> int:
    import torch.distributed as dist

    if not 1 <= args.port <= 65535:
        raise ConfigError(f"--port = {args.port} is not a TCP port; valid values: 1 to 65535")
    try:
        store = dist.TCPStore("localhost", args.port, is_master=True, wait_for_workers=False)
    except dist.DistNetworkError as error:
        raise ConfigError(f"--port = {args.port} is unavailable: {str(error).splitlines()[0]}") from error
    name = socket.gethostname()
    print(f"listening on {name}:{store.port}; set BOOST_COORDINATOR={name}:{store.port}", flush=True)
    over: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: over.append(received))
    while not over:
        time.sleep(0.2)
    return 0
