"""Prepare: token ids, loss masks, splits and the draft vocabulary."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from speculators import stages
from speculators.manifest import Manifest
from tasks.tracking import Tracker, stage_run


@task(name="prepare", cache_policy=NO_CACHE, persist_result=False)
def prepare(run: stages.Retraining, tracker: Tracker) -> Manifest:
    """Training samples and held-out prompts from the regenerated answers."""
    with stage_run(tracker, run.plan.prepare, run.store) as (_, record):
        manifest = stages.run_prepare(run)
        record(manifest)
    return manifest
