"""All drafting methods from one recipe and one budget: train, export and evaluate each, and print a table.

Run it:  .venv/bin/python -m infra.benchmarks.methods [--config FILE] [--set section.field=value] [--methods eagle3 ...]
"""

from __future__ import annotations

import argparse
import logging

from speculators import stages
from speculators.config import load_config
from speculators.models.methods import METHODS
from speculators.progress import TerminalProgress

# Fewer layers than the papers', and for what runs interpreted (a few tokens a second) fewer and shorter answers.
_INTERPRETED = ["evaluate.max_prompts=8", "evaluate.max_tokens=48"]
_ON_CPU = {
    "eagle3": [],
    "peagle": ["train.num_layers=2"],
    "dflash": ["train.num_layers=2"],
    "dflash2": ["train.num_layers=2", *_INTERPRETED],
    "dspark": ["train.num_layers=2", *_INTERPRETED],
}


def main() -> None:
    """Run every method's stages (finished ones are skipped) and print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", "-c", help="YAML file with the configuration")
    parser.add_argument("--set", "-s", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    rows = []
    for method in arguments.methods:
        overrides = [f"train.method={method}", *_ON_CPU.get(method, []), *arguments.set]
        run = stages.open_retraining(load_config(arguments.config, overrides))
        progress = TerminalProgress()
        stages.run_regenerate(run, progress)
        stages.run_prepare(run)
        stages.run_extract(run, progress)
        trained = stages.run_train(run, progress, lambda _: None)
        exported = stages.run_export(run)
        figures = stages.run_evaluate(run, progress).figures
        rows.append(
            [
                method,
                f"{figures['acceptance_length']:.3f}",
                ", ".join(f"{value:.3f}" for value in figures["per_position_acceptance"]),
                f"{figures['reference_acceptance_length']:.3f}",
                f"{100 * figures['reference_relative_difference']:+.2f}%",
                str(figures["held_out_prompts"]),
                f"{100 * figures['identical_share']:.0f}%",
                f"{trained.seconds:.0f}",
                f"{exported.figures['drafter_bytes'] / 1e6:.0f}",
            ]
        )
    header = ["Method", "Acceptance length (vLLM)", "Per position", "Reference decoder", "Difference", "Prompts"]
    header += ["Identical outputs", "Training (s)", "Size (MB)"]
    print("\n| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
