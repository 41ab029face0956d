"""How fast this machine trains a configuration and tokenizes text: measured in seconds, for the budget of a run."""

import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from boost.config import Config
from boost.config.architecture import flops_per_token, parameter_count
from boost.config.schema import ParallelConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GEMM_SHARE = 0.4
"""Share of the speed of a large GEMM that training reaches, where only that is measured."""
SECONDS = 2.0
"""Target duration of a measured step."""
LONGEST_S = 30.0
"""A step of one sequence that would take longer is not measured."""
STATE_BYTES = 16
"""Bytes per parameter while training: weight, gradient and two moments in fp32."""
SAMPLE_CHARS = 200_000


@dataclass(frozen=True)
class Pace:
    """Training speed of this machine."""

    tokens_per_second: float
    measured: bool
    """True: a step of this model was timed. False: estimated from the speed of a GEMM."""
    device: str


def training_pace(config: Config) -> Pace:
    """Times one step of `config` on one device of this machine, on few sequences, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_training_pace, config.model_dump(exclude_none=True)).result()


def _training_pace(tree: dict[str, object]) -> Pace:
    import torch

    from boost.config.load import validated
    from boost.measure.steps import Stepper
    from boost.parallel.mesh import Mesh, choose_device
    from boost.train.hardware import peak_flops, total_memory

    config = validated(tree)
    train, device = config.train, choose_device(config.run.device)
    needed = flops_per_token(config.model, train.seq_len)
    estimate = GEMM_SHARE * peak_flops(device, getattr(torch, train.compute_dtype), config.run.peak_tflops) / needed
    if not math.isfinite(estimate):  # a GPU that is not in the table
        estimate = 1e4
    fits = parameter_count(config.model) * STATE_BYTES < total_memory(device) / 2
    if not fits or train.seq_len / estimate > LONGEST_S:
        return Pace(estimate, False, device.type)
    sequences = min(max(int(SECONDS * estimate / train.seq_len), 1), train.micro_batch)
    small = train.model_copy(update={"global_batch": sequences, "micro_batch": sequences})
    alone = ParallelConfig.model_validate({"layout": "single"})
    stepper = Stepper(config.model_copy(update={"train": small, "parallel": alone}), Mesh(torch.device(device.type)))
    stepper.seconds()
    return Pace(sequences * train.seq_len / min(stepper.seconds() for _ in range(2)), True, device.type)


def encoding_pace(tokenizer: "Tokenizer") -> float:
    """Tokens per second of `tokenizer` on English text, on all cores."""
    from pydoc_data.topics import topics  # the language reference, part of every Python

    text = "\n".join(topics.values())[:SAMPLE_CHARS]
    pieces = [text[start : start + 2000] for start in range(0, len(text), 2000)]
    tokenizer.encode_batch_fast(pieces[:2], add_special_tokens=False)
    begun = time.perf_counter()
    tokens = sum(len(each.ids) for each in tokenizer.encode_batch_fast(pieces, add_special_tokens=False))
    return tokens / (time.perf_counter() - begun)
