"""A rectangular slice of a tensor that torch.distributed.checkpoint can save and load.

DTensor describes equal shards along dimensions. That is not always enough: equal shards of a fused tensor are unequal shards of its
parameters. This class describes any rectangle, through the same protocol that DTensor implements for the checkpoint planner.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class TensorSlice(Tensor):
    """A tensor of `shape`; this process holds the rectangle `local` at `offsets`. Supports no computation."""

    local: Tensor
    offsets: torch.Size

    @staticmethod
    def __new__(cls, local: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> "TensorSlice":
        tensor_slice: TensorSlice = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        tensor_slice.local, tensor_slice.offsets = local, torch.Size(offsets)
        return tensor_slice

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TensorSlice({tuple(self.local.shape)} at {tuple(self.offsets)} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # the planner detaches its tensors
            return args[0]
        raise NotImplementedError(f"{func} is not supported on a TensorSlice")

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, self.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self.__create_chunk_list__()[0],
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=self.shape,
                ),
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=self.offsets, sizes=self.local.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset == self.offsets
        return self.local
