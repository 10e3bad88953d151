"""Evaluate a drafter in real vLLM on the held-out prompts: acceptance, throughput, losslessness.

Three parts, each kept in the store as soon as it is done, so a killed evaluation redoes only the unfinished one:
vLLM with the drafter, vLLM without it, and the reference decoder in torch. Never two at once: they would share memory
and cores, and the throughput of none could be trusted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import logging
import shlex
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.checkpoints.servable import servable
from speculators.config import RetrainConfig
from speculators.data.prepare import EvaluationPrompt, load_held_out
from speculators.errors import CheckpointError, ConfigError, DataError, ServingError
from speculators.evaluation.acceptance import (
    GREEDY,
    Divergence,
    ServerRun,
    find_divergences,
    max_new_tokens,
    measure,
)
from speculators.evaluation.outcome import Outcome
from speculators.evaluation.plots import acceptance_plot
from speculators.evaluation.reference import ReferenceResult, decode_prompts
from speculators.manifest import Manifest, StagePlan, package_versions
from speculators.progress import Progress
from speculators.serving.vllm_server import VllmServer, triton_interpreter
from speculators.store import Store
from speculators.verifier import Verifier

logger = logging.getLogger(__name__)

RESULTS, PROMPTS, PLOT = "results.json", "prompts.parquet", "acceptance.png"
_PARTIAL = "partial"
# Held-out prompts share prefixes (system prompt, earlier turns). Cached ones would make the work depend on the order in
# which requests arrive, and a prompt cached up to its last token is counted as one draft that was wholly rejected.
_SERVER_ARGS = ("--no-enable-prefix-caching",)
_NEEDS_TRITON = ("dflash2", "dspark")  # vLLM's V2 model runner
_REFERENCE_TOLERANCE = 0.03
_TRAINING_TOLERANCE = 0.05


def evaluate(
    config: RetrainConfig,
    plan: StagePlan,
    prepare_plan: StagePlan,
    drafter_dir: Path,
    store: Store,
    verifier: Verifier,
    progress: Progress,
    predicted_acceptance_length: float | None = None,
    predicted_per_position: Sequence[float] | None = None,
) -> Manifest:
    """Measure a drafter on the held-out prompts and write ``results.json``, ``prompts.parquet`` and ``acceptance.png``.

    Args:
        plan: This evaluation.
        prepare_plan: The dataset whose held-out prompts are used.
        drafter_dir: The drafter's folder in the speculators format, as vLLM serves it.
        predicted_acceptance_length: What training's validation predicted.
        predicted_per_position: Its per-position acceptance, drawn beside vLLM's.

    Returns:
        The manifest; its figures hold acceptance, throughput with and without the drafter, the share of identical
        greedy outputs, and the reference decoder's acceptance.

    Raises:
        ConfigError: ``evaluate.num_speculative_tokens`` is not what the drafter's config.json says.
        CheckpointError: The drafter's config.json is unusable or names a verifier that is not here.
        DataError: No held-out prompt fits into ``serving.max_model_len``.
        ServingError: vLLM did not start, died or refused a request.
    """
    if (done := plan.finished(store)) is not None:
        return done
    plan.begin()
    prepare_plan.require(store, "speculators prepare-data")
    check_drafter(drafter_dir, config, verifier)
    evaluation = _Evaluation.open(config, plan, prepare_plan, drafter_dir, store, verifier, progress)
    with_drafter = evaluation.part("with_drafter", evaluation.run_with_drafter)
    without = evaluation.part("without_drafter", evaluation.run_without_drafter)
    with_run = ServerRun.from_json(with_drafter["run"])
    reference = evaluation.run_reference(with_run.outputs)

    outcome = Outcome(
        with_drafter=with_run,
        without_drafter=ServerRun.from_json(without["run"]),
        divergences=[Divergence(**value) for value in without["divergences"]],
        reference=reference,
    )
    drafted = len(predicted_per_position or [])
    comparable = drafted == config.evaluate.num_speculative_tokens
    figures = outcome.figures(predicted_acceptance_length, comparable)
    figures["prompts_too_long"] = evaluation.too_long
    _warn(figures)
    results = {
        "figures": figures,
        "sampling": {**GREEDY, "max_tokens": config.evaluate.max_tokens},
        "settings": config.evaluate.model_dump(mode="json"),
        "serving": config.serving.model_dump(mode="json", exclude={"endpoints", "python"}),
        "verifier": {"model": verifier.source, "revision": verifier.revision, "fingerprint": verifier.fingerprint},
        "versions": {**package_versions(), "vllm server": with_drafter["vllm_version"]},
        "with_drafter": _server_results(outcome.with_drafter, with_drafter),
        "without_drafter": _server_results(outcome.without_drafter, without),
        "divergences": without["divergences"],
        "reference": outcome.reference_acceptance.figures() if reference else None,
    }
    title = f"Acceptance length {figures['acceptance_length']:.2f} over {figures['held_out_prompts']} held-out prompts"
    series = {"vLLM": outcome.with_drafter.acceptance.per_position}
    if reference:
        if len(reference) < figures["held_out_prompts"]:
            same = f" ({len(reference)} prompts)"
            series[f"vLLM{same}"] = outcome.with_drafter.group_acceptance[0].per_position
        else:
            same = ""
        series[f"Reference decoder{same}"] = outcome.reference_acceptance.per_position
    if predicted_per_position:
        series["Predicted by training"] = list(predicted_per_position)
    table = io.BytesIO()
    outcome.rows(evaluation.prompts).to_parquet(table, index=False)
    store.write_bytes(plan.path(PROMPTS), table.getvalue())
    store.write_bytes(plan.path(PLOT), acceptance_plot(series, title))
    store.write_json(plan.path(RESULTS), results)
    manifest = plan.complete(store, {RESULTS: None, PROMPTS: None, PLOT: None}, figures)
    store.delete(plan.path(_PARTIAL))
    return manifest


def check_drafter(drafter_dir: Path, config: RetrainConfig, verifier: Verifier) -> None:
    """Make sure that vLLM, given the drafter's folder alone, would do what the configuration asks for.

    Raises:
        ConfigError: The number of speculative tokens differs.
        CheckpointError: config.json is missing or incomplete, or names another verifier.
    """
    file = drafter_dir / "config.json"
    try:
        section = json.loads(file.read_text(encoding="utf-8"))["speculators_config"]
        tokens = int(section["proposal_methods"][0]["speculative_tokens"])
        named = str(section["verifier"]["name_or_path"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CheckpointError(
            f"{file} is not the config.json of a drafter in the speculators format ({type(error).__name__}: {error})."
            " Make the folder with `speculators export`."
        ) from error
    if tokens != config.evaluate.num_speculative_tokens:
        raise ConfigError(
            f"evaluate.num_speculative_tokens is {config.evaluate.num_speculative_tokens}, but the drafter in"
            f" {drafter_dir} proposes {tokens} tokens at a time, and vLLM follows the drafter's config.json. Set"
            f" evaluate.num_speculative_tokens to {tokens}, or export the drafter with another value."
        )
    if named != verifier.source and Path(named).resolve() != verifier.path.resolve():
        raise CheckpointError(
            f"{file} names the verifier {named!r}; this evaluation is for {str(verifier.path)!r}. Correct"
            " speculators_config.verifier.name_or_path, or configure the verifier that the drafter was made for."
        )


@dataclass
class _Evaluation:
    """One evaluation while it runs."""

    config: RetrainConfig
    plan: StagePlan
    drafter_dir: Path
    store: Store
    verifier: Verifier
    progress: Progress
    prompts: list[EvaluationPrompt]
    limits: dict[str, int]
    too_long: int

    @classmethod
    def open(
        cls,
        config: RetrainConfig,
        plan: StagePlan,
        prepare_plan: StagePlan,
        drafter_dir: Path,
        store: Store,
        verifier: Verifier,
        progress: Progress,
    ) -> _Evaluation:
        held_out = load_held_out(store, prepare_plan)[: config.evaluate.max_prompts]
        limits = {
            prompt.sample_id: max_new_tokens(
                len(prompt.prompt_token_ids),
                config.evaluate.max_tokens,
                config.evaluate.num_speculative_tokens,
                config.serving.max_model_len,
            )
            for prompt in held_out
        }
        prompts = [prompt for prompt in held_out if limits[prompt.sample_id] > 0]
        if not prompts:
            raise DataError(
                f"None of the {len(held_out)} held-out prompts leaves room for an answer within serving.max_model_len"
                f" ({config.serving.max_model_len}). Raise it, or use shorter prompts."
            )
        if len(prompts) < len(held_out):
            logger.warning(
                "%d of %d held-out prompts leave no room for an answer within serving.max_model_len (%d): left out.",
                len(held_out) - len(prompts),
                len(held_out),
                config.serving.max_model_len,
            )
        too_long = len(held_out) - len(prompts)
        return cls(config, plan, drafter_dir, store, verifier, progress, prompts, limits, too_long)

    @property
    def groups(self) -> list[list[EvaluationPrompt]]:
        """The prompts that the reference decoder repeats, then the others: vLLM counts each group by itself."""
        count = self.config.evaluate.reference_prompts
        split = len(self.prompts) if count is None else count
        return [group for group in (self.prompts[:split], self.prompts[split:]) if group]

    def part(self, name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of one part: from the store if it finished before, else made now and kept."""
        path = self.plan.path(f"{_PARTIAL}/{name}.json")
        if self.store.exists(path):
            logger.info("Evaluation: %s is taken from the interrupted run.", name.replace("_", " "))
        else:
            self.store.write_json(path, run())
        value: dict[str, Any] = self.store.read_json(path)
        return value

    def run_with_drafter(self) -> dict[str, Any]:
        """Greedy answers and counters of vLLM with the drafter, loaded from its folder alone (see :func:`servable`)."""
        env: dict[str, str] = {}
        if self.config.train.method in _NEEDS_TRITON and self.config.serving.device == "cpu":
            env = triton_interpreter(self.config.serving)
            logger.warning(
                "vLLM runs %s with Triton kernels, which are interpreted on a CPU: a few tokens a second. The"
                " acceptance is right, the throughput says nothing.",
                self.config.train.method,
            )
        served = servable(self.drafter_dir, self.verifier, Path(self.config.work_dir) / "cache")
        with self._server(served.model, "vllm-with-drafter", served.arguments, env) as server:
            run = self._measure(server, "With the drafter")
            return {
                "run": run.to_json(),
                "command": _shown(server.command),
                "vllm_version": _vllm_version(server.url),
            }

    def run_without_drafter(self) -> dict[str, Any]:
        """Greedy answers of vLLM alone, and what it thinks of the tokens where both answers part."""
        with_drafter = ServerRun.from_json(self.store.read_json(self.plan.path(f"{_PARTIAL}/with_drafter.json"))["run"])
        with self._server(self.verifier.path, "vllm-without-drafter") as server:
            run = self._measure(server, "Without the drafter")
            divergences = asyncio.run(
                find_divergences(
                    server.url,
                    self.prompts,
                    with_drafter.outputs,
                    run.outputs,
                    self.config.evaluate.near_tie_logprob,
                    self.config.regenerate.request_timeout_s,
                    self.config.regenerate.max_retries,
                )
            )
            return {
                "run": run.to_json(),
                "divergences": [dataclasses.asdict(divergence) for divergence in divergences],
                "command": _shown(server.command),
                "vllm_version": _vllm_version(server.url),
            }

    def run_reference(self, expected: Mapping[str, Sequence[int]]) -> dict[str, ReferenceResult]:
        """The reference decoder's results by sample; those of an interrupted run are kept.

        Args:
            expected: vLLM's answers by sample, which the reference decoder checks instead of guessing.
        """
        count = self.config.evaluate.reference_prompts
        prompts = self.prompts if count is None else self.prompts[:count]
        path = self.plan.path(f"{_PARTIAL}/reference.json")
        known = self.store.read_json(path) if self.store.exists(path) else {}
        results = {sample_id: ReferenceResult(**value) for sample_id, value in known.items()}
        missing = [prompt for prompt in prompts if prompt.sample_id not in results]
        if missing:

            def save() -> None:
                self.store.write_json(path, {key: dataclasses.asdict(value) for key, value in results.items()})

            decode_prompts(
                self.verifier,
                self.config.verifier.trust_remote_code,
                self.drafter_dir,
                missing,
                self.limits,
                expected,
                self.config.evaluate.num_speculative_tokens,
                self.config.serving.device,
                self.progress,
                results,
                save,
            )
        return results

    @contextmanager
    def _server(
        self, model: Path, name: str, arguments: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> Iterator[VllmServer]:
        """A running server; when a request fails because the server died, the error says why it died."""
        work_dir, extra = Path(self.config.work_dir), [*_SERVER_ARGS, *arguments]
        with VllmServer(self.config.serving, model, work_dir, name=name, extra_args=extra, env=env) as server:
            try:
                yield server
            except ServingError:
                server.check_alive()
                raise

    def _measure(self, server: VllmServer, description: str) -> ServerRun:
        return asyncio.run(
            measure(
                server.url,
                self.groups,
                self.limits,
                self.config.evaluate.concurrency,
                self.config.regenerate.request_timeout_s,
                self.config.regenerate.max_retries,
                self.progress,
                description,
            )
        )


def _server_results(run: ServerRun, part: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": part["command"],
        "seconds": run.seconds,
        "generated_tokens": run.generated_tokens,
        "tokens_per_s": run.tokens_per_s,
        "disturbances": run.disturbances,
        "acceptance": run.acceptance.figures() if run.acceptance.drafts else None,
    }


def _shown(command: list[str]) -> str:
    """A server's command as one would type it; the interpreter's place on this machine says nothing elsewhere."""
    return shlex.join(["python", *command[1:]])


def _vllm_version(url: str) -> str:
    with urllib.request.urlopen(f"{url}/version", timeout=30) as answer:
        return str(json.load(answer)["version"])


def _warn(figures: dict[str, Any]) -> None:
    """Say loudly what does not fit together, with the usual causes."""
    difference = figures.get("reference_relative_difference")
    if difference is not None and abs(difference) > _REFERENCE_TOLERANCE:
        logger.warning(
            "The reference decoder's acceptance length differs from vLLM's by %+.1f%% on the same prompts. In float32"
            " they agree: check the layer ids, RoPE parameters and vocabulary mapping in the drafter's config.json; in"
            " a 16-bit serving.dtype, outputs that part explain small differences.",
            100 * difference,
        )
    gap = figures.get("training_gap")
    if gap is not None and abs(gap) > _TRAINING_TOLERANCE:
        logger.warning(
            "Acceptance length in vLLM is %+.1f%% against what training's validation predicted. Likely causes: few"
            " validation or held-out prompts, or the two unlike each other; answers in training that the verifier did"
            " not generate itself, or generated with another chat template or dtype; drafts in serving start where the"
            " one before failed, at harder places than the average.",
            100 * gap,
        )
    if figures["not_near_tie"]:
        logger.warning(
            "%d of %d greedy outputs differ from plain decoding where the verifier sees no near-tie: see %s.",
            figures["not_near_tie"],
            figures["held_out_prompts"],
            RESULTS,
        )
