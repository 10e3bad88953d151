"""What the launcher tells the ranks, and the lines by which they answer."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speculators.config import RetrainConfig
from speculators.manifest import Stage, StagePlan
from speculators.store import Store, write_atomic
from speculators.verifier import Verifier

EVENT_PREFIX = "speculators-training-event "


@dataclass(frozen=True)
class TrainingJob:
    """One training, as every rank needs it. Holds no secrets: credentials stay in the environment.

    Attributes:
        plan: The training's own place in the store.
        prepare_plan: Where samples and the draft vocabulary lie.
        extract_plan: Where hidden states lie.
        aux_layer_ids: Layers that feed the drafter.
        endpoints: vLLM servers that make hidden states while training goes on; none when all have been extracted.
    """

    config: RetrainConfig
    plan: StagePlan
    prepare_plan: StagePlan
    extract_plan: StagePlan
    store: Store
    verifier: Verifier
    aux_layer_ids: list[int]
    endpoints: list[str]

    def write(self, path: Path) -> None:
        """Write the job as JSON, for :meth:`read` in the ranks."""
        value = {
            "config": self.config.model_dump(mode="json"),
            "plan": self.plan.determinants,
            "prepare_plan": self.prepare_plan.determinants,
            "extract_plan": self.extract_plan.determinants,
            "store": self.store.url,
            "cache_dir": str(self.store.cache_dir),
            "verifier": {**asdict(self.verifier), "path": str(self.verifier.path)},
            "aux_layer_ids": self.aux_layer_ids,
            "endpoints": self.endpoints,
        }
        write_atomic(path, json.dumps(value, indent=2).encode())

    @classmethod
    def read(cls, path: Path) -> TrainingJob:
        """Read a job that :meth:`write` wrote."""
        value = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            config=RetrainConfig.model_validate(value["config"]),
            plan=StagePlan(Stage.TRAIN, value["plan"]),
            prepare_plan=StagePlan(Stage.PREPARE, value["prepare_plan"]),
            extract_plan=StagePlan(Stage.EXTRACT, value["extract_plan"]),
            store=Store(value["store"], cache_dir=value["cache_dir"]),
            verifier=Verifier(**{**value["verifier"], "path": Path(value["verifier"]["path"])}),
            aux_layer_ids=value["aux_layer_ids"],
            endpoints=value["endpoints"],
        )


def emit(kind: str, **values: Any) -> None:
    """Send one event to the launcher: a line on stdout, written at once so that ranks' lines do not mix."""
    line = EVENT_PREFIX + json.dumps({"kind": kind, **values}) + "\n"
    os.write(1, line.encode())


def parse_event(line: str) -> dict[str, Any] | None:
    """The event that a line of the ranks' output carries, or None if it is an ordinary line."""
    _, prefix, text = line.partition(EVENT_PREFIX)
    if not prefix:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None
