"""Training states: written atomically, found again, refused when damaged or foreign."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from speculators.store import Store
from speculators.training.state import MetricsLog, Standing, StateStore, capture, restore

FINGERPRINT = "00112233aabbccdd"
FOLDER = f"checkpoints/{FINGERPRINT}/state"


@pytest.fixture
def states(store: Store) -> StateStore:
    return StateStore(store, FOLDER, FINGERPRINT)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"parameter.weight": torch.full((3, 2), value), "rng.cpu": torch.get_rng_state()}


def test_nothing_saved_is_no_state(states: StateStore) -> None:
    assert states.latest() is None


def test_a_state_comes_back_exactly(states: StateStore) -> None:
    best = {"step": 7, "epoch": 1, "predicted_acceptance_length": 1.1 + 2.2}
    standing = Standing(step=9, epoch=2, position=3, best=best, window=[[0.1 + 0.2, 1e-17]], tokens=5)
    states.save(standing, tensors(0.1))
    record = states.latest()
    assert record is not None
    assert record.standing == standing
    loaded = states.load(record)
    assert torch.equal(loaded["parameter.weight"], torch.full((3, 2), 0.1))
    assert torch.equal(loaded["rng.cpu"], torch.get_rng_state())


def test_older_states_are_removed_after_the_pointer_is_written(
    states: StateStore, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    states.save(Standing(step=1), tensors(1.0))
    written: list[str] = []
    monkeypatch.setattr(store, "delete", lambda path: written.append(f"delete {path.rsplit('/', 1)[1]}"))
    write_bytes = store.write_bytes

    def record_write(path: str, data: bytes) -> None:
        written.append(path.rsplit("/", 1)[1])
        write_bytes(path, data)

    monkeypatch.setattr(store, "write_bytes", record_write)
    states.save(Standing(step=2), tensors(2.0))
    assert written[:3] == ["step-00000002.safetensors", "step-00000002.json", "latest.json"]
    assert sorted(written[3:]) == ["delete step-00000001.json", "delete step-00000001.safetensors"]


def test_only_the_newest_state_stays(states: StateStore, store: Store) -> None:
    for step in (1, 2, 3):
        states.save(Standing(step=step), tensors(step))
    names = [path.rsplit("/", 1)[1] for path in store.list(FOLDER)]
    assert names == ["latest.json", "step-00000003.json", "step-00000003.safetensors"]


def test_a_save_that_fails_keeps_the_state_before(
    states: StateStore, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    states.save(Standing(step=1), tensors(1.0))
    write_bytes = store.write_bytes

    def fail_at_pointer(path: str, data: bytes) -> None:
        if path.endswith("latest.json"):
            raise OSError("no space left")
        write_bytes(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_bytes", fail_at_pointer)
        with pytest.raises(OSError, match="no space"):
            states.save(Standing(step=2), tensors(2.0))
    record = states.latest()
    assert record is not None
    assert record.standing.step == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_state_is_passed_over_with_a_warning(
    states: StateStore, store: Store, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = states.save(Standing(step=4), tensors(4.0))
    file = Path(store.full_path(f"{FOLDER}/{record.file}"))
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-5])
    else:
        file.unlink()
    with caplog.at_level(logging.WARNING):
        assert states.latest() is None
    assert record.file in caplog.text
    assert "is not used" in caplog.text


def test_the_state_before_a_damaged_one_is_taken_if_it_is_still_there(
    states: StateStore, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    states.save(Standing(step=1), tensors(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", lambda path: None)
        record = states.save(Standing(step=2), tensors(2.0))
    Path(store.full_path(f"{FOLDER}/{record.file}")).write_bytes(b"rubbish")
    found = states.latest()
    assert found is not None
    assert found.standing.step == 1
    assert torch.equal(states.load(found)["parameter.weight"], torch.full((3, 2), 1.0))


def test_a_broken_pointer_is_survived(states: StateStore, store: Store) -> None:
    states.save(Standing(step=5), tensors(5.0))
    store.write_bytes(f"{FOLDER}/latest.json", b'{"format": 1, "fi')
    record = states.latest()
    assert record is not None
    assert record.standing.step == 5


def test_a_state_of_another_training_is_refused(
    states: StateStore, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    states.save(Standing(step=5), tensors(5.0))
    with caplog.at_level(logging.WARNING):
        assert StateStore(store, FOLDER, "ffff").latest() is None
    assert f"it belongs to the training {FINGERPRINT}, not ffff" in caplog.text


def test_parameters_and_moments_go_on_bit_for_bit() -> None:
    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, torch.nn.Parameter]]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(5, 3)
        return model, torch.optim.AdamW(model.parameters(), fused=True), dict(model.named_parameters())

    model, optimizer, parameters = build(0)
    steps(model, optimizer, 3)
    saved = {name: tensor.clone() for name, tensor in capture(parameters, optimizer).items()}
    steps(model, optimizer, 4)

    resumed, resumed_optimizer, resumed_parameters = build(1)
    restore(saved, resumed_parameters, resumed_optimizer)
    steps(resumed, resumed_optimizer, 4)
    assert torch.equal(model.weight, resumed.weight)
    assert torch.equal(model.bias, resumed.bias)


def test_metrics_past_the_state_are_cut_off(store: Store) -> None:
    log = MetricsLog(store, "checkpoints/x/metrics.jsonl")
    for step in (5, 10, 15):
        log.append({"step": step, "loss": 1 / step})
    log.write()
    resumed = MetricsLog(store, "checkpoints/x/metrics.jsonl")
    resumed.resume(step=10)
    assert resumed.records == [{"step": 5, "loss": 0.2}, {"step": 10, "loss": 0.1}]
    fresh = MetricsLog(store, "checkpoints/x/metrics.jsonl")
    fresh.resume(step=0)
    assert fresh.records == []
