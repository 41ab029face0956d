"""The pipeline stages on one process, run by the schedules of torch.distributed.pipelining.

Stages exchange the residual stream in the layout's local shape (a shard of it under btp and btp-sp) and the latents passed
between blocks. Training follows a schedule. Evaluation and generation have no backward pass and other shapes, so each stage sends
its results directly to the next.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from boost.config.schema import ModelConfig, ParallelConfig
from boost.models.attention import KVCache
from boost.models.decoder import Decoder
from boost.models.interface import Layout
from boost.models.kernels import STATISTIC_DTYPE
from boost.parallel.mesh import Axis


class StageModule(nn.Module):
    """A stage as torch's schedules expect it: received tensors are positional arguments, and batch inputs are keyword arguments."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, *received: Tensor, tokens_BS: Tensor, targets_BS: Tensor, document_ids_BS: Tensor | None = None
    ) -> Any:
        """Returns the sum of the losses on the last stage; (residual stream, *latents) on the others."""
        result = self.decoder(tokens_BS, targets_BS, document_ids_BS, received)
        if self.decoder.stage.has_head:
            return result
        # torch's schedules detach sent tensors in place, which does not work on views.
        whole = torch.contiguous_format
        return tuple(x.contiguous() if x._base is None else x.clone(memory_format=whole) for x in result)

    def next_logits(self, tokens_BS: Tensor, caches: tuple[KVCache, ...], *received: Tensor) -> Any:
        """Same as `Decoder.next_logits`."""
        return self.decoder.next_logits(tokens_BS, caches, received)


class Pipeline(nn.Module):
    """The pipeline stages on one process, with the interface of a whole decoder."""

    def __init__(self, stage_modules: Sequence[StageModule], axis: Axis) -> None:
        """`axis`: the processes in this pipeline. `stage_modules` are in forward order."""
        super().__init__()
        self.stage_modules = nn.ModuleList(stage_modules)
        self.axis = axis
        self.decoders = [module.decoder for module in stage_modules]
        self._make: Callable[[int], Any] = lambda count: None
        self._schedules: dict[int, Any] = {}
        self._divisor = self._rows = 1
        self._sending: list[dist.Work] = []

    @property
    def model(self) -> ModelConfig:
        """Configuration of the whole model."""
        return self.decoders[0].model

    @property
    def layout(self) -> Layout:
        """The layout, the same in all stages."""
        return self.decoders[0].layout

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.decoders[0].device

    @property
    def has_head(self) -> bool:
        """Whether this process computes the loss."""
        return self.decoders[-1].stage.has_head

    def prepare(self, parallel: ParallelConfig, micro_batches: int, micro_batch: tuple[int, int]) -> None:
        """Creates the schedule for a training step with `micro_batches` micro-batches, each of shape (sequences, tokens
        per sequence).

        `backward` creates more schedules for steps with a different number of micro-batches.
        """
        self._rows = micro_batch[0]
        self._make = lambda count: self._make_schedule(parallel, count, micro_batch)
        self._schedules = {micro_batches: self._make(micro_batches)}

    def _make_schedule(self, parallel: ParallelConfig, micro_batches: int, micro_batch: tuple[int, int]) -> Any:
        # Imported here because it loads torch._dynamo, which would cost a second per process in runs without a pipeline.
        from torch.distributed import pipelining

        batch, length = micro_batch
        stages: list[Any] = []
        for module, decoder in zip(self.stage_modules, self.decoders, strict=True):
            stage = decoder.stage
            # Meta tensors declare the shapes in advance. Since torch 2.13, stages also exchange pickled shapes in the first step.
            arriving, leaving = (
                tuple(torch.empty(s, dtype=decoder.compute_dtype, device="meta").requires_grad_() for s in shapes)
                for shapes in (
                    of(decoder.layout, batch * length) for of in (decoder.received_shapes, decoder.sent_shapes)
                )
            )
            loss = torch.empty((), dtype=STATISTIC_DTYPE[decoder.compute_dtype], device="meta")
            stages.append(
                pipelining.PipelineStage(
                    module,
                    stage.index,
                    stage.count,
                    self.device,
                    input_args=() if stage.has_embedding else arriving,
                    output_args=(loss,) if stage.has_head else leaving,
                    group=self.axis.group,
                )
            )
        options: dict[str, Any] = {
            "n_microbatches": micro_batches,
            "loss_fn": lambda loss, _: loss / self._divisor,
            "scale_grads": False,
        }
        if parallel.schedule == "interleaved-1f1b":
            return pipelining.ScheduleInterleaved1F1B(stages, **options)
        # 1F1B needs at least pp micro-batches; after replicas are lost, there may be fewer.
        is_gpipe = parallel.schedule == "gpipe" or micro_batches < parallel.pp
        one = pipelining.ScheduleGPipe if is_gpipe else pipelining.Schedule1F1B
        return one(stages[0], **options)

    def backward(self, tokens_BS: Tensor, targets_BS: Tensor, document_ids_BS: Tensor | None, divisor: int) -> Tensor:
        """Runs the forward and backward passes on a step's micro-batches, concatenated along the batch dimension.

        Returns the sum of the losses divided by `divisor` (0 on processes without the head), and computes its gradients.
        """
        losses: list[Tensor] = []
        inputs = _by_keyword(tokens_BS, targets_BS, document_ids_BS)
        target = targets_BS if self.has_head else None
        self._divisor = divisor
        count = len(tokens_BS) // self._rows
        if count not in self._schedules:
            self._schedules[count] = self._make(count)
        self._schedules[count].step(
            target=target,
            losses=losses if self.has_head else None,
            return_outputs=False,
            **inputs,
        )
        total = torch.zeros((), dtype=torch.double, device=self.device)
        for loss in losses:
            total += loss.detach()
        return total

    @torch.no_grad()
    def forward(self, tokens_BS: Tensor, targets_BS: Tensor, document_ids_BS: Tensor | None = None) -> Tensor:
        """Sum of the cross-entropy without gradients, like a whole decoder's; 0 on processes without the head."""
        inputs = _by_keyword(tokens_BS, targets_BS, document_ids_BS)
        result = torch.zeros((), device=self.device)
        for module, decoder in zip(self.stage_modules, self.decoders, strict=True):
            out = module(*self._receive(decoder, decoder.layout, tokens_BS.numel()), **inputs)
            if decoder.stage.has_head:
                result = out
            else:
                self._send(out, decoder)
        return result

    @torch.no_grad()
    def next_logits(self, tokens_BS: Tensor, caches: tuple[KVCache, ...]) -> Tensor:
        """Logits [B, V] for the next tokens, like a whole decoder's, on every process in the pipeline."""
        layout = self.layout.inference
        logits = torch.empty(tokens_BS.shape[0], self.model.vocab_size, dtype=self.decoders[0].compute_dtype)
        logits = logits.to(self.device)
        rest = list(caches)
        for module, decoder in zip(self.stage_modules, self.decoders, strict=True):
            own, rest = rest[: len(decoder.blocks)], rest[len(decoder.blocks) :]
            assert isinstance(module, StageModule)
            received = self._receive(decoder, layout, tokens_BS.numel())
            out = module.next_logits(tokens_BS, tuple(own), *received)
            if decoder.stage.has_head:
                logits = out.contiguous()
            else:
                self._send(out, decoder)
        dist.broadcast(logits, group=self.axis.group, group_src=self.axis.size - 1)
        return logits

    def make_caches(self, batch: int, capacity: int) -> tuple[KVCache, ...]:
        """Key/value caches for every block on this process."""
        return tuple(cache for decoder in self.decoders for cache in decoder.make_caches(batch, capacity))

    def cache_bytes(self, batch: int, capacity: int) -> int:
        """Bytes that `make_caches` allocates."""
        return sum(decoder.cache_bytes(batch, capacity) for decoder in self.decoders)

    def _receive(self, decoder: Decoder, layout: Layout, tokens: int) -> Iterator[Tensor]:
        """Receives the tensors that the previous stage sends."""
        if decoder.stage.has_embedding:
            return
        for shape in decoder.received_shapes(layout, tokens):
            x = torch.empty(shape, dtype=decoder.compute_dtype, device=self.device)
            dist.recv(x, group=self.axis.group, group_src=(decoder.stage.index - 1) % self.axis.size)
            yield x

    def _send(self, tensors: Sequence[Tensor], decoder: Decoder) -> None:
        """Sends tensors to the next stage without waiting for it to receive them."""
        for work in self._sending:
            work.wait()
        peer = (decoder.stage.index + 1) % self.axis.size
        sent = [dist.isend(x.contiguous(), group=self.axis.group, group_dst=peer) for x in tensors]
        self._sending = [work for work in sent if work is not None]


def _by_keyword(tokens_BS: Tensor, targets_BS: Tensor, document_ids_BS: Tensor | None) -> dict[str, Tensor]:
    """Batch inputs for every stage. Schedules split tensors into micro-batches and do not accept None."""
    inputs = {"tokens_BS": tokens_BS, "targets_BS": targets_BS}
    return inputs if document_ids_BS is None else inputs | {"document_ids_BS": document_ids_BS}
