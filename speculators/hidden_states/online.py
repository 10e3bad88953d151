"""Hidden states made while they are trained on: asked of vLLM sample by sample, and dropped or kept after use."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from speculators.config import RetrainConfig
from speculators.data.prepare import Sample
from speculators.errors import StoreError
from speculators.hidden_states.capture import Capture, online_directory
from speculators.hidden_states.extract import finish_set, last_from, read_shards
from speculators.hidden_states.format import EncodedStates, StateFormat, read_sample_file, token_checksum
from speculators.hidden_states.writer import ShardWriter
from speculators.manifest import StagePlan
from speculators.serving.client import VllmClient
from speculators.store import Store
from speculators.verifier import Verifier

logger = logging.getLogger(__name__)
_ARRIVAL_S = 60.0
_FIRST_POLL_S, _LONGEST_POLL_S = 0.005, 0.5
_TRIES = 3


class StateSource(Protocol):
    """Where training reads hidden states; all modes look alike.

    Attributes:
        layer_ids: Auxiliary layers, then the last layer.
        hidden_size: H.
        parallel_reads: How many threads may usefully read at once.
        read_bytes: Stored bytes of all samples read so far.
    """

    layer_ids: list[int]
    hidden_size: int
    parallel_reads: int

    @property
    def read_bytes(self) -> int: ...

    def read(self, sample_id: str) -> Tensor:
        """float32 [n - 1, n_layers, H], as :meth:`HiddenStateReader.read` gives them."""
        ...

    def check_tokens(self, sample_id: str, token_ids: Sequence[int]) -> None:
        """Check that a sample's states are of these tokens."""
        ...

    def close(self) -> None:
        """Let go of connections and threads, and write what is still to be written."""
        ...


class OnlineStates:
    """States that vLLM computes when they are asked for. Each lies in the store for a moment, and is removed when read.

    Several servers share the work by how fast they answer; one that dies is left out. May be used by several threads.

    Args:
        plan: The extraction that this stands for.
        endpoints: Base URLs of servers that :meth:`Capture.server` started with ``online=True``.
        samples: All samples by id.
        owner: Begins the names of the files, so that whoever ends the training can remove what is left.
        parallel_reads: Requests in flight of this process.
    """

    def __init__(
        self,
        config: RetrainConfig,
        plan: StagePlan,
        store: Store,
        verifier: Verifier,
        endpoints: Sequence[str],
        samples: Mapping[str, Sample],
        owner: str,
        parallel_reads: int,
    ) -> None:
        self._capture, self._store, self._samples = Capture(config, plan, store, verifier), store, samples
        self._directory, self._owner = online_directory(plan), owner
        self.format = StateFormat.from_json(plan.determinants["states"])
        self.layer_ids, self.hidden_size = list(self.format.layer_ids), verifier.hidden_size
        self.parallel_reads, self.read_bytes = parallel_reads, 0
        section = config.regenerate
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="online-states", daemon=True)
        self._thread.start()

        async def connect() -> VllmClient:
            return VllmClient(endpoints, parallel_reads, section.request_timeout_s, section.max_retries)

        self._client = self._await(connect())

    def read(self, sample_id: str) -> Tensor:
        """See :class:`StateSource`.

        Raises:
            ServingError: No server gave the states.
            StoreError: They did not arrive, or not as they were written.
        """
        return self.format.decode(self.read_encoded(sample_id))

    def read_encoded(self, sample_id: str) -> EncodedStates:
        """A sample's states as they are stored; raises as :meth:`read`."""
        problem = ""
        for attempt in range(_TRIES):
            if attempt:
                logger.warning("The states of %s are asked for again: %s", sample_id, problem)
            name = f"{self._owner}-{uuid.uuid4().hex}"
            path = f"{self._directory}/{name}.safetensors"
            try:
                self._await(self._ask(self._samples[sample_id], name))
                if not self._arrived(path):
                    problem = f"they did not arrive within {_ARRIVAL_S:.0f} s"
                    continue
                entry, states = read_sample_file(self._store.read_bytes(path), self.format, self.hidden_size)
            except ValueError as error:
                problem = f"{self._store.url_of(path)}: {error}"
                continue
            finally:
                self._store.delete(path)
            self._check(entry.token_crc32, states.rows, sample_id)
            self.read_bytes += entry.size
            return states
        raise StoreError(
            f"vLLM answered, but the hidden states of {sample_id} did not come through {self._store.url} in {_TRIES}"
            f" tries: {problem}. Check that vLLM's servers were started with the same store, and read their logs."
        )

    def check_tokens(self, sample_id: str, token_ids: Sequence[int]) -> None:
        """Nothing to check yet: the states are made from the tokens, and compared when they come."""

    def close(self) -> None:
        """Close the connections."""
        self._await(self._client.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _ask(self, sample: Sample, name: str) -> None:
        await self._client.complete(
            sample.token_ids[:-1].tolist(),
            max_tokens=1,
            temperature=0.0,
            kv_transfer_params=self._capture.request(name, last_from(self.format, sample)),
        )

    def _arrived(self, path: str) -> bool:
        """Wait for a file; vLLM answers a little before it is written."""
        deadline, delay = time.monotonic() + _ARRIVAL_S, _FIRST_POLL_S
        while not self._store.exists(path):
            if time.monotonic() > deadline:
                return False
            time.sleep(delay)
            delay = min(1.5 * delay, _LONGEST_POLL_S)
        return True

    def _check(self, token_crc32: int, rows: int, sample_id: str) -> None:
        tokens = self._samples[sample_id].token_ids[:-1]
        if rows != len(tokens) or token_crc32 != token_checksum(tokens):
            raise StoreError(f"vLLM saved the hidden states of other tokens than those of {sample_id}.")


class HybridStates:
    """States that are asked of vLLM when they are first read, and kept in shards; a run that was killed reads those.

    :meth:`finish` makes a finished set of them, which the following epochs read.

    Args:
        online: Where they come from.
        plan: The extraction that this makes whole.
        samples: All samples by id.
    """

    def __init__(
        self,
        online: OnlineStates,
        config: RetrainConfig,
        plan: StagePlan,
        store: Store,
        verifier: Verifier,
        samples: Mapping[str, Sample],
    ) -> None:
        self._online, self._config, self._plan, self._store = online, config, plan, store
        self._verifier, self._samples = verifier, samples
        self.layer_ids, self.hidden_size = online.layer_ids, online.hidden_size
        self.parallel_reads = online.parallel_reads
        self._kept = read_shards(config, plan, store, verifier, list(samples.values()))
        self._writer = ShardWriter(store, plan.directory, online.format, config.extract.shard_mib << 20)

    @property
    def read_bytes(self) -> int:
        """See :class:`StateSource`."""
        return self._kept.read_bytes + self._online.read_bytes

    def read(self, sample_id: str) -> Tensor:
        """See :class:`StateSource`; raises as :meth:`OnlineStates.read`."""
        if self._kept.has(sample_id):
            return self._kept.read(sample_id)
        return self._online.format.decode(self._keep(sample_id))

    def check_tokens(self, sample_id: str, token_ids: Sequence[int]) -> None:
        """See :class:`StateSource`."""
        if self._kept.has(sample_id):
            self._kept.check_tokens(sample_id, token_ids)

    def close(self) -> None:
        """Write what is left and close the connections."""
        self._writer.close()
        self._online.close()
        self._kept.close()

    def flush(self) -> None:
        """Write all that was read so far."""
        self._writer.close()
        size = self._config.extract.shard_mib << 20
        self._writer = ShardWriter(self._store, self._plan.directory, self._online.format, size)

    def finish(self) -> None:
        """Make the set whole; called by one process when all have flushed.

        What a killed run lost is asked for again.
        """
        samples = list(self._samples.values())
        while missing := finish_set(self._config, self._plan, self._store, self._verifier, samples):
            for sample in missing:
                self._keep(sample.sample_id)
            self.flush()

    def _keep(self, sample_id: str) -> EncodedStates:
        states = self._online.read_encoded(sample_id)
        self._writer.add(sample_id, states, token_checksum(self._samples[sample_id].token_ids[:-1]))
        return states
