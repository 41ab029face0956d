"""Commands, checkpoints, `boost prepare` and batches, each next to what a user would write instead.

    python -m benchmarks.everyday runs/everyday          # needs 8 GB of disk and 12 GB of memory
    python -m benchmarks.everyday runs/everyday --only checkpoints loader

Contenders are interleaved, and files are read from the page cache. Results are medians over the rounds, with the lowest and the
highest. CPU seconds include child processes. Writes benchmarks/everyday.json, in which parts that were not measured keep their
results.
"""

import argparse
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.experiments.results import write_numbers
from boost.config import Config, load
from boost.data.batches import Batches
from boost.data.options import PrepareOptions
from boost.data.prepare import prepare
from boost.data.store import TokenStore
from boost.models.fused import fused_params
from boost.optim.adamw import Optimizer, build_optimizer
from boost.parallel.mesh import Mesh
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import CheckpointSaver, Position
from boost.train.model import Model, build_model, initialize_model
from boost.train.rundir import environment

PARTS = ("commands", "checkpoints", "background", "prepare", "loader")
RESULT = Path(__file__).parent / "everyday.json"
Contenders = dict[str, Callable[[], object]]
BATCH, SEQ_LEN, BATCHES = 64, 256, 200
ALONE = Mesh(torch.device("cpu"))


def cpu_seconds() -> float:
    return sum(
        u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def interleaved(contenders: Contenders, rounds: int, before: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Wall and CPU seconds of each contender."""
    seconds: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            before()
            wall, cpu = time.perf_counter(), cpu_seconds()
            run()
            if number:  # the first round warms up
                seconds[name]["wall"].append(time.perf_counter() - wall)
                seconds[name]["cpu"].append(cpu_seconds() - cpu)
    return {"seconds": {name: {clock: spread(values) for clock, values in of.items()} for name, of in seconds.items()}}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def commands(folder: Path, rounds: int) -> dict[str, Any]:
    """Python processes that import a package."""
    programs = "import boost; boost.Trainer", "import torch"
    contenders: Contenders = {
        each: partial(subprocess.run, [sys.executable, "-c", each], check=True) for each in programs
    }
    return {"import": interleaved(contenders, rounds)}


def trained() -> tuple[Config, Model, Optimizer]:
    """A model whose weights and moments are any numbers."""
    config = load("llama-130m")
    model = build_model(config, ALONE)
    initialize_model(model, 0)
    optimizer = build_optimizer(list(fused_params(model)), config, ALONE)
    for values in optimizer.moments.values():
        for value in values.values():
            value.uniform_()
    return config, model, optimizer


def saver_of(config: Config, model: Model, optimizer: Optimizer) -> CheckpointSaver:
    return CheckpointSaver(model, optimizer, config, b"{}", {"store": "", "tokenizer": "", "eos": 0}, ALONE)


def states_of(model: Model, optimizer: Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.adamw.state_dict()}


def torch_save(state: Any, file: Path) -> None:
    with file.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


def checkpoints(folder: Path, rounds: int) -> dict[str, Any]:
    """A foreground save and a load."""
    config, model, optimizer = trained()
    saver, ours, theirs = saver_of(config, model, optimizer), folder / "ours", folder / "theirs.pt"

    def clean() -> None:
        shutil.rmtree(ours, ignore_errors=True)
        theirs.unlink(missing_ok=True)
        os.sync()

    def write() -> object:
        return saver.save(ours, Position(1, 1))

    def read() -> object:
        return ckpt.load_training_state(ckpt.open_checkpoint(ours), model, optimizer, ALONE)

    def torch_read_into() -> None:
        states = torch.load(theirs)
        model.load_state_dict(states["model"])
        optimizer.adamw.load_state_dict(states["optimizer"])

    state = states_of(model, optimizer)
    saves = interleaved(
        {"boost, save": write, "torch.save, fsync": lambda: torch_save(state, theirs)}, rounds, before=clean
    )
    write()
    torch_save(state, theirs)
    for path in (theirs, *ours.rglob("*.safetensors")):  # into the page cache
        with path.open("rb") as stream:
            while stream.read(1 << 24):
                pass
    loads = interleaved({"boost, load": read, "torch.load, load_state_dict": torch_read_into}, rounds)
    size = sum(path.stat().st_size for path in ours.rglob("*") if path.is_file())
    clean()
    return {"bytes": size, "save": saves, "load": loads}


def background(folder: Path, rounds: int) -> dict[str, Any]:
    """A save in the background of a training loop: how long it stalls the loop, and how fast the loop is meanwhile."""
    config, model, optimizer = trained()
    saver, target = saver_of(config, model, optimizer), folder / "background"
    small = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    inner, batch = torch.optim.AdamW(small.parameters(), fused=True), torch.randn(512, 1024)

    def step() -> None:
        small(batch).square().mean().backward()
        inner.step()
        inner.zero_grad()

    def rate(until: Callable[[], bool]) -> float:
        begun, steps = time.perf_counter(), 0
        while not until() or not steps:
            step()
            steps += 1
        return steps / (time.perf_counter() - begun)

    def ours() -> Callable[[], bool]:
        saver.start(target, Position(1, 1))
        return saver.done_everywhere

    def theirs() -> Callable[[], bool]:
        future = dcp.async_save(states_of(model, optimizer), checkpoint_id=target)
        assert isinstance(future, Future)
        return future.done

    saver.prepare()
    results: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds + 1):
        for name, start in {"boost": ours, "torch.distributed.checkpoint.async_save": theirs}.items():
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
            end = time.perf_counter() + 3.0
            alone = rate(lambda end=end: time.perf_counter() > end)  # type: ignore[misc]
            begun = time.perf_counter()
            done = start()
            stall = time.perf_counter() - begun
            beside = rate(done)
            if name == "boost":
                saver.finish()
            if number:
                values = {"stall_s": stall, "save_s": time.perf_counter() - begun, "relative_speed": beside / alone}
                for key, value in values.items():
                    results.setdefault(name, {}).setdefault(key, []).append(value)
    saver.close(60.0)
    shutil.rmtree(target, ignore_errors=True)
    return {name: {key: spread(values) for key, values in of.items()} for name, of in results.items()}


def write_corpus(file: Path, size: int) -> None:
    """JSON lines with the Python files of this environment, repeated if there are too few; at most 100,000 characters each."""
    sources = sorted(Path(torch.__file__).parents[1].rglob("*.py"))
    with file.open("w", encoding="utf-8") as out:
        while out.tell() < size:
            for path in sources:
                text = path.read_text(encoding="utf-8", errors="replace")[:100_000]
                if text and out.write(json.dumps({"text": text}) + "\n") and out.tell() >= size:
                    return


def prepared(folder: Path, rounds: int, megabytes: int) -> dict[str, Any]:
    """Text in JSON lines to token ids, with a given tokenizer."""
    corpus, small = folder / "corpus.jsonl", folder / "small.jsonl"
    write_corpus(corpus, megabytes * 10**6)
    write_corpus(small, 5 * 10**6)
    out, tokenizer_of = folder / "store", folder / "tokenizer"
    shutil.rmtree(tokenizer_of, ignore_errors=True)
    prepare(PrepareOptions(tokenizer_of, inputs=(str(small),), tokenizer="train:16384"))
    tokenizer, eos = TokenStore.open(tokenizer_of).tokenizer(), TokenStore.open(tokenizer_of).eos

    def ours() -> None:
        shutil.rmtree(out, ignore_errors=True)
        prepare(PrepareOptions(out, inputs=(str(corpus),), tokenizer=str(tokenizer_of / "tokenizer.json")))

    def loop() -> None:
        with (folder / "loop.bin").open("wb") as stream:
            for texts in batched_texts(corpus):
                for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                    np.array([*encoding.ids, eos], dtype=np.uint16).tofile(stream)

    def mapped() -> None:
        import datasets

        shutil.rmtree(folder / "cache", ignore_errors=True)
        rows = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(folder / "cache"))
        encode = tokenizer.encode_batch_fast
        rows = rows.map(
            lambda batch: {"ids": [[*e.ids, eos] for e in encode(batch["text"], add_special_tokens=False)]},
            batched=True, remove_columns=["text"],
        )  # fmt: skip
        rows.save_to_disk(folder / "mapped")

    def troved() -> None:
        readers, tokens = (importlib.import_module(f"datatrove.pipeline.{name}") for name in ("readers", "tokens"))
        reader = readers.JsonlReader(str(folder), glob_pattern=corpus.name)
        writer = tokens.DocumentTokenizer(
            str(folder / "troved"), tokenizer_name_or_path=str(tokenizer_of / "tokenizer.json"), eos_token="<|endoftext|>",
            shuffle_documents=False,
        )  # fmt: skip
        writer(reader())

    contenders: Contenders = {"boost prepare": ours, "encode_batch_fast": loop, "datasets.map": mapped}
    if importlib.util.find_spec("datatrove"):
        contenders["datatrove"] = troved
    return {"megabytes": megabytes, **interleaved(contenders, rounds)}


def batched_texts(corpus: Path) -> Iterator[list[str]]:
    texts, chars = list[str](), 0
    with corpus.open(encoding="utf-8") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            chars += len(texts[-1])
            if chars >= 1 << 20:
                yield texts
                texts, chars = [], 0
    yield texts


def loader(folder: Path, rounds: int) -> dict[str, Any]:
    """Training batches, against random windows of a memory map, as in nanoGPT."""
    store, corpus = folder / "batches", folder / "batches.jsonl"
    write_corpus(corpus, 20 * 10**6)
    shutil.rmtree(store, ignore_errors=True)
    prepare(PrepareOptions(store, inputs=(str(corpus),), tokenizer="train:4096"))
    split = TokenStore.open(store).split("train")
    ours = Batches(split, SEQ_LEN, BATCH, 0)
    tokens, draw = np.memmap(store / "train.tokens", dtype=np.uint16, mode="r"), torch.Generator().manual_seed(0)

    def loop() -> None:
        for _ in range(BATCHES):
            starts = torch.randint(len(tokens) - SEQ_LEN, (BATCH,), generator=draw).tolist()
            for shift in (0, 1):
                torch.stack(
                    [torch.from_numpy(tokens[i + shift : i + shift + SEQ_LEN].astype(np.int64)) for i in starts]
                )

    def batches() -> None:
        for step in range(BATCHES):
            for _ in ours.numbered(step, [0], BATCH):
                pass

    return {"batches": BATCHES, **interleaved({"boost": batches, "memory map": loop}, rounds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where files are written")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=200, help="text for `prepare`")
    args = parser.parse_args()
    parts: dict[str, Callable[[Path, int], dict[str, Any]]] = {
        "commands": commands,
        "checkpoints": checkpoints,
        "background": background,
        "prepare": partial(prepared, megabytes=args.megabytes),
        "loader": loader,
    }
    args.folder.mkdir(parents=True, exist_ok=True)
    results = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    for name in args.only:
        load_before = os.getloadavg()[0]
        result = parts[name](args.folder, args.rounds)
        results[name] = {"environment": environment(Config()), "rounds": args.rounds, "load": load_before, **result}
        write_numbers(RESULT, results)
        print(name, json.dumps(result, indent=1), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
