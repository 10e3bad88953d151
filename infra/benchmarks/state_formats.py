"""What storing hidden states smaller costs in acceptance: one drafter for each format, from the same answers.

Run it:  .venv/bin/python -m infra.benchmarks.state_formats [--config FILE] [--set section.field=value]

Each format's states are extracted by vLLM, trained on with the same seed, and evaluated on the same held-out prompts.
Differences from bfloat16 come with a 95% interval: prompts are drawn anew, the same ones for both drafters.
"""

from __future__ import annotations

import argparse
import io
import logging

import numpy as np
import pandas as pd

from speculators import stages
from speculators.config import load_config
from speculators.progress import TerminalProgress

FORMATS = {
    "bfloat16": ["extract.dtype=bfloat16"],
    "float8_e4m3, last layer bfloat16": ["extract.dtype=float8_e4m3", "extract.last_dtype=bfloat16"],
    "float8_e4m3": ["extract.dtype=float8_e4m3"],
    "float8_e4m3, zstd": ["extract.dtype=float8_e4m3", "extract.compression=zstd"],
}
_DRAWS = 10_000


def main() -> None:
    """Run the formats' stages (finished ones are skipped) and print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", "-c", help="YAML file with the configuration")
    parser.add_argument("--set", "-s", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    rows, counts = [], {}
    for name in arguments.formats:
        # The reference decoder counts for each prompt; it agrees with vLLM, which counts for all together.
        overrides = ["evaluate.reference_prompts=null", *FORMATS[name], *arguments.set]
        run = stages.open_retraining(load_config(arguments.config, overrides))
        progress = TerminalProgress()
        stages.run_regenerate(run, progress)
        stages.run_prepare(run)
        extracted = stages.run_extract(run, progress).figures
        stages.run_train(run, progress, lambda _: None)
        stages.run_export(run)
        figures = stages.run_evaluate(run, progress).figures
        counts[name] = pd.read_parquet(io.BytesIO(run.store.read_bytes(run.plan.evaluate.path("prompts.parquet"))))
        uncompressed = 2 * len(run.plan.extract.determinants["states"]["layer_ids"]) * run.verifier.hidden_size
        # A bfloat16 file of all layers has a row for each token; a sample's last token has none here.
        whole = uncompressed * (extracted["tokens"] + extracted["samples"])
        rows.append(
            [
                name,
                f"{extracted['bytes_per_sample'] / 1024:.0f}",
                f"{extracted['bytes'] / whole:.3f}",
                f"{figures['acceptance_length']:.3f}",
                difference(counts[name], counts[arguments.formats[0]]),
                f"{figures['predicted_acceptance_length']:.3f}",
            ]
        )
    print("\n| Stored as | KiB a sample | Of a bfloat16 file of all layers | Acceptance length (vLLM) | ", end="")
    print(f"Against {arguments.formats[0]} | Training predicted |\n|" + " --- |" * 6)
    for row in rows:
        print("| " + " | ".join(row) + " |")


def difference(mine: pd.DataFrame, other: pd.DataFrame) -> str:
    """Difference of two drafters' acceptance lengths on the same prompts, with its bootstrap interval."""
    columns = ["reference_drafts", "reference_accepted"]
    joined = mine.set_index("sample_id")[columns].join(other.set_index("sample_id")[columns], rsuffix="_other")
    values = joined.to_numpy(dtype=np.float64)
    draws = np.random.default_rng(0).integers(len(values), size=(_DRAWS, len(values)))
    sums = values[draws].sum(axis=1)
    differences = sums[:, 1] / sums[:, 0] - sums[:, 3] / sums[:, 2]
    low, high = np.quantile(differences, [0.025, 0.975])
    total = values.sum(axis=0)
    return f"{total[1] / total[0] - total[3] / total[2]:+.3f} ({low:+.3f} to {high:+.3f})"


if __name__ == "__main__":
    main()
