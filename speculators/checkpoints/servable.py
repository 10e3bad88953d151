"""What vLLM has to be given so that it serves a drafter."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from speculators.checkpoints.speculators_format import WEIGHTS_FILE, read_config, read_weights
from speculators.checkpoints.stitch import stitch
from speculators.manifest import file_sha256, fingerprint
from speculators.verifier import Verifier


@dataclass(frozen=True)
class Servable:
    """A model for vLLM.

    Attributes:
        model: The folder to serve.
        arguments: Further arguments of vLLM's API server.
    """

    model: Path
    arguments: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        """The command line that serves it."""
        parts = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model), *self.arguments]
        return shlex.join(parts)


def servable(drafter: Path, verifier: Verifier, cache: Path) -> Servable:
    """A drafter's own folder, which says all itself; for an MTP head a copy of the verifier that has it.

    Args:
        drafter: The drafter's folder.
        cache: Where stitched verifiers are kept. Files that do not change are hard links where possible.

    Raises:
        CheckpointError: The drafter is unusable, or does not fit the verifier.
    """
    config = read_config(drafter)
    if config["speculators_model_type"] != "mtp":
        return Servable(drafter)
    content = fingerprint({"head": file_sha256(drafter / WEIGHTS_FILE), "verifier": verifier.fingerprint})
    target = cache / "stitched" / f"{verifier.name}-{content}"
    if not target.is_dir():
        stitch(verifier.path, read_weights(drafter)[0], target)
    tokens = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    speculative = {"method": "mtp", "num_speculative_tokens": tokens}
    return Servable(target.resolve(), ["--speculative-config", json.dumps(speculative)])
