"""The main job: retrain a drafter and promote it if it is better.

Run it here with ``python -m flows.retrain [--config FILE] [--set section.field=value]``, or deploy it (prefect.yaml).
"""

from __future__ import annotations

import argparse
import logging
import sys

from prefect import flow

from speculators.config import RetrainConfig, load_config
from speculators.errors import PipelineError
from speculators.hidden_states.retention import lease
from speculators.stages import finished_stages
from tasks.evaluate import evaluate
from tasks.export import export
from tasks.extract import extract
from tasks.logs import quiet_pipeline_errors
from tasks.prepare import prepare
from tasks.promote import promote
from tasks.regenerate import regenerate
from tasks.report import report
from tasks.retention import apply_retention
from tasks.setup import set_up
from tasks.tracking import parent_run
from tasks.train import train


@flow(name="retrain", persist_result=False, validate_parameters=True)
def retrain(config: RetrainConfig | None = None) -> str:
    """Regenerate, prepare, extract, train, export, evaluate, promote; delete hidden states that are not to be kept.

    Finished stages are skipped.

    Args:
        config: The whole configuration; its defaults retrain an EAGLE-3 drafter for SmolLM2-135M on a CPU.

    Returns:
        The summary as Markdown.
    """
    quiet_pipeline_errors()
    config = config or RetrainConfig()
    run = set_up(config)
    skipped = {stage.value for stage in finished_stages(run)}
    with parent_run(config) as tracker:
        with lease(run.store, run.plan.extract):
            manifests = [regenerate(run, tracker), prepare(run, tracker)]
            if config.extract.mode == "offline":
                manifests.append(extract(run, tracker))
            manifests.append(train(run, tracker))
        apply_retention(run.store, config.retention, trained=run.plan.extract.directory)
        manifests += [export(run, tracker), evaluate(run, tracker)]
        promotion = promote(run, tracker, manifests[-1])
        return report(run, tracker, manifests, promotion, skipped)


def main() -> None:
    """Run the flow in this process and print its summary; exit status 1 and one clear line on an error."""
    parser = argparse.ArgumentParser(prog="python -m flows.retrain", description="Retrain a drafter, end to end.")
    parser.add_argument("--config", "-c", help="YAML file; without it, SmolLM2-135M on this machine's CPU")
    parser.add_argument(
        "--set", "-s", action="append", default=[], metavar="FIELD=VALUE", help="for example train.epochs=3"
    )
    arguments = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        print("\n" + retrain(load_config(arguments.config, arguments.set)))
    except PipelineError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
