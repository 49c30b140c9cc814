"""What the service saved and finds damaged is not used: whoever needs it is told which file, and whose fault it is."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.process.watchdog import observing, open_activities
from support.tinker_sdk import ADAM, DATA, loss_of, prompt, sampling, tinker
from support.tinker_server import BASE, Served, served


def flip(file: Path) -> None:
    """Alter one bit in the middle of a file."""
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 4
    file.write_bytes(whole)


def trained(client: Any) -> Any:
    model = client.create_lora_training_client(base_model=BASE, rank=4)
    model.forward_backward(DATA, "cross_entropy").result()
    model.optim_step(ADAM).result()
    return model


def test_a_damaged_state_is_named_and_used_again_once_it_is_put_back(tmp_path: Path) -> None:
    with served(tmp_path) as running:
        model = trained(running.client())
        loss, id = loss_of(model), model._guaranteed_model_id()
        running.closers.clear()
    (state,) = (tmp_path / "states").glob("*/*")
    flip(state / "table.npz")
    with served(tmp_path) as again:
        http = again.http()

        def forward(seq: int) -> Any:
            body = {"model_id": id, "seq_id": seq, "path": f"at-{seq}"}
            told = http.post("/api/v1/save_weights", json=body).json()["request_id"]
            return http.post("/api/v1/retrieve_future", json={"request_id": told}).json()

        refused = forward(4)
        assert "table.npz does not match its SHA-256" in refused["error"]
        assert refused["category"] == "server"
        assert str(tmp_path) not in refused["error"]
        flip(state / "table.npz")
        assert forward(5)["path"].endswith("/at-5")
        assert loss_of(again.client().create_training_client_from_state(f"tinker://{id}/weights/at-5")) == loss


def test_a_damaged_checkpoint_is_not_loaded_copied_sampled_or_sent(
    server: Served, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = asyncio.sleep  # errors of the server's are answered after a second
    monkeypatch.setattr(asyncio, "sleep", lambda delay, *more: real(0.01 if 0.5 < delay <= 1 else delay, *more))
    model = trained(client)
    path = model.save_state("kept").result().path
    named = model.save_weights_for_sampler("kept").result().path
    for folder in (server.folder / "checkpoints").iterdir():
        flip(folder / "table.npz")
    for use in (
        lambda: model.load_state(path).result(),
        lambda: client.create_training_client_from_state(path),
        lambda: client.create_sampling_client(model_path=named).sample(prompt(1), 1, sampling()).result(),
    ):
        with pytest.raises(tinker.RequestFailedError, match=r"table\.npz does not match its SHA-256") as failure:
            use()
        assert failure.value.category == tinker.types.RequestErrorCategory.Server
    http, run = server.http(), path.removeprefix("tinker://").split("/")[0]
    link = f"/api/v1/training_runs/{run}/checkpoints/weights/kept"
    urls = http.get(f"{link}/external_weights_urls").json()["urls"]
    for refused in (
        http.post("/api/v1/copy_weights", json={"source_path": path}),
        http.get(f"{link}/archive", follow_redirects=True),
        http.get(urls["table.npz"]),
    ):
        assert (refused.status_code, "table.npz does not match" in refused.json()["detail"]) == (500, True)
        assert str(server.folder) not in refused.text
    assert http.get(urls["fake.json"]).status_code == 200  # the other files are whole


def test_a_damaged_snapshot_is_not_sampled_after_a_restart(tmp_path: Path) -> None:
    with served(tmp_path) as running:
        sampler = trained(running.client()).save_weights_and_get_sampling_client()._sampling_session_id
        running.closers.clear()
    (snapshot,) = (tmp_path / "snapshots").iterdir()
    flip(snapshot / "table.npz")
    with served(tmp_path) as again:
        http = again.http()
        body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
        id = http.post("/api/v1/asample", json=body).json()["request_id"]
        outcome = http.post("/api/v1/retrieve_future", json={"request_id": id}).json()
        assert "table.npz does not match" in outcome["error"]


def test_reading_of_files_is_watched(server: Served, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = trained(client).save_state("kept").result().path
    during: list[str] = []
    monkeypatch.setattr(
        "headrace.service.store.checkpoint_folders.check_folder", lambda *_, **__: during.extend(open_activities())
    )
    assert server.http().post("/api/v1/copy_weights", json={"source_path": path}).status_code == 200
    assert f"checking the files of {path}" in during


def test_whatever_waits_for_the_disk_is_watched(server: Served, client: Any) -> None:
    begun: list[str] = []
    model, http = trained(client), server.http()
    with observing(lambda what, change: begun.append(what)):
        path = model.save_state("kept").result().path
        sampler = model.save_weights_and_get_sampling_client()._sampling_session_id
        copy = http.post("/api/v1/copy_weights", json={"source_path": path}).json()["tinker_path"]
        run, _, rest = copy.removeprefix("tinker://").partition("/")
        one = f"/api/v1/training_runs/{run}/checkpoints/{rest}"
        assert http.get(f"{one}/archive", follow_redirects=True).status_code == 200
        assert http.get(f"{one}/external_weights_urls").status_code == 200
        http.delete(one).raise_for_status()
    expected = {
        f"measuring what was saved as {path}",
        f"the fingerprint of {sampler}",
        f"copying {path}",
        f"packing the files of {copy}",
        f"listing the files of {copy}",
    }
    assert expected <= set(begun)
    assert any(what.startswith("removing checkpoints") for what in begun)


def test_a_disk_that_cannot_be_read_is_called_that(
    server: Served, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> str:
        raise OSError(5, "Input/output error")

    model = trained(client)
    path = model.save_state("kept").result().path
    with monkeypatch.context() as patch:
        patch.setattr("headrace.storage.whole_folder.sha256_of", broken)
        with pytest.raises(tinker.RequestFailedError, match="no sign of damage"):
            client.create_training_client_from_state(path)
    assert client.create_training_client_from_state(path) is not None
