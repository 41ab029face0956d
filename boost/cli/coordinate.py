"""`boost coordinate`: the store through which replicas on several machines agree who trains (run.recovery = "in-step")."""

import argparse
import signal
import socket
import time
from typing import Any

from boost.errors import ConfigError

PORT = 29410


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "coordinate",
        help="host the store of a run with in-step recovery",
        description="Hosts the store through which the replicas of one run agree on who trains (run.recovery = 'in-step'). It\n"
        "computes nothing; start it on a machine that stays, the login node for example, before the replicas, anew for each\n"
        "run, and end it with Ctrl-C when the run is over. Whoever reaches the port can disturb the run: keep it inside the\n"
        "cluster.",
        epilog="examples:\n"
        f"  boost coordinate --port {PORT}\n\n"
        "then on each machine, one torchrun for each replica:\n"
        f"  BOOST_REPLICA=0 BOOST_COORDINATOR=login:{PORT} torchrun --nproc-per-node 8 --max-restarts 100 \\\n"
        "      -m boost.cli.main train run.toml --parallel.tp 8 --parallel.dp 16 --run.recovery in-step",
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        raise ConfigError(f"--port = {args.port} cannot be listened on: {str(error).splitlines()[0]}") from error
    name = socket.gethostname()
    print(f"coordinates at {name}:{store.port}; set BOOST_COORDINATOR={name}:{store.port}", flush=True)
    over: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: over.append(received))
    while not over:
        time.sleep(0.2)
    return 0
