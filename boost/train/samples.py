"""Text samples from the model during training."""

from collections.abc import Sequence

from boost.data.store import TokenStore
from boost.data.tokenizer import PlainText, continuation
from boost.train.events import EvaluationEnd, SampleEnd
from boost.train.generate import generate
from boost.train.heartbeat import Phase, in_phase
from boost.train.hooks import Hook
from boost.train.loop import Trainer
from boost.train.model import Model
from boost.train.sampling import Sampling

SAMPLING = Sampling(temperature=0.8, top_p=0.95)
"""A prompt's samples use the same random numbers at every step, so that they differ only because of the weights."""
PROMPT_TOKENS = 24
"""Length of the prompt taken from the held-out text, if no prompt is given."""


class TextSamples(Hook):
    """At each evaluation, generates `tokens` tokens for each prompt, on all processes, and calls `Hook.on_sample`."""

    def __init__(self, tokens: int, prompts: Sequence[str] = ()) -> None:
        """Without `prompts`, the prompt is the start of the held-out text."""
        self.tokens, self.prompts = tokens, tuple(prompts)
        self._encoded: list[tuple[str, list[int]]] = []
        self._sampled: int | None = None

    def setup(self, trainer: Trainer) -> None:
        # Once, because a process that could not read its prompt later would not generate with the others.
        store = trainer.store
        plain, empty = PlainText(store.tokenizer(), store.eos), [store.eos or 0]
        prompts = [(text, plain.encode(text) or empty) for text in self.prompts]
        self._encoded = prompts or [heldout_prompt(store)]

    def on_evaluation(self, trainer: Trainer, event: EvaluationEnd) -> None:
        if self._sampled == event.metrics.step:  # the final evaluation may follow a periodic one with the same weights
            return
        self._sampled = event.metrics.step
        model, store = trainer.model, trainer.store
        encoded = self._encoded
        with in_phase(Phase.EVALUATION):
            texts = trainer.mesh.together(lambda: [sample_text(model, store, ids, self.tokens) for _, ids in encoded])
        for (prompt, _), text in zip(encoded, texts, strict=True):
            trainer.notify("on_sample", SampleEnd(event.metrics.step, prompt, text))


def heldout_prompt(store: TokenStore) -> tuple[str, list[int]]:
    """The start of the held-out text, and its tokens."""
    heldout = store.split("heldout")
    ids = heldout.window(0, min(PROMPT_TOKENS, heldout.n_tokens)).tolist()
    return store.tokenizer().decode(ids), ids


def sample_text(model: Model, store: TokenStore, prompt: list[int], tokens: int) -> str:
    """Continues a prompt by up to `tokens` tokens, or to the end of the document. Collective over the mesh.

    Always generates all tokens and truncates afterwards. Replicas with sharded weights gather them for every token, so
    if one replica stopped earlier because of rounding, the others would be left waiting.
    """
    new = list(generate(model, prompt, tokens, SAMPLING))
    if store.eos in new:
        new = new[: new.index(store.eos) + 1]
    return continuation(store.tokenizer(), prompt, new)
