"""One process of `boost train`: joins the mesh, trains, and prints the result on the main process."""

import contextlib
import faulthandler
import logging
import os
import pkgutil
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from boost.config import Config
from boost.config.architecture import parameter_count
from boost.config.schema import BF16_WEIGHTS_COST, TOKENS_PER_PARAMETER
from boost.data.fit import open_corpus
from boost.data.verify import Progress
from boost.errors import TRY_AGAIN, BoostError, HangError, StoppedError, TrainingError, system_limit
from boost.format import format_count
from boost.machine import launcher_number
from boost.text import print_error, printable, printable_text
from boost.train import failures
from boost.train.agreement import run_on_main
from boost.train.best_effort import outliving_terminal
from boost.train.builtin_hooks import builtin_hooks
from boost.train.checkpoint import checkpoint_path, fallback_folder, open_checkpoint
from boost.train.console import ConsoleHook
from boost.train.events import TrainResult
from boost.train.faults import Fault, FaultInjection
from boost.train.hardware import allows_tf32
from boost.train.heartbeat import Heartbeat, process_name
from boost.train.hooks import Hook
from boost.train.loop import Trainer
from boost.train.metrics import MetricsHook, tracker_modules
from boost.train.overdue import leave
from boost.train.rendezvous import Stopped, close_mesh, launch_dir, open_mesh
from boost.train.resume import require_nothing_lost, require_start, resume_candidates
from boost.train.run_lock import RunLock, require_unlocked
from boost.train.rundir import RunDirectory, configure_logging, without_links
from boost.train.samples import heldout_prompt, sample_text
from boost.train.signals import StopRequest, until_stopped
from boost.train.teacher import check_teacher
from boost.train.worker import stop_without

log = logging.getLogger("boost")

SAMPLE_TOKENS = 120
"""Length of the text sample at the end of a run, in tokens."""

SESSIONS = {"restart": "boost.train.run:Session", "in-step": "boost.elastic.session:ElasticSession"}
"""Session class for each value of run.recovery."""


class Session:
    """How one process joins, trains in, and leaves a run that ends when any process fails."""

    def __init__(self, config: Config, stopped: Stopped) -> None:
        """Joins the mesh. Raises the same errors as `open_mesh`."""
        self.config = config
        self._found_group = dist.is_initialized()
        self.mesh = open_mesh(config.parallel, config.run.device, config.run.startup_timeout_s, stopped)
        self.rank = self.mesh.rank
        """This process's number in log file names."""

    _found_group = False
    """Whether a script had created a process group, which outlives the run."""
    rejoins = False
    """Whether this process joins a run that is already training."""

    @property
    def is_over(self) -> bool:
        """Whether the run has ended while this process waited to join it."""
        return False

    def heartbeat(self, on_hang: Callable[[str], None]) -> Heartbeat:
        return Heartbeat(self.mesh, self.config.run, on_hang)

    def faults(self, faults: Sequence[Fault]) -> Hook:
        return FaultInjection(list(faults))

    def trainer(self, run: RunDirectory, hooks: Sequence[Hook]) -> Trainer:
        return Trainer(self.config, self.mesh, run, [*hooks, *builtin_hooks(self.config)])

    def start(self, trainer: Trainer, candidates: list[Path], start_from: str | None) -> None:
        """Loads the initial state (`Trainer.start`)."""
        trainer.start(candidates, start_from)

    def failed(self, error: Exception) -> None:
        """Called when the run fails with `error` on this process."""

    def close(self) -> None:
        if not self._found_group:
            close_mesh()


def check_before_start(
    config: Config,
    resume: str | None,
    start_from: str | None,
    *,
    restart: bool = False,
    rejoins: bool = False,
    progress: Progress = iter,
) -> None:
    """Checks everything that can be checked before the first step, so that mistakes surface before processes start.

    `resume`, `start_from`, `restart`: as in `boost train`. `rejoins`: this process may join a run that is already training, so its
    run directory may be in use. `progress` wraps the token store's verification, which a stop signal ends with a StoppedError if a
    StopRequest is open. Raises ConfigError, DataError or CheckpointError.
    """
    run = RunDirectory(config.run.dir)
    # Under torchrun, only the main process looks, because a file system may show another one an older state.
    if not rejoins and os.environ.get("RANK", "0") == "0":
        require_unlocked(run.path)
        if not run.continued_by(resume):
            run.require_empty()
        candidates = resume_candidates(resume, run, fallback_folder(config))
        if resume == "auto":
            require_nothing_lost(run, candidates, restart)
    tracker_modules(config)
    store = open_corpus(config, progress, until_stopped).stores[0]  # all stores have the same tokenizer
    if start_from is not None:
        require_start(open_checkpoint(Path(start_from)), config, store)
    check_teacher(config, store)


def train_process(*arguments: Any) -> int:
    """Like `train`, but returns only the exit code, as a process's entry point does."""
    return train(*arguments)[1]


@contextlib.contextmanager
def _apart_from_the_script() -> Iterator[None]:
    """Context manager in which a run computes as in a process of its own: it neither follows nor changes a script's default dtype,
    default device, autocast, no_grad, inference mode and random numbers."""
    dtype, deterministic = torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        stack.enter_context(torch.random.fork_rng(devices=gpus))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.autocast("cuda", enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            if torch.get_deterministic_debug_mode() != deterministic:  # inductor's flag, too
                torch.use_deterministic_algorithms(deterministic > 0, warn_only=deterministic == 1)


@_apart_from_the_script()
def train(
    config: Config,
    resume: str | None,
    start_from: str | None = None,
    faults: Sequence[Fault] = (),
    restart: bool = False,
    hooks: Sequence[Hook] = (),
) -> tuple[TrainResult | None, int]:
    """Trains as one process in the mesh, with `hooks` before the built-in ones. Returns the result and the exit code. The result is
    None if a signal stopped the run before this process trained. Raises BoostError.

    `restart`: with --resume auto, starts at step 0 if an earlier run's checkpoints are missing.
    """
    config = without_links(config)
    # Set the size of c10d's flight recorder before the mesh is opened. It is small, because heartbeats read it every second.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")
    if config.train.deterministic:  # these variables are read at first use, so set them before the mesh is opened
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
        os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")  # NVSwitch adds in no fixed order
    if not launch_dir():
        with contextlib.suppress(AttributeError, OSError, RuntimeError):  # stderr may be closed, or not be a file
            faulthandler.register(signal.SIGQUIT, all_threads=True)
        if "TORCHELASTIC_RUN_ID" in os.environ and config.run.recovery == "restart":
            stop_without(os.getppid())  # a signal that torchrun does not handle would end it, but not its processes
    with outliving_terminal(), StopRequest() as request:
        try:
            session: Session = pkgutil.resolve_name(SESSIONS[config.run.recovery])(config, lambda: request.name)
        except StoppedError as stop:
            print(f"stopped by {stop} during startup, before the first step; nothing was lost")
            return None, 0 if request.requested else _stopped_elsewhere()

        def exit_hung(message: str) -> None:
            """Ends the process from the heartbeat thread while the main thread is stuck in a collective."""
            error = HangError(message)
            log.error("%s", message)
            folder = launch_dir()
            if folder is None or not failures.failure_report(error, int(os.environ["RANK"])).write(folder):
                print_error(f"{message}; resume with --resume auto")
            leave(error.exit_code)

        lock = RunLock(config.run.dir) if session.mesh.is_main else None
        with lock or contextlib.nullcontext(), session.heartbeat(exit_hung) as heartbeat:
            try:
                given = [*hooks, session.faults(faults)] if faults else hooks
                result = _train(session, lock, resume, start_from, given, restart)
            except StoppedError as stop:
                print(f"stopped by {stop} before this replica had rejoined; nothing was lost")
                return None, 0 if request.requested or session.is_over else _stopped_elsewhere()
            except Exception as error:
                session.failed(error)
                if explained := _explained(error, config, heartbeat):
                    raise explained from error
                raise
        session.close()
    return result, _exit_code(result)


def _train(
    session: Session,
    lock: RunLock | None,
    resume: str | None,
    start_from: str | None,
    hooks: Sequence[Hook],
    restart: bool,
) -> TrainResult:
    config, mesh = session.config, session.mesh
    run = RunDirectory(Path(config.run.dir))
    run.lock = lock

    def prepare() -> tuple[list[Path], str]:
        candidates = resume_candidates(resume, run, fallback_folder(config))
        if resume == "auto":
            require_nothing_lost(run, candidates, restart)
        RunDirectory.create(config, resume=run.continued_by(resume))
        return candidates, lock.token if lock else ""

    # Only the main process looks for checkpoints: they must all resume from one, and one of them may not see the newest yet.
    candidates, run.token = ([], "") if session.rejoins else run_on_main(mesh, prepare, BoostError)
    configure_logging(run.logs, session.rank)
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    trainer = session.trainer(run, [ConsoleHook(), MetricsHook(), *hooks])
    session.start(trainer, candidates, start_from)
    if mesh.is_main:
        advise(trainer)
    result = trainer.fit()
    _print_result(config, trainer, result)
    mesh.together(mesh.barrier)  # no process may exit while another still communicates
    return result


TASK_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Environment variables in which mpirun and srun pass the number of processes that they started."""
MANY_EPOCHS = 4.0
"""Repeating data up to 4 times is about as good as new data (arXiv 2305.16264)."""
FEW_HELDOUT_TOKENS = 20_000
"""With fewer tokens, the standard error of the held-out perplexity exceeds about 2% (losses vary by 2 to 3 nats per token)."""


def advise(trainer: Trainer) -> None:
    """Adds advice to the warnings that the console prints before the first step. Used only on the main process."""
    is_new = not (trainer.started_from or trainer.resumed_from)  # existing weights determine the model
    for text in (*(model_advice(trainer) if is_new else ()), *start_advice(trainer)):
        log.warning(text)
        trainer.warnings.append(text)


def model_advice(trainer: Trainer) -> Iterator[str]:
    """Advice on a new model: its own, and whether it suits the tokens that it will read."""
    model, train, store = trainer.config.model, trainer.config.train, trainer.store
    yield from model.advice()
    if store.vocab_size < model.vocab_size / 2:
        yield (
            f"model.vocab_size = {model.vocab_size:,}, but tokens of {store.path} have only {store.vocab_size:,} values; the "
            f"other rows of the embedding and the head are never used; set model.vocab_size = {store.vocab_size}"
        )
    tokens, parameters = train.steps * train.global_batch * train.seq_len, parameter_count(model)
    if tokens < parameters:
        yield (
            f"{train.steps:,} steps read {format_count(tokens)} tokens, {tokens / parameters:.2g} per parameter: a test or a "
            f"demonstration; a model that is used needs about {TOKENS_PER_PARAMETER} per parameter"
        )


def start_advice(trainer: Trainer) -> Iterator[str]:
    """Advice before the first step, based on the configuration, the token stores and this machine."""
    train, corpus = trainer.config.train, trainer.corpus
    is_whole = launch_dir() or "RANK" not in os.environ
    for name in TASK_COUNTS if is_whole else ():
        if (count := os.environ.get(name, "")).isdecimal() and int(count) > 1:
            yield (
                f"{name} = {count}: without RANK and WORLD_SIZE, each of the {count} tasks is a whole run of its own; for one run "
                "over all of them, start 'boost launch' in each (examples/slurm.sh)"
            )
    for store, weight, samples in zip(corpus.stores, corpus.weights, trainer.batches.samples_of, strict=True):
        epochs = float(weight) * train.steps * train.global_batch / samples
        if epochs > MANY_EPOCHS:
            yield (
                f"the run reads the {format_count(samples * train.seq_len)} training tokens of {store.path} {epochs:.0f} times; "
                f"beyond {MANY_EPOCHS:.0f} epochs, more text helps more than additional steps"
            )
    for store in corpus.stores:
        heldout = store.split("heldout").n_tokens
        if heldout < FEW_HELDOUT_TOKENS:
            yield (
                f"the held-out split of {store.path} has {format_count(heldout)} tokens, fewer than "
                f"{format_count(FEW_HELDOUT_TOKENS)}, so its loss is noisy; prepare the store with a larger --heldout"
            )
    if trainer.mesh.device.type == "cuda" and train.compute_dtype == "float32" and allows_tf32():
        yield (
            "this run computes in TF32, because train.compute_dtype = 'float32' and this process allows TF32; to forbid it, unset "
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, or call torch.set_float32_matmul_precision('highest')"
        )
    elif trainer.mesh.device.type == "cuda" and train.compute_dtype == "float32":
        yield (
            "this run computes in float32 without TF32, several times slower than in bfloat16; to compute in bfloat16, add "
            "compute_dtype = 'bfloat16' to [train]"
        )
    if train.param_dtype == "bfloat16":
        yield (
            "train.param_dtype = 'bfloat16' rounds weights and moments after every step, which loses small updates (a small model: "
            f"{BF16_WEIGHTS_COST}); if memory allows, use param_dtype = 'float32' with compute_dtype = 'bfloat16'"
        )
    if not train.save_every and not train.save_minutes:
        yield (
            "train.save_every and train.save_minutes are 0, so no checkpoint is saved before the end; a crash loses all progress"
        )


def _explained(error: Exception, config: Config, heartbeat: Heartbeat) -> TrainingError | None:
    """A one-line error if memory or threads ran out or a process was lost (named by heartbeats if possible); otherwise None."""
    who = process_name(heartbeat.rank, heartbeat.size)
    where = f"{who}: " if heartbeat.size > 1 else ""
    if what := failures.out_of_memory(error):
        return TrainingError(
            f"{where}{what}; lower train.micro_batch (now {config.train.micro_batch}), recompute more with train.recompute (now "
            f"{config.train.recompute!r}), or use 'boost plan' to find a mesh that fits"
        )
    if what := system_limit(error):
        return TrainingError(f"{where}{what}")
    if not failures.is_lost_connection(error) and not failures.is_lost_connection(error.__cause__):
        return None
    if message := heartbeat.diagnose(waited=failures.is_timeout(error) or failures.is_timeout(error.__cause__)):
        return HangError(message)
    if launch_dir():
        return None  # the launcher may know more
    reason = failures.first_sentence(error)
    return TrainingError(f"{who} lost its connection to another process: {reason}; resume with --resume auto")


def _exit_code(result: TrainResult) -> int:
    """Returns 0, unless a signal to another node stopped the run.

    With exit code 0, the local torchrun would consider the run finished. It would wait five minutes for the other torchrun, which
    the signal has ended, and then report success. A scheduler would then restart only the other node.
    """
    return _stopped_elsewhere() if result.by_signal and not result.received_signal else 0


def _stopped_elsewhere() -> int:
    return TRY_AGAIN if launcher_number("GROUP_WORLD_SIZE", "1") > 1 else 0


def _print_result(config: Config, trainer: Trainer, result: TrainResult) -> None:
    """Prints the result on the main process. Collective, because all processes take part in generating the sample."""
    sample = ""
    if result.evaluation:
        prompt, ids = heldout_prompt(trainer.store)
        sample = f"{prompt}[...]{sample_text(trainer.model, trainer.store, ids, SAMPLE_TOKENS)}"
    if not trainer.mesh.is_main:
        return
    if result.evaluation:
        evaluation, entropy = result.evaluation, trainer.heldout.unigram_entropy()
        print(f"\nheld-out loss       {evaluation.loss:.4f} nats/token over {evaluation.tokens} tokens")
        for name, source in evaluation.sources.items():
            loss = f"{source.loss:.4f} nats/token over {source.tokens} tokens"
            print(f"  {printable(name):18}{loss}, {source.bits_per_byte:.4f} bits per byte")
        print(f"unigram entropy     {entropy:.4f} nats/token (loss of a model that knows only token frequencies)")
        print(f"held-out perplexity {evaluation.perplexity:.2f}")
        print(f"bits per byte       {evaluation.bits_per_byte:.4f}")
        print(f"\nsample (held-out text up to [...], then the model's continuation)\n{printable_text(sample)}")
    else:
        step = result.position.step
        saved = result.checkpoint in [checkpoint_path(folder, step) for folder in trainer.saves.folders]
        state = "checkpoint saved" if saved else "a hook refused this step's checkpoint"
        print(
            f"\nstopped by {result.stopped_by} at step {step} of {config.train.steps}, {state}; resume with --resume auto"
        )
    print(f"\nrun directory       {printable(str(trainer.run.path))}")
    if result.checkpoint:
        print(f"checkpoint          {printable(str(result.checkpoint))}", flush=True)
    if result.evaluation and result.checkpoint:
        in_fallback = not result.checkpoint.is_relative_to(trainer.run.path)
        path = shlex.quote(str(result.checkpoint if in_fallback else trainer.run.path))
        out = shlex.quote(f"exported/{trainer.run.path.resolve().name}")
        commands = f"boost eval {path}; boost generate {path}; boost export {path} --out {out}"
        print(f"next                {printable(commands)}", flush=True)
