"""Export: the best checkpoint of a training as the folder that is served, registered and pulled."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from speculators.checkpoints.speculators_format import CONFIG_FILE, WEIGHTS_FILE, validate_drafter, verifier_name
from speculators.config import RetrainConfig
from speculators.errors import CheckpointError
from speculators.manifest import Manifest, StagePlan, package_versions
from speculators.models.methods import METHODS
from speculators.store import Store, write_atomic
from speculators.verifier import Verifier

LINEAGE_FILE = "lineage.json"


def export(config: RetrainConfig, plan: StagePlan, train_plan: StagePlan, store: Store, verifier: Verifier) -> Manifest:
    """Validate ``best``, name the verifier as it is found here, and say where everything came from.

    Writes ``config.json``, ``model.safetensors`` and ``lineage.json``.

    Raises:
        MissingStageError: Training has not finished.
        CheckpointError: The checkpoint is one that vLLM would refuse; names what does not fit.
    """
    if (done := plan.finished(store)) is not None:
        return done
    plan.begin()
    training = train_plan.require(store, "speculators train")
    with tempfile.TemporaryDirectory(prefix="export-") as temporary:
        folder = Path(temporary)
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            write_atomic(folder / name, store.read_bytes(f"{train_plan.path('best')}/{name}"))
        described = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        _check_draft_length(described, config)
        described["speculators_config"]["verifier"]["name_or_path"] = verifier_name(verifier)
        write_atomic(folder / CONFIG_FILE, (json.dumps(described, indent=2) + "\n").encode())
        validate_drafter(folder, verifier)
        lineage: dict[str, Any] = {
            "drafter": plan.fingerprint,
            "training": train_plan.fingerprint,
            "training_determinants": train_plan.determinants,
            "verifier": {
                "source": _without_folders(verifier),
                "revision": verifier.revision,
                "fingerprint": verifier.fingerprint,
                "architectures": verifier.architectures,
            },
            "method": described["speculators_model_type"],
            "aux_layer_ids": described.get(METHODS[config.train.method].config.aux_key, []),
            "training_figures": training.figures,
            "versions": package_versions(),
        }
        write_atomic(folder / LINEAGE_FILE, (json.dumps(lineage, indent=2) + "\n").encode())
        store.upload_folder(folder, plan.directory)
        size = (folder / WEIGHTS_FILE).stat().st_size
    files: dict[str, str | None] = dict.fromkeys((WEIGHTS_FILE, CONFIG_FILE, LINEAGE_FILE))
    return plan.complete(store, files, {"drafter_bytes": size, "best_step": training.figures.get("best_step")})


def _without_folders(verifier: Verifier) -> str:
    """The verifier's source; of a local folder the last part only, as the rest means nothing on another machine."""
    return Path(verifier.source).name if Path(verifier.source).is_dir() else verifier.source


def _check_draft_length(described: dict[str, Any], config: RetrainConfig) -> None:
    found = described["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    if found != config.evaluate.num_speculative_tokens:
        raise CheckpointError(
            f"The checkpoint was trained to propose {found} tokens; evaluate.num_speculative_tokens is"
            f" {config.evaluate.num_speculative_tokens}."
        )
