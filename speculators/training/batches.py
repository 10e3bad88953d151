"""Which samples meet in which step, how they share rows, and a thread that has the next batches ready.

The plan of an epoch follows from the samples' lengths, the seed and the epoch alone. Every rank computes the same
plan, and a resumed run takes it up at any step.
"""

from __future__ import annotations

import hashlib
import heapq
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType

import torch

from speculators.data.prepare import Sample
from speculators.errors import TrainingError
from speculators.hidden_states.online import StateSource
from speculators.models.batch import PackedBatch

EpochPlan = list[list[list[str]]]
"""``plan[step][rank]``: ids of the samples that a rank takes in a step."""

_ROW_MULTIPLE = 8
_PREFETCHED_BATCHES = 3


def plan_epoch(
    lengths: Mapping[str, int], tokens_per_step: int, ranks: int, order_seed: tuple[int, int] | None
) -> EpochPlan:
    """Distribute all samples over steps and ranks: each exactly once.

    The samples of a step do not depend on the number of ranks, so runs with the same ``tokens_per_step`` see the same
    global batches however many processes share the work. Within a step, samples go to ranks by tokens.

    Args:
        lengths: Tokens of each sample by id.
        tokens_per_step: Most tokens in one step, over all ranks.
        ranks: Number of processes.
        order_seed: Seed and epoch, which determine the order; None keeps the order of ``lengths``.

    Returns:
        ``plan[step][rank]`` with the same number of ranks in every step; a rank's list is empty where a step has
        fewer samples than ranks.

    Raises:
        TrainingError: A sample is longer than a step.
    """
    longest = max(lengths, key=lambda s: lengths[s], default=None)
    if longest is not None and lengths[longest] > tokens_per_step:
        raise TrainingError(
            f"Sample {longest!r} has {lengths[longest]} tokens, more than the {tokens_per_step} of one step. Raise"
            " train.tokens_per_batch, or lower prepare.max_length."
        )
    order = list(lengths)
    if order_seed is not None:
        order.sort(key=lambda s: _order_key(s, *order_seed))
    return [_spread(step, lengths, ranks) for step in _cut_into_steps(order, lengths, tokens_per_step)]


def _order_key(sample_id: str, seed: int, epoch: int) -> bytes:
    """A shuffle that is the same on every machine and with every version of every library."""
    return hashlib.sha256(f"{seed}/{epoch}/{sample_id}".encode()).digest()


def _cut_into_steps(order: Sequence[str], lengths: Mapping[str, int], tokens_per_step: int) -> list[list[str]]:
    steps: list[list[str]] = []
    tokens = tokens_per_step
    for sample_id in order:
        if tokens + lengths[sample_id] > tokens_per_step:
            steps.append([])
            tokens = 0
        steps[-1].append(sample_id)
        tokens += lengths[sample_id]
    if len(steps) > 1 and tokens < tokens_per_step // 2:
        # A step of a few tokens would weigh as much as a full one: the last two share their samples evenly.
        shared = [*steps.pop(-2), *steps.pop()]
        half, total, front = sum(lengths[s] for s in shared) / 2, 0, 0
        while total + lengths[shared[front]] <= half:
            total += lengths[shared[front]]
            front += 1
        steps += [part for part in (shared[:front], shared[front:]) if part]
    return steps


def _spread(step: Sequence[str], lengths: Mapping[str, int], parts: int) -> list[list[str]]:
    """Longest first, each to the part that has the fewest tokens so far."""
    shares: list[list[str]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for sample_id in sorted(step, key=lambda s: -lengths[s]):
        load, lightest = loads[0]
        shares[lightest].append(sample_id)
        heapq.heapreplace(loads, (load + lengths[sample_id], lightest))
    return shares


def pack_rows(sample_ids: Sequence[str], lengths: Mapping[str, int], hidden_size: int) -> tuple[list[list[str]], int]:
    """Pack samples into rows of one length, so that a batch costs the least.

    Few long rows have little padding but much attention, many short rows the reverse. A layer costs about
    ``24 H**2`` operations a position in its matrices and ``4 S H`` in attention over a row of S, so a batch costs
    in proportion to ``B * S * (6 H + S)``.

    Args:
        sample_ids: Samples of the batch.
        lengths: Tokens of each sample by id.
        hidden_size: H, width of the drafter.

    Returns:
        The samples of each row, and the rows' common length, a multiple of 8. Without samples: one empty row.
    """
    if not sample_ids:
        return [[]], _ROW_MULTIPLE
    best: tuple[int, list[list[str]], int] | None = None
    count = 0
    while count < len(sample_ids):
        count = min(count + 1 + count // 8, len(sample_ids))
        rows = _spread(sample_ids, lengths, count)
        longest = max(sum(lengths[s] for s in row) for row in rows)
        row_length = -(-longest // _ROW_MULTIPLE) * _ROW_MULTIPLE
        cost = count * row_length * (6 * hidden_size + row_length)
        if best is None or cost < best[0]:
            best = cost, rows, row_length
    assert best is not None
    return best[1], best[2]


def pack_batch(
    rows: Sequence[Sequence[str]],
    row_length: int,
    samples: Mapping[str, Sample],
    states: Mapping[str, torch.Tensor],
    state_shape: tuple[int, int],
    dtype: torch.dtype,
) -> PackedBatch:
    """Lay samples and their hidden states out in rows.

    Args:
        rows: Sample ids of each of the B rows.
        row_length: S, positions in a row.
        samples: Token ids and loss masks by sample id.
        states: Hidden states [n - 1, n_layers, H] by sample id, for a sample of n tokens.
        state_shape: ``(n_layers, H)``.
        dtype: What the hidden states are converted to.
    """
    shape = (len(rows), row_length)
    token_ids = torch.zeros(shape, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    document_ids = torch.full(shape, -1, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    hidden_states = torch.zeros((*shape, *state_shape), dtype=dtype)
    document = 0
    for row, sample_ids in enumerate(rows):
        start = 0
        for sample_id in sample_ids:
            sample = samples[sample_id]
            end = start + len(sample.token_ids)
            token_ids[row, start:end] = torch.tensor(sample.token_ids)
            loss_mask[row, start:end] = torch.tensor(sample.loss_mask)
            document_ids[row, start:end] = document
            positions[row, start:end] = torch.arange(end - start)
            hidden_states[row, start : end - 1] = states[sample_id]
            start, document = end, document + 1
    return PackedBatch(
        token_ids=token_ids,
        hidden_states=hidden_states,
        loss_mask=loss_mask,
        document_ids=document_ids,
        positions=positions,
    )


class BatchLoader:
    """Reads hidden states and packs batches in a thread of its own, a few batches ahead.

    Use as a context manager and iterate once. What fails in the thread is raised where the batch is asked for.

    Args:
        shares: Sample ids of this rank, step by step.
        samples: All samples by id.
        reader: Where the hidden states come from.
        dtype: Of the hidden states in the batches.
        pin_memory: Put hidden states into page-locked memory, for asynchronous copies to a GPU.

    Attributes:
        waited_s: Seconds for which the next batch was not ready when it was asked for.
    """

    def __init__(
        self,
        shares: Sequence[Sequence[str]],
        samples: Mapping[str, Sample],
        reader: StateSource,
        dtype: torch.dtype,
        pin_memory: bool = False,
    ) -> None:
        self._shares, self._samples, self._reader = shares, samples, reader
        self._dtype, self._pin_memory = dtype, pin_memory
        self._lengths = {s: len(samples[s].token_ids) for share in shares for s in share}
        self._ready: queue.Queue[PackedBatch | BaseException] = queue.Queue(_PREFETCHED_BATCHES)
        self.waited_s = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="batch-loader", daemon=True)

    def __enter__(self) -> BatchLoader:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()

    def __iter__(self) -> Iterator[PackedBatch]:
        for _ in self._shares:
            asked = time.monotonic()
            item = self._ready.get()
            self.waited_s += time.monotonic() - asked
            if isinstance(item, BaseException):
                raise item
            yield item

    def _fill(self) -> None:
        threads = self._reader.parallel_reads
        with ThreadPoolExecutor(threads, thread_name_prefix="state-reader") as pool:
            try:
                for share, reads in self._reading_ahead(pool, threads):
                    states = {name: read.result() for name, read in zip(share, reads, strict=True)}
                    if not self._offer(self._packed(share, states)):
                        break
            except BaseException as error:
                self._offer(error)
            finally:
                pool.shutdown(cancel_futures=True)

    def _reading_ahead(
        self, pool: ThreadPoolExecutor, samples_ahead: int
    ) -> Iterator[tuple[Sequence[str], list[Future[torch.Tensor]]]]:
        """Each share with the reads of its samples, begun as soon as few enough others are under way."""
        ahead: deque[tuple[Sequence[str], list[Future[torch.Tensor]]]] = deque()
        for share in self._shares:
            ahead.append((share, [pool.submit(self._reader.read, name) for name in share]))
            while sum(len(reads) for _, reads in ahead) > samples_ahead:
                yield ahead.popleft()
        yield from ahead

    def _packed(self, share: Sequence[str], states: Mapping[str, torch.Tensor]) -> PackedBatch:
        rows, row_length = pack_rows(share, self._lengths, self._reader.hidden_size)
        shape = (len(self._reader.layer_ids), self._reader.hidden_size)
        batch = pack_batch(rows, row_length, self._samples, states, shape, self._dtype)
        return replace(batch, hidden_states=batch.hidden_states.pin_memory()) if self._pin_memory else batch

    def _offer(self, item: PackedBatch | BaseException) -> bool:
        """Wait for a place in the queue; False when the loader was closed meanwhile."""
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False
