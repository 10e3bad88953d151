"""The summary at the end: figures, paths, commands and links, for the terminal and the Prefect UI."""

from __future__ import annotations

import logging

from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from speculators import stages
from speculators.manifest import Manifest
from tasks.promote import Promotion
from tasks.tracking import Tracker

logger = logging.getLogger(__name__)


@task(name="report", cache_policy=NO_CACHE, persist_result=False)
def report(
    run: stages.Retraining, tracker: Tracker, manifests: list[Manifest], promotion: Promotion, skipped: set[str]
) -> str:
    """Make the summary, keep it as Prefect artifacts, and return it as Markdown."""
    text = summary(run, tracker, manifests, promotion, skipped)
    create_markdown_artifact(text, key="retraining-summary", description="What this retraining made")
    if tracker.uri.startswith("http"):
        link = f"{tracker.uri}/#/experiments/{tracker.experiment_id}/runs/{tracker.run_id}"
        create_link_artifact(link, key="mlflow-run", link_text="MLflow run")
    return text


def summary(
    run: stages.Retraining, tracker: Tracker, manifests: list[Manifest], promotion: Promotion, skipped: set[str]
) -> str:
    """The summary as Markdown, readable as plain text too."""
    figures = {manifest.stage.value: manifest.figures for manifest in manifests}
    evaluation = figures["evaluate"]
    folder = stages.drafter_folder(run)
    per_position = ", ".join(f"{rate:.3f}" for rate in evaluation["per_position_acceptance"])
    rows = [
        ("Acceptance length (vLLM, held-out prompts)", f"{evaluation['acceptance_length']:.3f}"),
        ("Acceptance rate", f"{evaluation['acceptance_rate']:.3f}"),
        ("Per-position acceptance", per_position),
        ("Greedy outputs identical with and without drafter", f"{evaluation['identical_share']:.1%}"),
        ("Output tokens/s with drafter", f"{evaluation['tokens_per_s_with']:.1f}"),
        ("Output tokens/s without", f"{evaluation['tokens_per_s_without']:.1f}"),
    ]
    if evaluation.get("divergences"):
        rows.insert(
            4, ("Outputs that part, of these at a near-tie", f"{evaluation['divergences']}, {evaluation['near_ties']}")
        )
    if evaluation.get("reference_acceptance_length") is not None:
        rows.append(
            (
                f"Reference decoder on {evaluation['reference_prompts']} of them (against vLLM's there)",
                f"{evaluation['reference_acceptance_length']:.3f} ({evaluation['reference_relative_difference']:+.2%})",
            )
        )
    if evaluation.get("predicted_acceptance_length") is not None:
        rows.append(("Acceptance length that training predicted", f"{evaluation['predicted_acceptance_length']:.3f}"))
    if promotion.champion_acceptance_length is not None:
        rows.append(("Acceptance length of the champion before", f"{promotion.champion_acceptance_length:.3f}"))
    width = max(len(name) for name, _ in rows)
    lines = [f"# Retraining of {run.verifier.source} ({run.config.train.method})", ""]
    lines += [f"| {'Figure':<{width}} | Value |", f"| {'-' * width} | --- |"]
    lines += [f"| {name:<{width}} | {value} |" for name, value in rows]
    lines += ["", "| Stage      | Seconds | In the store |", "| ---------- | ------- | --- |"]
    plans = {plan.stage: plan for plan in stages.stage_plans(run)}
    for manifest in manifests:
        plan = plans[manifest.stage]
        seconds = "skipped" if manifest.stage.value in skipped else f"{manifest.seconds:.0f}"
        lines.append(f"| {manifest.stage.value:<10} | {seconds:<7} | {run.store.url_of(plan.directory)} |")
    lines += [
        "",
        f"Drafter:     {folder}",
        f"Serve it:    {stages.servable_drafter(run).command}",
        f"Registry:    {promotion.model} version {promotion.version}, alias {promotion.alias}",
        f"MLflow run:  {tracker.run_id} at {tracker.uri}",
    ]
    if tracker.uri.startswith("sqlite"):
        lines.append(f"MLflow UI:   mlflow ui --backend-store-uri {tracker.uri}")
    return "\n".join(lines)
