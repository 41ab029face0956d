"""The context axis (parallel.cp): which tokens of each sequence a process holds, and how queries meet keys and values.

A sequence of S tokens is 2 cp chunks; process i holds the i-th from the front and the i-th from the back. Under a causal mask the
two together have as much to attend to on every process, and the first chunks of all processes are the first half of the sequence.
What crosses is the smaller of:

- heads: an all-to-all of q, k and v gives each process all tokens of some of its heads, and one of what attention returns gives
  them back; nothing grows with the sequence but the tokens held here. Heads must divide; key/value heads fewer than processes
  are sent once for each process that needs one.
- keys: k and v are gathered, and queries stay.

Legend: n tokens of a micro-batch held here; H query and K key/value heads of one TP process, E width of a head.
"""

from collections.abc import Iterator

from boost.config.layouts import num_shards
from boost.config.layouts.spec import EXCHANGE, GATHER, PlannedComm
from boost.config.schema import ModelConfig, ParallelConfig

PLACE = "attention"
"""What the collectives of the context axis serve."""


def chunks_of(rank: int, cp: int) -> tuple[int, int]:
    """The chunks, of 2 cp, of each sequence that this process holds."""
    return rank, 2 * cp - 1 - rank


def local_heads(model: ModelConfig, parallel: ParallelConfig) -> tuple[int, int]:
    """(H, K): query heads and key/value heads of one TP process."""
    parts = num_shards(parallel)
    return model.heads // parts, max(model.kv_heads // parts, 1)


def crosses_as_heads(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Whether heads cross the context axis, and not keys and values: where they can and it is not more bytes."""
    cp, (heads, kv_heads) = parallel.cp, local_heads(model, parallel)
    shared = max(kv_heads, cp)
    possible = heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)
    return possible and 2 * heads + 2 * shared <= cp * 2 * kv_heads


def context_comms(model: ModelConfig, parallel: ParallelConfig) -> Iterator[PlannedComm]:
    """The collectives of one block over the context axis, in forward order. Widths are elements a token held here that a process
    sends to all others together (heads), or that are gathered."""
    if parallel.cp == 1:
        return
    heads, kv_heads = local_heads(model, parallel)
    if not crosses_as_heads(model, parallel):
        yield PlannedComm(GATHER, 2 * kv_heads * model.head_dim, place=PLACE, axis="cp")
        return
    sent = heads + 2 * max(kv_heads, parallel.cp)
    for width in (sent, heads):
        yield PlannedComm(EXCHANGE, width * model.head_dim, place=PLACE, axis="cp")


def context_notes(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """What crosses, and why, in a sentence."""
    if parallel.cp == 1:
        return
    heads, kv_heads = local_heads(model, parallel)
    held = f"each process has 2 chunks of S / {2 * parallel.cp} tokens of every sequence"
    if crosses_as_heads(model, parallel):
        yield f"CP {parallel.cp}: {held}; for attention, heads are exchanged, {heads // parallel.cp} a process"
    else:
        what = "1 key/value head is" if kv_heads == 1 else f"{kv_heads} key/value heads are"
        yield f"CP {parallel.cp}: {held}; for attention, {what} gathered"
