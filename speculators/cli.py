"""The ``speculators`` command: every stage of the pipeline without Prefect."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from speculators import stages
from speculators.checkpoints.convert import convert, convert_back
from speculators.checkpoints.research_formats import Layout
from speculators.checkpoints.speculators_format import read_config, read_weights
from speculators.checkpoints.stitch import stitch
from speculators.config import BUILTIN_VERIFIER, RetrainConfig, VerifierConfig, load_config
from speculators.errors import CheckpointError, PipelineError
from speculators.hidden_states.capture import Capture
from speculators.manifest import Manifest
from speculators.progress import TerminalProgress
from speculators.verifier import resolve_verifier

app = typer.Typer(
    name="speculators",
    help="Retrain speculative-decoding drafters, one stage at a time.\n\nThe stages, in order: regenerate-responses,"
    " prepare-data, generate-offline-data, train, export, evaluate. Give every one of them the same configuration: each"
    " finds what the one before left in the store, skips what is finished and resumes what is not.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="YAML file with the configuration. Without it: SmolLM2-135M on this machine's CPU."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="Override one field, for example -s train.epochs=3. May be repeated."),
]


def _open(config: Path | None, overrides: list[str] | None) -> stages.Retraining:
    return stages.open_retraining(load_config(config, overrides))


def _report(run: stages.Retraining, manifest: Manifest) -> None:
    plan = next(p for p in stages.stage_plans(run) if p.fingerprint == manifest.fingerprint)
    typer.echo(f"{manifest.stage.value}: {run.store.url_of(plan.directory)}")
    typer.echo(json.dumps(manifest.figures, indent=2))


@app.command("regenerate-responses")
def regenerate_responses(config: ConfigOption = None, override: SetOption = None) -> None:
    """Let the verifier answer the prompts; the drafter will learn from its own words."""
    run = _open(config, override)
    _report(run, stages.run_regenerate(run, TerminalProgress()))


@app.command("prepare-data")
def prepare_data(config: ConfigOption = None, override: SetOption = None) -> None:
    """Turn the answers into token ids and loss masks, split by prompt, and choose the draft vocabulary."""
    run = _open(config, override)
    _report(run, stages.run_prepare(run))


@app.command("generate-offline-data")
def generate_offline_data(config: ConfigOption = None, override: SetOption = None) -> None:
    """Extract the verifier's hidden states with vLLM into the store."""
    run = _open(config, override)
    _report(run, stages.run_extract(run, TerminalProgress()))


@app.command("serve-hidden-states")
def serve_hidden_states(
    config: ConfigOption = None,
    override: SetOption = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all, in a network you trust.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8100,
) -> None:
    """Serve the verifier for trainings with extract.mode online or hybrid, until interrupted. Runs on any host that
    reaches the same store."""
    run = _open(config, override)
    capture = Capture(run.config, run.plan.extract, run.store, run.verifier)
    with capture.server("vllm-online", online=True, address=(host, port)) as server:
        typer.echo(f"serving hidden states at {server.url}")
        try:
            while True:
                server.check_alive()
                time.sleep(1)
        except KeyboardInterrupt:
            typer.echo("ending")


@app.command("train")
def train(config: ConfigOption = None, override: SetOption = None) -> None:
    """Train the drafter with torchrun on the extracted hidden states; a killed run resumes."""
    run = _open(config, override)
    _report(run, stages.run_train(run, TerminalProgress(), _ignore))


@app.command("export")
def export(config: ConfigOption = None, override: SetOption = None) -> None:
    """Validate the best checkpoint and write the folder that vLLM serves."""
    run = _open(config, override)
    _report(run, stages.run_export(run))
    typer.echo(f"serve it: {stages.servable_drafter(run).command}")


@app.command("evaluate")
def evaluate(config: ConfigOption = None, override: SetOption = None) -> None:
    """Measure acceptance and throughput in vLLM on the held-out prompts, with and without the drafter."""
    run = _open(config, override)
    _report(run, stages.run_evaluate(run, TerminalProgress()))


@app.command("plan")
def plan(config: ConfigOption = None, override: SetOption = None) -> None:
    """Show each stage's place in the store and whether it is finished. Runs nothing."""
    run = _open(config, override)
    done = stages.finished_stages(run)
    for stage in stages.stage_plans(run):
        state = "finished" if stage.stage in done else "to do"
        typer.echo(f"{stage.stage.value:<12}{state:<10}{run.store.url_of(stage.directory)}")


@app.command("convert")
def convert_drafter(
    source: Annotated[Path, typer.Argument(help="The drafter's folder.")],
    target: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    to: Annotated[
        Layout | None,
        typer.Option(help="Write a drafter of the speculators format in this layout (SGLang reads them)."),
    ] = None,
    verifier: Annotated[
        str, typer.Option(help="What the drafter drafts for: a folder, a hub id, or the built-in verifier.")
    ] = BUILTIN_VERIFIER,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(help="Draft length that vLLM uses by default. Without it: 3, or as many as a block drafts."),
    ] = None,
) -> None:
    """Convert research code's drafters (EAGLE-3: SafeAILab, SpecForge; DFlash: z-lab) to the speculators format.

    With --to, the other way round.
    """
    if to is not None:
        report = convert_back(source, target, to)
    else:
        resolved = resolve_verifier(RetrainConfig(verifier=VerifierConfig(model=verifier)))
        report = convert(source, target, resolved, num_speculative_tokens)
    typer.echo(f"{target}: {report.method}, {len(report.used)} tensors")
    for name, reason in report.dropped.items():
        typer.echo(f"  left out {name}: {reason}")
    for note in report.notes:
        typer.echo(f"  note: {note}")


@app.command("stitch")
def stitch_head(
    drafter: Annotated[Path, typer.Argument(help="A trained MTP head: the drafter's folder.")],
    verifier: Annotated[Path, typer.Argument(help="The verifier's checkpoint that it was trained from.")],
    target: Annotated[Path, typer.Argument(help="A folder that does not exist yet: the verifier with the new head.")],
) -> None:
    """Put a fine-tuned MTP head into a copy of its verifier's checkpoint; every other tensor stays as it is."""
    if read_config(drafter)["speculators_model_type"] != "mtp":
        raise CheckpointError(f"{drafter} is no MTP head: it is served from its own folder.")
    stitch(verifier, read_weights(drafter)[0], target)
    typer.echo(f"{target}")


def _ignore(metrics: dict[str, Any]) -> None:
    """The command shows metrics in the progress bar; the records lie in metrics.jsonl of the stage's folder."""


def main() -> None:
    """Entry point: a :class:`PipelineError` is printed without a traceback and ends with exit status 1."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        app()
    except PipelineError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
