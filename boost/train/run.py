"""One process of `boost train`: joins the mesh, trains, and on the main process says how it went."""

import contextlib
import logging
import os
from pathlib import Path

from boost.config import Config
from boost.data.store import TokenStore
from boost.errors import StorageError
from boost.parallel.mesh import close_mesh, open_mesh
from boost.train.console import Console, make_console
from boost.train.generate import Sampling, generate
from boost.train.hardware import peak_flops
from boost.train.loop import Outcome, Trainer, resume_candidates
from boost.train.metrics import MetricsWriter
from boost.train.model import Model
from boost.train.rundir import RunDirectory, configure_logging

log = logging.getLogger("boost")

SAMPLE_TOKENS = 120
PROMPT_TOKENS = 24

STOPPED_ELSEWHERE = 75
"""Exit code of a process whose run was stopped and saved because another node was told to leave: EX_TEMPFAIL, try again."""


def train_process(config: Config, resume: str | None, start_from: str | None = None) -> int:
    """Trains as one process of the mesh; returns the exit code. Raises BoostError."""
    import torch

    mesh = open_mesh(config.parallel, config.run.device, config.run.timeout_s)
    run = RunDirectory(Path(config.run.dir))
    if mesh.is_main:
        run = RunDirectory.create(config, resume=run.continued_by(resume))
    mesh.barrier()
    configure_logging(run.logs, mesh.rank)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it, read at its first use
        torch.use_deterministic_algorithms(True)
    candidates = resume_candidates(resume, run)
    trainer = Trainer(config, mesh, run)
    trainer.start(candidates, start_from)
    peak = peak_flops(mesh.device, getattr(torch, config.train.compute_dtype), config.run.peak_tflops)
    start = trainer.position.step
    writer = MetricsWriter(run, config, resumed_step=start) if mesh.is_main else None
    try:
        with make_console(config.train.steps, start, config.train.log_every, mesh.rank) as console:
            _introduce(config, trainer, console)
            outcome = trainer.fit(console, writer, peak)
    finally:
        if writer:
            with contextlib.suppress(StorageError):  # told when it began
                writer.close()
    _conclude(config, trainer, run, outcome)
    mesh.barrier()  # nobody leaves while another still speaks through the group
    close_mesh()
    return _exit_code(outcome)


def _exit_code(outcome: Outcome) -> int:
    """0, but not where a signal to another node stopped the run: this node's torchrun would take the run for finished.

    It would wait five minutes for the other torchrun, which its signal has ended, and then report success, so that a
    scheduler starts that node alone again.
    """
    elsewhere = outcome.stopped_by is not None and not outcome.signalled_here
    return STOPPED_ELSEWHERE if elsewhere and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 else 0


def _introduce(config: Config, trainer: Trainer, console: Console) -> None:
    from boost.config.architecture import parameter_count

    model, parallel, mesh = config.model, config.parallel, trainer.mesh
    console.note(
        f"{model.title} {parameter_count(model) / 1e6:.2f}M parameters, layout {trainer.model.layout.spec.name}, "
        f"tp {parallel.tp} x pp {parallel.pp} x dp {parallel.dp} on {mesh.device.type}, "
        f"{trainer.batches.n_samples} sequences of {config.train.seq_len} tokens to train on"
    )
    for warning in trainer.warnings:
        console.note(f"warning: {warning}")
    if trainer.started_from:
        console.note(f"begins with the weights of {trainer.started_from}")
    if trainer.resumed_from:
        console.note(f"resumed at step {trainer.position.step} of {config.train.steps} from {trainer.resumed_from}")


def _conclude(config: Config, trainer: Trainer, run: RunDirectory, outcome: Outcome) -> None:
    """The last words of a run, on the main process. Every process takes part in the sample."""
    sample = ""
    if outcome.evaluation:
        sample = sample_text(trainer.model, trainer.store)
    if not trainer.mesh.is_main:
        return
    if outcome.evaluation:
        result, entropy = outcome.evaluation, trainer.heldout.unigram_entropy()
        print(f"\nheld-out loss       {result.loss:.4f} nats/token over {result.tokens} tokens")
        print(f"unigram entropy     {entropy:.4f} nats/token (what token frequencies alone would reach)")
        print(f"held-out perplexity {result.perplexity:.2f}")
        print(f"bits per byte       {result.bits_per_byte:.4f}")
        print(f"\nsample (held-out text up to the mark [...], then the model)\n{sample}")
    else:
        print(
            f"\nstopped by {outcome.stopped_by} at step {outcome.position.step} of {config.train.steps}, "
            "everything is saved; go on with --resume auto"
        )
    print(f"\nrun directory       {run.path}")
    if outcome.checkpoint:
        print(f"checkpoint          {outcome.checkpoint}", flush=True)


def sample_text(model: Model, store: TokenStore, sampling: Sampling | None = None) -> str:
    """A held-out prompt, a mark, and what the model makes of it. Every process of the mesh must call it.

    All tokens are made and cut behind the end of a document afterwards: replicas that share weights gather them for each
    token, and one whose own text ended earlier, by the rounding of another GPU, would leave the others waiting.
    """
    tokenizer, heldout = store.tokenizer(), store.split("heldout")
    prompt = heldout.window(0, min(PROMPT_TOKENS, heldout.n_tokens)).tolist()
    new = list(generate(model, prompt, SAMPLE_TOKENS, sampling or Sampling(temperature=0.8, top_p=0.95)))
    if store.eos in new:
        new = new[: new.index(store.eos) + 1]
    return f"{tokenizer.decode(prompt)}[...]{tokenizer.decode(new)}"
