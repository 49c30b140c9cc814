"""Saves of one name that follow each other at once: one of them holds the name, and no folder is left over."""

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import BackendError
from headrace.service.host.fake_host import FakeHost
from support.tinker_sdk import Gate
from support.tinker_server import BASE, Served, served


def save_at_once(running: Served, gate: Gate, bodies: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The run, and the outcomes of saves that were all queued before the first one ran."""
    http = running.http()
    session = http.post("/api/v1/create_session", json={}).json()["session_id"]
    model = f"{session}:train:0"
    http.post("/api/v1/create_model", json={"session_id": session, "model_seq_id": 0, "base_model": BASE})
    http.post("/api/v1/retrieve_future", json={"request_id": f"{model}:0"})
    gate.close()
    for seq, body in enumerate(bodies, start=1):
        kind = body.pop("kind", "save_weights")
        reply = http.post(f"/api/v1/{kind}", json={"model_id": model, "seq_id": seq, **body})
        assert reply.status_code == 200
    gate.open()
    ids = [f"{model}:{seq}" for seq in range(1, len(bodies) + 1)]
    return model, [http.post("/api/v1/retrieve_future", json={"request_id": id}).json() for id in ids]


def folders(running: Served, kind: str) -> set[str]:
    return {str(path.relative_to(running.folder)) for path in (running.folder / kind).iterdir()}


def test_of_saves_of_one_name_the_first_one_counts(tmp_path: Path) -> None:
    gate = Gate()
    with served(tmp_path, host=FakeHost(hold=gate)) as running:
        _, outcomes = save_at_once(running, gate, [{"path": "a"}, {"path": "a"}, {"path": "b"}, {"path": "a"}])
        assert ["error" in outcome for outcome in outcomes] == [False, True, False, True]
        assert "is there already" in outcomes[1]["error"]
        kept = {checkpoint.folder for checkpoint in running.service.registry.checkpoints.values()}
        assert len(kept) == 2
        assert folders(running, "checkpoints") == kept


def test_of_overwriting_saves_the_last_one_counts(tmp_path: Path) -> None:
    gate = Gate()
    with served(tmp_path, host=FakeHost(hold=gate)) as running:
        model, outcomes = save_at_once(running, gate, [{"path": "a", "overwrite": True}] * 4)
        assert not any("error" in outcome for outcome in outcomes)
    with served(tmp_path) as running:  # the journal says the same, and folders that were marked are gone
        (checkpoint,) = running.service.registry.checkpoints.values()
        assert checkpoint.path == f"tinker://{model}/weights/a"
        assert folders(running, "checkpoints") == {checkpoint.folder}
        assert running.service.checkpoints.stored_bytes("alice") == checkpoint.size_bytes


def test_a_snapshots_number_is_taken_once(tmp_path: Path) -> None:
    gate = Gate()
    with served(tmp_path, host=FakeHost(hold=gate)) as running:
        one = {"kind": "save_weights_for_sampler", "sampling_session_seq_id": 7}
        _, outcomes = save_at_once(running, gate, [dict(one), dict(one)])
        assert ["error" in outcome for outcome in outcomes] == [False, True]
        assert len(folders(running, "snapshots")) == 1


def test_a_save_that_fails_gives_its_name_back(tmp_path: Path) -> None:
    class FullDisk(FakeHost):
        def save(self, model: str, folder: Path, *, optimizer: bool) -> Any:
            if "checkpoints" in folder.parts and not failed:
                failed.append(folder)
                return self._submit("save", lambda: (_ for _ in ()).throw(BackendError("the disk is full")))
            return FakeHost.save(self, model, folder, optimizer=optimizer)

    failed: list[Path] = []
    with served(tmp_path, host=FullDisk()) as running:
        model = running.client().create_lora_training_client(base_model=BASE, rank=4)
        with pytest.raises(Exception, match="disk is full"):
            model.save_state("a").result()
        assert model.save_state("a").result().path.endswith("/weights/a")
        assert len(folders(running, "checkpoints")) == 1
