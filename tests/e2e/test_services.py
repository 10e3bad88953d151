"""The whole flow with the store on S3, and MLflow and Prefect as separate servers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import mlflow
import pytest
import s3fs

from speculators.config import RetrainConfig
from speculators.manifest import STAGE_FOLDERS, Stage
from tests.conftest import free_port, s3_environment
from tests.e2e.conftest import TINY, FlowProcess

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]
MODEL = "smollm2-135m-instruct-eagle3"


@dataclass
class Services:
    """Where the servers are, and how to run the flow against them."""

    mlflow_uri: str
    prefect_api: str
    s3: s3fs.S3FileSystem
    bucket: str
    run: Callable[..., FlowProcess]


@pytest.fixture(scope="module")
def services(
    start_service: Callable[..., None],
    start_flow: Callable[..., FlowProcess],
    s3_endpoint: str,
    prefect_api: str,
    tmp_path_factory: pytest.TempPathFactory,
    verifier: object,
) -> Services:
    """MLflow server, S3 server and Prefect server, all over HTTP."""
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    folder = tmp_path_factory.mktemp("mlflow")
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    start_service("mlflow", command, f"{uri}/health")
    environment = s3_environment(s3_endpoint)
    s3 = s3fs.S3FileSystem(
        key=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=s3_endpoint,
        use_listings_cache=False,
    )
    bucket = f"drafters-{time.monotonic_ns()}"
    s3.mkdir(bucket)

    def run(**sections: Any) -> FlowProcess:
        config = {**TINY, "store": f"s3://{bucket}/retraining", **sections}
        return start_flow(config, {**environment, "MLFLOW_TRACKING_URI": uri})

    return Services(uri, prefect_api, s3, bucket, run)


@pytest.fixture(scope="module")
def first(services: Services) -> str:
    """Output of the first retraining."""
    flow = services.run()
    assert flow.wait() == 0, flow.output()[-6000:]
    return flow.output()


def test_summary_says_what_was_made(first: str) -> None:
    for part in (
        "Acceptance length (vLLM, held-out prompts)",
        "Serve it:",
        "Drafter:",
        f"{MODEL} version 1, alias champion",
    ):
        assert part in first


def test_every_stage_left_its_manifest_in_s3(services: Services, first: str) -> None:
    found = {}
    for path in services.s3.find(f"{services.bucket}/retraining"):
        if path.endswith("manifest.json"):
            manifest = json.loads(services.s3.cat_file(path))
            found[manifest["stage"]] = (manifest, path)
    assert set(found) == {stage.value for stage in Stage}
    for stage, (manifest, path) in found.items():
        assert f"/{STAGE_FOLDERS[Stage(stage)]}/{manifest['fingerprint']}/" in path
        for name, facts in manifest["outputs"].items():
            assert services.s3.size(f"{path.rpartition('/')[0]}/{name}") == facts["bytes"]


def test_evaluation_is_consistent(services: Services, first: str) -> None:
    [path] = services.s3.glob(f"{services.bucket}/retraining/evaluations/*/manifest.json")
    figures = json.loads(services.s3.cat_file(path))["figures"]
    accepted = sum(figures["per_position_acceptance"])
    assert figures["acceptance_length"] == pytest.approx(1 + accepted, abs=1e-6)
    assert figures["acceptance_length"] > 1.0
    assert figures["reference_relative_difference"] == pytest.approx(0, abs=0.03)
    assert figures["divergences"] == figures["near_ties"]


def test_mlflow_has_parent_children_artifacts_and_version(services: Services, first: str) -> None:
    client = mlflow.MlflowClient(tracking_uri=services.mlflow_uri, registry_uri=services.mlflow_uri)
    experiment = client.get_experiment_by_name(RetrainConfig().tracking.experiment)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], order_by=["start_time ASC"])
    parent = next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    children = {r.data.tags["stage"]: r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id}
    assert set(children) == {stage.value for stage in Stage}
    assert {run.info.status for run in [parent, *children.values()]} == {"FINISHED"}
    assert parent.data.params["train.method"] == "eagle3"
    assert parent.data.metrics["acceptance_length"] > 1.0

    steps = client.get_metric_history(children["train"].info.run_id, "loss")
    assert len({metric.step for metric in steps}) > 2

    artifacts = {a.path for a in client.list_artifacts(children["export"].info.run_id, "drafter")}
    assert {"drafter/config.json", "drafter/model.safetensors"} <= artifacts
    assert "acceptance.png" in {a.path for a in client.list_artifacts(children["evaluate"].info.run_id)}

    version = client.get_model_version_by_alias(MODEL, "champion")
    assert str(version.version) == "1"
    assert float(version.tags["acceptance_length"]) == pytest.approx(parent.data.metrics["acceptance_length"], abs=1e-3)


def test_prefect_saw_every_task(services: Services, first: str) -> None:
    task_runs = httpx.post(f"{services.prefect_api}/task_runs/filter", json={"limit": 200}).json()
    names = {run["name"].rsplit("-", 1)[0] for run in task_runs if run["state"]["type"] == "COMPLETED"}
    assert {"set-up", *(stage.value for stage in Stage), "promote", "report"} <= names
    artifacts = httpx.post(f"{services.prefect_api}/artifacts/filter", json={"limit": 200}).json()
    assert {"markdown", "progress"} <= {artifact["type"] for artifact in artifacts}


def test_no_secret_leaks(services: Services, first: str) -> None:
    secret = "test-secret-key"
    assert secret not in first
    client = mlflow.MlflowClient(tracking_uri=services.mlflow_uri)
    experiment = client.get_experiment_by_name(RetrainConfig().tracking.experiment)
    assert experiment is not None
    for run in client.search_runs([experiment.experiment_id]):
        assert secret not in str(run.data.to_dictionary())
    for path in services.s3.find(f"{services.bucket}/retraining"):
        if path.endswith(".json"):
            assert secret.encode() not in services.s3.cat_file(path)


def test_second_run_skips_every_stage_and_keeps_the_version(services: Services, first: str) -> None:
    started = time.monotonic()
    flow = services.run()
    assert flow.wait() == 0, flow.output()[-6000:]
    assert time.monotonic() - started < 120
    assert flow.output().count("| skipped |") == len(Stage)
    assert "vLLM is starting" not in flow.output()
    client = mlflow.MlflowClient(tracking_uri=services.mlflow_uri, registry_uri=services.mlflow_uri)
    assert len(client.search_model_versions(f"name='{MODEL}'")) == 1


def test_a_worse_drafter_becomes_challenger(services: Services, first: str, tmp_path: Path) -> None:
    """A tiny learning rate cannot beat the champion; it is compared on the same prompts.

    Its hidden states are stored in another dtype, made while it trains by a vLLM that the flow starts, and deleted
    once it has been trained."""
    hybrid = {**TINY["extract"], "dtype": "bfloat16", "mode": "hybrid"}
    flow = services.run(
        train={**TINY["train"], "epochs": 2, "learning_rate": 1e-7},
        extract=hybrid,
        retention={"after_training": "delete"},
    )
    assert flow.wait() == 0, flow.output()[-6000:]
    sets = f"{services.bucket}/retraining/hidden_states"
    assert len(services.s3.glob(f"{sets}/*/manifest.json")) == 1, "the champion's"
    assert len(services.s3.glob(f"{sets}/*/retired.json")) == 1
    assert len({path.split("/")[3] for path in services.s3.find(sets) if path.endswith(".safetensors")}) == 1
    assert not services.s3.find(f"{services.bucket}/retraining/online")
    assert "Acceptance length of the champion before" in flow.output()
    assert f"{MODEL} version 2, alias challenger" in flow.output()
    client = mlflow.MlflowClient(tracking_uri=services.mlflow_uri, registry_uri=services.mlflow_uri)
    assert str(client.get_model_version_by_alias(MODEL, "champion").version) == "1"
    assert str(client.get_model_version_by_alias(MODEL, "challenger").version) == "2"
