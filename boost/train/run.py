"""One process of `boost train`: joins the mesh, trains, and prints the result on the main process."""

import os
from pathlib import Path

from boost.config import Config
from boost.data.store import TokenStore
from boost.parallel.mesh import close_mesh, open_mesh
from boost.train.checkpoint import checkpoint_path
from boost.train.console import ConsoleHook
from boost.train.generate import Sampling, generate
from boost.train.loop import Trainer, TrainResult
from boost.train.metrics import MetricsHook
from boost.train.model import Model
from boost.train.resume import resume_candidates
from boost.train.rundir import RunDirectory, configure_logging

SAMPLE_TOKENS = 120
PROMPT_TOKENS = 24

STOPPED_ELSEWHERE = 75
"""Exit code where a signal to another node stopped and saved the run: EX_TEMPFAIL, try again."""


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
    trainer = Trainer(config, mesh, run, hooks=[ConsoleHook(), MetricsHook()])
    trainer.start(candidates, start_from)
    result = trainer.fit()
    _print_result(config, trainer, result)
    mesh.barrier()  # no process leaves while another still communicates
    close_mesh()
    return _exit_code(result)


def _exit_code(result: TrainResult) -> int:
    """0, except where a signal to another node stopped the run: torchrun here would take the run for finished.

    It would wait five minutes for the other torchrun, which its signal has ended, and then report success, so that a
    scheduler restarts that node alone.
    """
    elsewhere = result.by_signal and not result.received_signal
    return STOPPED_ELSEWHERE if elsewhere and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 else 0


def _print_result(config: Config, trainer: Trainer, result: TrainResult) -> None:
    """Prints how the run ended, on the main process. All processes take part in the sample."""
    sample = ""
    if result.evaluation:
        sample = sample_text(trainer.model, trainer.store)
    if not trainer.mesh.is_main:
        return
    if result.evaluation:
        evaluation, entropy = result.evaluation, trainer.heldout.unigram_entropy()
        print(f"\nheld-out loss       {evaluation.loss:.4f} nats/token over {evaluation.tokens} tokens")
        print(f"unigram entropy     {entropy:.4f} nats/token (what token frequencies alone would reach)")
        print(f"held-out perplexity {evaluation.perplexity:.2f}")
        print(f"bits per byte       {evaluation.bits_per_byte:.4f}")
        print(f"\nsample (held-out text up to the mark [...], then the model)\n{sample}")
    else:
        step = result.position.step
        saved = result.checkpoint == checkpoint_path(trainer.run.checkpoints, step)
        state = "everything is saved" if saved else "a hook refused the checkpoint of this step"
        print(
            f"\nstopped by {result.stopped_by} at step {step} of {config.train.steps}, {state}; resume with --resume auto"
        )
    print(f"\nrun directory       {trainer.run.path}")
    if result.checkpoint:
        print(f"checkpoint          {result.checkpoint}", flush=True)


def sample_text(model: Model, store: TokenStore, sampling: Sampling | None = None) -> str:
    """A held-out prompt, a mark, and the model's continuation. Collective over the mesh.

    Generates all tokens and truncates after the end of a document: replicas that share weights gather them for each
    token, and one whose text ended earlier, by the rounding of another GPU, would leave the others waiting.
    """
    tokenizer, heldout = store.tokenizer(), store.split("heldout")
    prompt = heldout.window(0, min(PROMPT_TOKENS, heldout.n_tokens)).tolist()
    new = list(generate(model, prompt, SAMPLE_TOKENS, sampling or Sampling(temperature=0.8, top_p=0.95)))
    if store.eos in new:
        new = new[: new.index(store.eos) + 1]
    return f"{tokenizer.decode(prompt)}[...]{tokenizer.decode(new)}"
