"""Regenerate: the verifier answers the prompts."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from speculators import stages
from speculators.manifest import Manifest
from tasks.progress import PrefectProgress
from tasks.tracking import Tracker, stage_run


@task(name="regenerate", cache_policy=NO_CACHE, persist_result=False)
def regenerate(run: stages.Retraining, tracker: Tracker) -> Manifest:
    """Answers to all prompts, in a vLLM server started for this stage or in the configured endpoints."""
    with stage_run(tracker, run.plan.regenerate, run.store) as (_, record), PrefectProgress("regenerate") as progress:
        manifest = stages.run_regenerate(run, progress)
        record(manifest)
    return manifest
