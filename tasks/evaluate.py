"""Evaluate: acceptance and throughput in vLLM."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from speculators import stages
from speculators.manifest import Manifest
from tasks.progress import PrefectProgress
from tasks.tracking import Tracker, stage_run


@task(name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def evaluate(run: stages.Retraining, tracker: Tracker) -> Manifest:
    """Measure the new drafter on the held-out prompts; results and plots become artifacts."""
    with stage_run(tracker, run.plan.evaluate, run.store) as (child, record), PrefectProgress("evaluate") as progress:
        manifest = stages.run_evaluate(run, progress)
        record(manifest)
        folder = run.store.local_copy(run.plan.evaluate.directory)
        for name in manifest.outputs:
            child.log_file(folder / name)
        tracker.log_metrics(tracker.run_id, manifest.figures)
    return manifest
