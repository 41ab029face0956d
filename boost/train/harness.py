"""Adapts a checkpoint to lm-evaluation-harness (arXiv 2405.14782), which provides tasks, prompts and metrics.

Every TP rank runs the whole harness on the same requests in the same order, so the harness sees a single process.
"""

import contextlib
import difflib
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from boost.data.tokenizer import PlainText
from boost.errors import ConfigError, DataError
from boost.models.decoder import Decoder
from boost.text import JsonObject
from boost.train.generate import generate
from boost.train.progress import progress
from boost.train.sampling import Sampling

MAX_NEW_TOKENS = 256
"""Maximum number of tokens in an answer if the task sets no limit; the harness's own default."""

Request = tuple[object, list[int], list[int]]
"""(the harness's key, context tokens, continuation tokens)."""


class HarnessModel(TemplateLM):
    """Adapts a boost decoder to the harness's model interface, for scoring and generation."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Any,
        bos: int | None,
        eos: int | None,
        ends: Collection[int],
        max_length: int,
        batch: int,
        shows: bool,
        prefix: int | None = None,
    ) -> None:
        """`max_length`: context length in tokens; longer contexts are truncated on the left. `batch`: requests per forward pass.
        `shows`: whether to show progress. `bos` starts every text; without it, `prefix` (or else `eos`) starts one without context.
        `ends`: tokens that end a text."""
        super().__init__()
        self._decoder, self._tokenizer, self._bos, self._eos = decoder, tokenizer, bos, eos
        self._ends, self._plain, self._prefix = ends, PlainText(tokenizer, eos), prefix if bos is None else bos
        self._max_length, self._batch, self._shows = max_length, batch, shows
        self.truncated = 0
        """Number of requests so far that were longer than `max_length`."""

    @property
    def eot_token_id(self) -> int:
        token = self._bos if self._eos is None else self._eos
        assert token is not None
        return token

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self._prefix is None else self._prefix

    @property
    def tokenizer_name(self) -> str:
        return "boost"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Tokens of `string`, with a leading bos if the model has one."""
        start = [] if self._bos is None or add_special_tokens is False else [self._bos]
        return start + self._plain.encode(string)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of `max_length`. Each token is scored once."""
        scores = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self._max_length, context_len=1)
            pairs = [make_disjoint_window(window) for window in windows]
            parts = self._loglikelihood_tokens([(None, context, continuation) for context, continuation in pairs])
            scores.append(sum(score for score, _ in parts))
        return scores

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generates answers one after another, each up to its first stop string."""
        return [self._answer(*request.args) for request in progress(requests, "answer", enabled=self._shows)]

    def _answer(self, context: str, options: JsonObject) -> str:
        chosen: JsonObject = {"top_k": 0, "top_p": 1.0, **normalize_gen_kwargs(options, MAX_NEW_TOKENS)}
        stops, sampled, limit = (chosen.pop(name) for name in ("until", "do_sample", "max_gen_toks"))
        temperature, limit = chosen.pop("temperature", 1.0) if sampled else 0.0, min(limit, self._max_length - 1)
        sampling = Sampling(temperature, chosen.pop("top_k"), chosen.pop("top_p"))
        for name, value in chosen.items():
            if name != "temperature" and value not in (None, False, 1):
                raise ConfigError(f"{name} = {value!r} in generation_kwargs is not supported; remove it from the task")
        prompt, most = self.tok_encode(context) or [self.prefix_token_id], self._max_length - limit
        self.truncated, prompt = self.truncated + (len(prompt) > most), prompt[-most:]
        tokens: list[int] = []
        text = ""
        for token in generate(self._decoder, prompt, limit, sampling, self._ends):
            tokens.append(token)
            text = self._tokenizer.decode(tokens)
            if ends := [text.index(stop) for stop in stops if stop and stop in text]:
                return text[: min(ends)]
        return text

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **options: Any
    ) -> list[tuple[float, bool]]:
        """For each request: (log-likelihood of the continuation, whether greedy decoding would produce it)."""
        # Longest first, so that an out-of-memory error occurs at the start.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        batches = [order[start : start + self._batch] for start in range(0, len(order), self._batch)]
        results: dict[int, tuple[float, bool]] = {}
        for batch in progress(batches, "score", enabled=self._shows and not disable_tqdm and len(batches) > 1):
            results.update(zip(batch, self._score([requests[i][1:] for i in batch]), strict=True))
        return [results[i] for i in range(len(requests))]

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Like `_loglikelihood_tokens`, for one batch. Pads sequences on the right, which causal attention ignores."""
        rows = [(context or [self.prefix_token_id]) + continuation for context, continuation in pairs]
        self.truncated += sum(len(row) > self._max_length + 1 for row in rows)
        rows = [row[-(self._max_length + 1) :] for row in rows]
        targets = [
            row[-min(len(continuation), len(row) - 1) :] for row, (_, continuation) in zip(rows, pairs, strict=True)
        ]
        length = max(len(row) - 1 for row in rows)
        tokens_BS = torch.tensor([row[:-1] + [0] * (length + 1 - len(row)) for row in rows])
        wanted = [
            torch.arange(len(row) - 1 - len(target), len(row) - 1) + number * length
            for number, (row, target) in enumerate(zip(rows, targets, strict=True))
        ]
        device = self._decoder.device
        logits_NV = self._decoder.logits_of(tokens_BS.to(device), torch.cat(wanted).to(device))
        log_NV = logits_NV.float().log_softmax(-1)
        target_N = torch.tensor([token for target in targets for token in target], device=device)
        score_N = log_NV.gather(-1, target_N[:, None]).squeeze(-1).cpu()
        greedy_N = (log_NV.argmax(-1) == target_N).cpu()
        lengths = [len(target) for target in targets]
        parts = zip(score_N.split(lengths), greedy_N.split(lengths), strict=True)
        return [(float(score.double().sum()), bool(greedy.all())) for score, greedy in parts]


def run_tasks(
    model: HarnessModel, names: Sequence[str], folder: Path | None = None, log_samples: bool = False, **options: Any
) -> JsonObject:
    """Runs tasks from the harness or from `folder`. Returns the harness's result: `results` by task (see `rows_of`) and, with
    `log_samples`, the `samples` of each task. `options`: those of the harness's `simple_evaluate`, such as num_fewshot and limit.

    On a process whose LOCAL_RANK is not 0, the harness returns nothing, so the result is empty. Raises ConfigError for an unknown
    task, and DataError if data cannot be loaded.
    """
    options |= {"tasks": list(names), "task_manager": _find(names, folder), "log_samples": log_samples}
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result
            result = simple_evaluate(model, **options)
    except (ConnectionError, FileNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"--tasks {','.join(names)}: the tasks' data cannot be loaded: {reason}; check the network or the path"
        ) from None
    return dict(result or {})


def _find(names: Sequence[str], folder: Path | None) -> TaskManager:
    """The harness's task index. Its built-in tasks take seconds to read, so they are included only if `folder` lacks some names.

    Raises ConfigError if a name is in neither.
    """
    if folder is not None:
        manager = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=folder)
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "'lm_eval ls tasks' lists all tasks"
            raise ConfigError(f"--tasks: unknown task '{name}'; {hint}")
    return manager


def rows_of(result: JsonObject) -> list[JsonObject]:
    """One row per task and metric in the harness's result, whose tasks have the keys 'metric,filter' and 'metric_stderr,filter'."""
    rows = []
    for task, values in result.get("results", {}).items():
        for key, value in values.items():
            metric, _, name = key.partition(",")
            if not name or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{name}")
            stderr = float(stderr) if isinstance(stderr, int | float) else None
            label = metric if name == "none" else f"{metric} ({name})"
            rows.append({"task": task, "metric": label, "value": float(value), "stderr": stderr})
    return rows
