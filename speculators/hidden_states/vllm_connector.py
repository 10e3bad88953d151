"""The KV connector that vLLM loads to write hidden states straight to the store.

vLLM's method ``extract_hidden_states`` (vllm/v1/spec_decode/extract_hidden_states.py) puts the chosen layers' outputs
of every token into a cache of their own, laid out like a KV cache. When a request has finished, the scheduler's half of
this connector notes which blocks hold them; the worker's half copies them out and hands them to a :class:`ShardWriter`.
While the writer has no room, finished requests keep their blocks: vLLM runs out of blocks, starts no new requests, and
goes on when the store has caught up.

Runs in vLLM's processes: imports only what both environments have.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec
from vllm.v1.request import RequestStatus

from speculators.hidden_states.format import EncodedStates, StateFormat, cached_layers, token_checksum
from speculators.hidden_states.writer import ShardWriter
from speculators.store import Store

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
_SAY_AGAIN_S = 60.0
_COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass(frozen=True)
class FinishedSample:
    """A request whose hidden states are to be saved, and the cache blocks that hold them.

    Attributes:
        rows: Positions to save, from the first.
        last_from: First of them whose last layer is saved.
        token_crc32: Of the tokens at these positions.
    """

    request_id: str
    sample_id: str
    rows: int
    last_from: int
    token_crc32: int
    block_ids: list[int]


@dataclass
class FinishedSamples(KVConnectorMetadata):
    """What the scheduler tells the workers with each step."""

    samples: list[FinishedSample] = field(default_factory=list)


class StoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves the hidden states of every request whose ``kv_transfer_params`` ask for it.

    They are ``{"sample_id": ..., "last_from": ..., "max_rows": ...}``. The states of the prompt and of what was
    generated are saved, but for the last token, which vLLM never reads; ``max_rows`` of them at most. ``last_from`` is
    the first row whose last layer is saved; without it, the row that predicts the first generated token.

    Its ``kv_connector_extra_config``: ``store_url``, ``directory``, ``states`` (a :class:`StateFormat`),
    ``shard_bytes``, ``idle_flush_s``, ``one_file_each``. The store's credentials come from the environment.

    Raises:
        ValueError: The hidden states have no cache group of their own.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else []
        found = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
        if len(found) > 1 or (not found and len(groups) > 1):
            raise ValueError(f"{len(found)} of {len(groups)} cache groups hold hidden states; exactly one must.")
        self._group = found[0] if found else 0
        self._block_size = groups[self._group].kv_cache_spec.block_size if groups else None
        # The scheduler's half.
        self._finished: list[FinishedSample] = []
        self._holding: set[str] = set()
        # The worker's half.
        self._format = StateFormat.from_json(self._kv_transfer_config.get_from_extra_config("states", None))
        self._layers: list[int] | None = None
        self._cache: torch.Tensor | None = None
        self._writer: ShardWriter | None = None
        self._waiting: deque[FinishedSample] = deque()
        self._said_slow = float("-inf")
        self._copy_stream: torch.cuda.Stream | None = None
        self._copying: deque[tuple[FinishedSample, EncodedStates, torch.cuda.Event]] = deque()

    # --- scheduler ---------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False  # nothing is ever loaded

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        pass

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a complete request until a worker has copied them; aborted requests are forgotten."""
        asked = request.kv_transfer_params or {}
        if "sample_id" not in asked or request.status not in _COMPLETE or not request.prompt_token_ids:
            return False, None
        tokens = list(request.all_token_ids)[:-1][: asked.get("max_rows")]
        last_from = min(asked.get("last_from", len(request.prompt_token_ids) - 1), len(tokens))
        self._finished.append(
            FinishedSample(
                request.request_id,
                str(asked["sample_id"]),
                len(tokens),
                last_from,
                token_checksum(tokens),
                list(block_ids),
            )
        )
        self._holding.add(request.request_id)
        return True, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._group >= len(block_ids):
            return False, None  # aborted before it was ever scheduled
        return self.request_finished(request, block_ids[self._group])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = FinishedSamples(self._finished)
        self._finished = []
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._holding -= connector_output.finished_sending or set()

    def has_pending_block_frees(self) -> bool:
        """Whether blocks will come free by themselves, so that no running request has to be thrown out for them."""
        return bool(self._holding)

    def get_finished_count(self) -> int:
        return 1  # of all tensor-parallel ranks only the first one saves, and reports

    # --- worker ------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if get_tensor_model_parallel_rank() != 0:
            return  # hidden states are replicated over the ranks
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        [name] = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        self._cache = kv_caches[name]
        if self._block_size not in (None, self._cache.shape[2]):
            raise ValueError(
                f"The scheduler counts blocks of {self._block_size} tokens, the hidden states' cache has blocks of"
                f" {self._cache.shape[2]}: their block ids do not mean the same."
            )
        extra = self._kv_transfer_config.get_from_extra_config
        cached, wanted = cached_layers(self._format.layer_ids), list(self._format.layer_ids)
        if cached != wanted:
            self._layers = [cached.index(layer) for layer in wanted]
        self._writer = ShardWriter(
            Store(extra("store_url", "")),
            extra("directory", ""),
            self._format,
            int(extra("shard_bytes", 256 << 20)),
            float(extra("idle_flush_s", 2.0)),
            bool(extra("one_file_each", False)),
            on_failure=_end_process,
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Copy what the scheduler announced, as far as the writer has room.

        Returns:
            The requests whose blocks may be reused.
        """
        if self._writer is None:
            return None, None
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        if isinstance(metadata, FinishedSamples):
            self._waiting += metadata.samples
        done: set[str] = set()
        while self._waiting and self._has_room(self._waiting[0]):
            sample = self._waiting.popleft()
            if self._start_copy(sample):
                done.add(sample.request_id)
        while self._copying and self._copying[0][2].query():
            sample, states, _ = self._copying.popleft()
            self._writer.add(sample.sample_id, states, sample.token_crc32)
            done.add(sample.request_id)
        return done or None, None

    def _has_room(self, sample: FinishedSample) -> bool:
        assert self._cache is not None
        assert self._writer is not None
        aux, last = self._format.row_bytes(self._cache.shape[-1])
        size = sample.rows * aux + (sample.rows - sample.last_from) * last
        if self._writer.has_room(size, sum(states.nbytes for _, states, _ in self._copying)):
            return True
        if time.monotonic() - self._said_slow > _SAY_AGAIN_S:
            self._said_slow = time.monotonic()
            logger.warning(
                "The store takes hidden states more slowly than vLLM makes them; %d finished requests wait for it.",
                len(self._waiting),
            )
        return False

    def _start_copy(self, sample: FinishedSample) -> bool:
        """Take a sample's rows out of the cache, in the dtype in which they are stored.

        The cache is [blocks, n_layers, block_size, H]. On CUDA, conversion and copy go on in a stream of their own.

        Returns:
            Whether the copy is finished.
        """
        assert self._cache is not None
        assert self._writer is not None
        block_size = self._cache.shape[2]
        blocks = torch.tensor(sample.block_ids[: -(-sample.rows // block_size)], dtype=torch.long)
        if len(blocks) * block_size < sample.rows:
            raise ValueError(f"{sample.sample_id}: {len(blocks)} blocks cannot hold the states of {sample.rows} rows.")
        if not self._cache.is_cuda:
            self._writer.add(sample.sample_id, self._encoded(blocks, sample), sample.token_crc32)
            return True
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream()
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            encoded = self._encoded(blocks.to(self._cache.device, non_blocking=True), sample)
            pinned = {}
            for name, tensor in encoded.tensors.items():
                pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                pinned[name].copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._copy_stream)
        self._copying.append((sample, replace(encoded, tensors=pinned), event))
        return False

    def _encoded(self, blocks: torch.Tensor, sample: FinishedSample) -> EncodedStates:
        assert self._cache is not None
        rows = self._cache[blocks].transpose(1, 2).flatten(0, 1)[: sample.rows]
        return self._format.encode(rows if self._layers is None else rows[:, self._layers], sample.last_from)

    def shutdown(self) -> None:
        if self._writer is not None:
            self._writer.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return "LBNHC"  # a token's layers side by side


def _end_process(error: BaseException) -> None:
    """A server that cannot save is of no use: end it, so that whoever waits for it learns why from its log."""
    os._exit(1)
