"""All drafting methods from one recipe and one budget: train, export and evaluate each, and print a table.

Run it:  .venv/bin/python -m infra.benchmarks.methods [--config FILE] [--set section.field=value] [--methods eagle3 ...]

MTP needs a verifier with an MTP head: the small one of infra/demo/mimo.py, whose head is evaluated before it is
fine-tuned, too.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.demo import mimo
from speculators import stages
from speculators.checkpoints.speculators_format import save_drafter
from speculators.checkpoints.stitch import read_mtp_head
from speculators.config import VerifierConfig, load_config
from speculators.models.methods import METHODS
from speculators.models.mtp import MtpConfig, MtpDrafter
from speculators.models.verifier_head import VerifierHead
from speculators.progress import TerminalProgress
from speculators.verifier import resolve_verifier

# Fewer layers than the papers', and for what runs interpreted (a few tokens a second) fewer and shorter answers.
_INTERPRETED = ["evaluate.max_prompts=8", "evaluate.max_tokens=48"]
_ON_CPU: dict[str, list[str]] = {
    "eagle3": [],
    "peagle": ["train.num_layers=2"],
    "dflash": ["train.num_layers=2"],
    "dflash2": ["train.num_layers=2", *_INTERPRETED],
    "dspark": ["train.num_layers=2", *_INTERPRETED],
    "mtp": [],
}
_HEADER = ["Method", "Acceptance length (vLLM)", "Per position", "Reference decoder", "Difference", "Prompts"]
_HEADER += ["Identical outputs", "Training (s)", "Size (MB)"]


def main() -> None:
    """Run every method's stages (finished ones are skipped) and print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", "-c", help="YAML file with the configuration")
    parser.add_argument("--set", "-s", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    rows: list[list[str]] = []
    for method in arguments.methods:
        overrides = [f"train.method={method}", *_ON_CPU.get(method, []), *arguments.set]
        config = load_config(arguments.config, overrides)
        if method == "mtp":
            demo = Path(config.work_dir) / "cache" / "smollm2-135m-mimo"
            if not demo.is_dir():
                builtin = config.model_copy(update={"verifier": VerifierConfig()})
                mimo.build(demo, resolve_verifier(builtin))
            config = load_config(arguments.config, [*overrides, f"verifier.model={demo}"])
        rows += _run(stages.open_retraining(config))
    print("\n| " + " | ".join(_HEADER) + " |\n|" + " --- |" * len(_HEADER))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def _run(run: stages.Retraining) -> list[list[str]]:
    """All stages of one method, and its rows of the table."""
    progress, method = TerminalProgress(), run.config.train.method
    stages.run_regenerate(run, progress)
    stages.run_prepare(run)
    rows = []
    if method == "mtp":
        figures = _evaluate_native_head(run, progress)
        rows.append(_row("mtp, before fine-tuning", figures, "", ""))
    stages.run_extract(run, progress)
    trained = stages.run_train(run, progress, lambda _: None)
    exported = stages.run_export(run)
    figures = stages.run_evaluate(run, progress).figures
    size = f"{exported.figures['drafter_bytes'] / 1e6:.0f}"
    return [*rows, _row(method, figures, f"{trained.seconds:.0f}", size)]


def _evaluate_native_head(run: stages.Retraining, progress: TerminalProgress) -> Mapping[str, Any]:
    drafter = MtpDrafter(MtpConfig.for_folder(run.verifier.path))
    drafter.initialise(VerifierHead.load(run.verifier, None))
    drafter.load_head(read_mtp_head(run.verifier.path).tensors)
    with tempfile.TemporaryDirectory() as folder:
        tokens = run.config.evaluate.num_speculative_tokens
        save_drafter(drafter, Path(folder), run.verifier, tokens, None)
        return stages.run_evaluate_other(run, run.verifier.fingerprint, Path(folder), progress).figures


def _row(name: str, figures: Mapping[str, Any], seconds: str, size: str) -> list[str]:
    reference = figures.get("reference_acceptance_length")
    difference = figures.get("reference_relative_difference")
    return [
        name,
        f"{figures['acceptance_length']:.3f}",
        ", ".join(f"{value:.3f}" for value in figures["per_position_acceptance"]),
        "" if reference is None else f"{reference:.3f}",
        "" if difference is None else f"{100 * difference:+.2f}%",
        str(figures["held_out_prompts"]),
        f"{100 * figures['identical_share']:.0f}%",
        seconds,
        size,
    ]


if __name__ == "__main__":
    main()
