"""A vLLM that saves hidden states, seen from outside: how to start it, what it has saved, why it failed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from speculators.config import RetrainConfig
from speculators.errors import ServingError, StoreError
from speculators.hidden_states.format import ERRORS, SHARDS, Sidecar, StateFormat, cached_layers
from speculators.hidden_states.vllm_plugin import MIMO_WITH_HIDDEN_STATES
from speculators.manifest import StagePlan, fingerprint
from speculators.serving.vllm_server import VllmServer
from speculators.store import Store
from speculators.verifier import Verifier

logger = logging.getLogger(__name__)
_IDLE_FLUSH_S = 2.0
_STALLED_S = 180.0
_POLL_S = 0.5


def online_directory(plan: StagePlan) -> str:
    """Folder of the store through which states go to a training that asks for them; of a verifier, not of a dataset."""
    same = ("verifier", "states", "states_format", "serving_dtype")
    return f"online/{fingerprint({name: plan.determinants.get(name) for name in same})}"


def remove_online_files(store: Store, plan: StagePlan, owner: str) -> None:
    """Remove what a training that has ended left in :func:`online_directory`."""
    for path in store.list(online_directory(plan)):
        if path.rpartition("/")[2].startswith(f"{owner}-"):
            store.delete(path)


class Capture:
    """The hidden states of one extraction, as far as vLLM has saved them.

    Args:
        plan: The extraction; says which states, and where they go.
    """

    def __init__(self, config: RetrainConfig, plan: StagePlan, store: Store, verifier: Verifier) -> None:
        self._config, self._plan, self._store, self._verifier = config, plan, store, verifier
        self.sidecars: dict[str, Sidecar] = {}

    def server(self, name: str, *, online: bool = False, address: tuple[str, int] | None = None) -> VllmServer:
        """A vLLM of the verifier that saves the states of every request which :meth:`request` describes.

        Args:
            online: Every sample goes into a file of its own at once, for :class:`OnlineStates`; else into shards.
            address: Host and port to listen on; None for a free port of this machine that only it can reach.
        """
        return VllmServer(
            self._config.serving,
            self._verifier.path,
            Path(self._config.work_dir),
            name=name,
            address=address,
            extra_args=self.server_arguments(online),
            env={"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        )

    def server_arguments(self, online: bool = False) -> list[str]:
        """vLLM's arguments for that."""
        states = self._plan.determinants["states"]
        layers = cached_layers(states["layer_ids"])
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        }
        store = self._store
        transfer = {
            "kv_connector": "StoreConnector",
            "kv_connector_module_path": "speculators.hidden_states.vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "store_url": str(Path(store.root).resolve()) if store.is_local else store.url,
                "directory": online_directory(self._plan) if online else self._plan.directory,
                "states": states,
                "shard_bytes": self._config.extract.shard_mib << 20,
                "idle_flush_s": _IDLE_FLUSH_S,
                "one_file_each": online,
            },
        }
        is_mimo = self._verifier.architectures == ["MiMoForCausalLM"]
        overrides = ["--hf-overrides", json.dumps({"architectures": [MIMO_WITH_HIDDEN_STATES]})] if is_mimo else []
        arguments = {"--speculative-config": speculative, "--kv-transfer-config": transfer}
        return [text for name, value in arguments.items() for text in (name, json.dumps(value))] + overrides

    def request(self, sample_id: str, last_from: int | None = None) -> dict[str, Any]:
        """What a request's ``kv_transfer_params`` say to have its states saved, cut as samples are.

        Args:
            last_from: First row whose last layer is needed; None for the one that predicts the first generated token.
        """
        asked: dict[str, Any] = {"sample_id": sample_id, "max_rows": self._config.prepare.max_length - 1}
        if last_from is None and StateFormat.from_json(self._plan.determinants["states"]).needs_last_everywhere:
            last_from = 0
        return asked if last_from is None else {**asked, "last_from": last_from}

    def forget_errors(self) -> None:
        """Remove what stopped an earlier run."""
        self._store.delete(self._plan.path(ERRORS))

    def refresh(self) -> list[Sidecar]:
        """The sidecars that are new since the last call.

        Raises:
            StoreError: A writer gave up; says why.
        """
        listed = self._store.list(self._plan.directory)
        there, new = set(listed), []
        for path in listed:
            if not path.endswith(".json") or path in self.sidecars:
                continue
            if path.startswith(self._plan.path(f"{ERRORS}/")):
                raise StoreError(str(self._store.read_json(path)["message"]))
            if not path.startswith(self._plan.path(f"{SHARDS}/")):
                continue
            try:
                sidecar = Sidecar.from_json(self._store.read_json(path))
            except (StoreError, TypeError, KeyError) as error:
                logger.warning("%s is not used: %s", self._store.url_of(path), error)
                continue
            if self._plan.path(sidecar.shard) in there:
                self.sidecars[path] = sidecar
                new.append(sidecar)
        return new

    def wait_for(self, sample_ids: Collection[str]) -> None:
        """Wait until the states of these samples are in the store, or until no more come.

        What is missing then, the extraction computes.
        """
        missing = set(sample_ids)
        changed = time.monotonic()
        try:
            while True:
                for sidecar in self.refresh():
                    missing -= {entry.sample_id for entry in sidecar.samples}
                    changed = time.monotonic()
                if not missing or time.monotonic() - changed > _STALLED_S / 6:
                    break
                time.sleep(_POLL_S)
        except StoreError as error:
            logger.warning("Not all hidden states could be saved along with the answers: %s", error)
        if missing:
            logger.warning("The hidden states of %d samples were not saved along with their answers.", len(missing))

    def cause(self, server: VllmServer, error: Exception) -> Exception:
        """The error to show: why the store failed, if it did; what vLLM's log says if that died; else ``error``."""
        if isinstance(error, StoreError):
            return error
        time.sleep(2)  # a worker's death takes the server down a moment later
        try:
            self.refresh()
            server.check_alive()
        except StoreError as noted:
            return noted
        except ServingError as died:
            message = str(died)
            return StoreError(message.partition("StoreError: ")[2]) if "StoreError: " in message else died
        return error
