"""A server that was killed leaves nothing behind for good, and the next one removes nothing that is somebody's."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.service.store.checkpoint_folders import CheckpointFolders
from headrace.service.store.cleanup import GOING, clear_leftovers
from headrace.service.store.entities import folder_name
from headrace.service.store.journal import Journal
from headrace.service.store.registry import Registry
from support.tinker_sdk import ADAM, DATA, prompt, sampling
from support.tinker_server import BASE, served


def made(folder: Path) -> tuple[str, str, str]:
    """A model with a state, a snapshot and a checkpoint on disk: its id, the snapshot's and the checkpoint's path."""
    with served(folder) as running:
        model = running.client().create_lora_training_client(base_model=BASE, rank=4)
        model.forward_backward(DATA, "cross_entropy").result()
        model.optim_step(ADAM).result()
        path = model.save_state("kept").result().path
        sampler = model.save_weights_and_get_sampling_client()
        running.closers.clear()  # no client says goodbye
        return model._guaranteed_model_id(), sampler._sampling_session_id, path


def change(folder: Path, edit: Any) -> None:
    journal = Journal(str(folder / "journal.sqlite"))
    registry = Registry(journal)
    journal.write([registry.keep(edit(registry)).statement]).result()
    journal.close()


def test_what_is_half_written_or_replaced_goes_and_the_rest_stays(tmp_path: Path) -> None:
    model, sampler, path = made(tmp_path)
    states = tmp_path / "states" / folder_name(model)
    (state,) = states.iterdir()
    (snapshot,) = (tmp_path / "snapshots").iterdir()
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    gone = [
        states / ".writing-1-000000000009",
        states / "000000000001",
        tmp_path / "snapshots" / ".writing-2-x",
        tmp_path / "checkpoints" / ".copying-3",
        tmp_path / "checkpoints" / f".replaced-4-{checkpoint.name}",
    ]
    strange = [
        tmp_path / "states" / "of-another" / "000000000001",
        tmp_path / "checkpoints" / "of-another",
        states / "000000000099",  # of a request that this journal lacks
    ]
    for each in (*gone, *strange):
        each.mkdir(parents=True)
    snapshot.rename(snapshot.with_name(f".replaced-5-{snapshot.name}"))  # killed between two renames
    with served(tmp_path) as again:
        assert again.http().get("/api/v1/healthz").status_code == 200  # it answers when it has begun
        assert not any(each.exists() for each in gone)
        assert all(each.exists() for each in (state, snapshot, checkpoint, *strange))
        client = again.client()
        client.create_training_client_from_state(path)
        asked = {"sampling_session_id": sampler, "seq_id": 7, "prompt": {"chunks": [{"tokens": [1]}]}}
        assert again.http().post("/api/v1/asample", json=asked).status_code == 200
        client.create_sampling_client(base_model=BASE).sample(prompt(1), 1, sampling()).result()


def test_checkpoints_that_were_replaced_or_deleted_as_the_server_was_killed_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(store: CheckpointFolders, folder: str) -> None:
        """Before it came to removing the folder."""

    with served(tmp_path) as running:
        model = running.client().create_lora_training_client(base_model=BASE, rank=4)
        for name in ("kept", "gone"):
            model.save_state(name).result()
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointFolders, "remove_marked", killed)
            path = model.save_state("kept", overwrite=True).result().path
            run, kind, name = path.replace("kept", "gone").removeprefix("tinker://").split("/")
            deleted = running.http().delete(f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}")
            assert deleted.status_code < 300
        kept = tmp_path / running.service.registry.checkpoints[path].folder
        running.closers.clear()
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3
    with served(tmp_path) as again:
        assert again.http().get("/api/v1/healthz").status_code == 200
        assert list((tmp_path / "checkpoints").iterdir()) == [kept]
        assert again.client().create_training_client_from_state(path) is not None
        again.closers.clear()
    assert going(tmp_path) == {}
    journal = Journal(str(tmp_path / "journal.sqlite"))
    clear_leftovers(tmp_path, Registry(journal), [str(kept.relative_to(tmp_path))])
    journal.close()
    assert kept.exists()  # whatever is said of it, a checkpoint needs it


def test_a_replaced_checkpoint_that_is_gone_is_not_remembered(tmp_path: Path) -> None:
    with served(tmp_path) as running:
        model = running.client().create_lora_training_client(base_model=BASE, rank=4)
        for _ in range(3):
            model.save_state("kept", overwrite=True).result()
        while going(tmp_path):  # it is told before the old folder goes
            time.sleep(0.01)
        assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def going(folder: Path) -> dict[str, Any]:
    journal = Journal(str(folder / "journal.sqlite"))
    found = journal.records(GOING)
    journal.close()
    return found


def test_snapshots_of_a_session_that_ended_as_the_server_was_killed_go(tmp_path: Path) -> None:
    model, sampler, path = made(tmp_path)
    session = model.split(":")[0]
    change(tmp_path, lambda registry: replace(registry.sessions[session], finished="success"))
    with served(tmp_path) as again:
        assert again.http().get("/api/v1/healthz").status_code == 200
        assert list((tmp_path / "snapshots").iterdir()) == []
        assert sampler not in again.service.registry.samplers
        assert (
            again.client().create_training_client_from_state(path) is not None
        )  # what was saved by name is still there
        again.closers.clear()
    journal = Journal(str(tmp_path / "journal.sqlite"))
    assert sampler not in Registry(journal).samplers
    journal.close()


def test_the_folder_of_a_retired_snapshot_goes_and_its_record_says_why(tmp_path: Path) -> None:
    _, sampler, _ = made(tmp_path)
    change(tmp_path, lambda registry: replace(registry.samplers[sampler], gone="newer ones came"))
    journal = Journal(str(tmp_path / "journal.sqlite"))
    registry = Registry(journal)
    assert clear_leftovers(tmp_path, registry) == []
    assert list((tmp_path / "snapshots").iterdir()) == []
    assert registry.samplers[sampler].gone == "newer ones came"
    journal.close()
