"""Extract: the verifier's hidden states into the store."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from speculators import stages
from speculators.manifest import Manifest
from tasks.progress import PrefectProgress
from tasks.tracking import Tracker, stage_run


@task(name="extract", cache_policy=NO_CACHE, persist_result=False)
def extract(run: stages.Retraining, tracker: Tracker) -> Manifest:
    """Hidden states of the training and validation samples, written by vLLM itself."""
    with stage_run(tracker, run.plan.extract, run.store) as (_, record), PrefectProgress("extract") as progress:
        manifest = stages.run_extract(run, progress)
        record(manifest)
    return manifest
