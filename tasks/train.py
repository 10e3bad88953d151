"""Train: torchrun on the extracted hidden states."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from speculators import stages
from speculators.manifest import Manifest
from tasks.progress import PrefectProgress
from tasks.tracking import Tracker, stage_run


@task(name="train", cache_policy=NO_CACHE, persist_result=False)
def train(run: stages.Retraining, tracker: Tracker) -> Manifest:
    """Train the drafter; metrics stream to MLflow while it runs."""
    with stage_run(tracker, run.plan.train, run.store) as (child, record), PrefectProgress("train") as progress:
        manifest = stages.run_train(run, progress, child.log_step)
        record(manifest)
    return manifest
