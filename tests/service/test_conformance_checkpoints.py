"""The unmodified public SDK saves, loads, lists and deletes; its command line lists what is there."""

import io
import tarfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from headrace.storage.whole_folder import verify
from support.tinker_sdk import ADAM, DATA, loss_of, tinker
from support.tinker_server import BASE, KEY, OTHER_KEY, Served, served


def train(model: Any, steps: int = 2) -> float:
    """How many updates the model has had then."""
    for _ in range(steps):
        model.forward_backward(DATA, "cross_entropy")
        step = model.optim_step(ADAM)
    return float(step.result().metrics["num_updates:max"])


@pytest.fixture
def rest(server: Served) -> Any:
    return tinker.RestClient(base_url=server.url, api_key=KEY)


def test_a_resume_with_the_optimiser_is_exact_and_without_it_is_fresh(client: Any, training: Any) -> None:
    train(training)
    path = training.save_state("half").result().path
    exact = client.create_training_client_from_state_with_optimizer(path)
    fresh = client.create_training_client_from_state(path)
    assert loss_of(exact) == loss_of(fresh) == loss_of(training)
    updates = [train(model) for model in (training, exact, fresh)]
    assert loss_of(exact) == loss_of(training) != loss_of(fresh)
    assert updates == [4, 4, 2]  # without the optimiser its moments started anew


def test_a_model_may_be_created_by_loading(tmp_path: Path) -> None:
    with served(tmp_path, flags={"create_model_via_load_weights": True}) as running:
        client = running.client()
        model = client.create_lora_training_client(base_model=BASE, rank=8)
        train(model)
        path = model.save_state("half").result().path
        twin = client.create_training_client_from_state_with_optimizer(path)
        train(model)
        train(twin)
        assert loss_of(twin) == loss_of(model)
        assert twin.get_info().lora_rank == 8
        assert sum(verb.startswith("create ") for verb in running.host.log) == 2


def test_a_name_is_used_once_unless_overwritten(training: Any) -> None:
    first = training.save_state("same").result().path
    with pytest.raises(tinker.RequestFailedError, match="there already"):
        training.save_state("same").result()
    train(training)
    assert training.save_state("same", overwrite=True).result().path == first
    assert training.save_weights_for_sampler("same").result().path != first  # another kind, another namespace


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "..", ".hidden", "", "x" * 200, "a\x00b"])
def test_a_name_that_could_be_a_path_is_refused(training: Any, name: str) -> None:
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint name"):
        training.save_state(name).result()
    assert loss_of(training) > 0  # the next request runs


def test_checkpoints_are_listed_published_timed_and_deleted(server: Served, rest: Any, training: Any) -> None:
    run = training._guaranteed_model_id()
    state = training.save_state("final", ttl_seconds=7200, user_metadata={"note": "x"}).result().path
    sampler = training.save_weights_for_sampler("final").result().path
    listed = {found.tinker_path: found for found in rest.list_checkpoints(run).result().checkpoints}
    assert set(listed) == {state, sampler}
    assert (listed[state].checkpoint_type, listed[state].checkpoint_id) == ("training", "weights/final")
    assert listed[state].user_metadata == {"note": "x"}
    assert listed[state].size_bytes > 0
    assert abs(listed[state].expires_at.timestamp() - time.time() - 7200) < 60
    assert listed[sampler].expires_at is None

    stranger = server.http(OTHER_KEY)
    assert stranger.post("/api/v1/weights_info", json={"tinker_path": state}).status_code == 404
    rest.publish_checkpoint_from_tinker_path(state).result()
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 8
    assert stranger.post("/api/v1/weights_info", json={"tinker_path": state}).json()["base_model"] == BASE
    assert stranger.delete(f"/api/v1/training_runs/{run}/checkpoints/weights/final").status_code == 404
    rest.unpublish_checkpoint_from_tinker_path(state).result()
    assert stranger.post("/api/v1/weights_info", json={"tinker_path": state}).status_code == 404

    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    assert rest.list_checkpoints(run).result().checkpoints[-1].expires_at is None
    folder = server.service.checkpoints.path_of(server.service.registry.checkpoints[state])
    assert folder.is_dir()
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert not folder.exists()
    assert [found.tinker_path for found in rest.list_checkpoints(run).result().checkpoints] == [sampler]
    assert sampler in [found.tinker_path for found in rest.list_user_checkpoints().result().checkpoints]


def test_a_checkpoint_whose_time_is_up_goes(server: Served, client: Any, training: Any) -> None:
    path = training.save_state("short", ttl_seconds=3600).result().path
    found = server.service.registry.checkpoints[path]
    from dataclasses import replace

    server.service.registry.checkpoints[path] = replace(found, expires=time.time() - 1)
    with pytest.raises(tinker.NotFoundError):
        client.create_training_client_from_state(path)


def test_runs_keep_their_metadata_and_last_checkpoints(rest: Any, training: Any) -> None:
    run = rest.get_training_run(training._guaranteed_model_id()).result()
    assert (run.base_model, run.lora_rank, run.user_metadata) == (BASE, 8, {"renderer_name": "role_colon"})
    assert run.last_checkpoint is None
    path = training.save_state("last").result().path
    assert rest.get_training_run_by_tinker_path(path).result().last_checkpoint.tinker_path == path
    assert run.training_run_id in [r.training_run_id for r in rest.list_training_runs(limit=100).result().training_runs]


def test_sessions_are_listed_with_what_is_in_them(rest: Any, training: Any) -> None:
    session = training._guaranteed_model_id().split(":")[0]
    assert session in rest.list_sessions(limit=100).result().sessions
    assert training._guaranteed_model_id() in rest.get_session(session).result().training_run_ids


def test_external_weights_and_archives_are_downloaded_by_link(
    server: Served, rest: Any, training: Any, tmp_path: Path
) -> None:
    path = training.save_weights_external("out").result().path
    links = rest.get_external_weights_urls(path).result()
    files = {name: urllib.request.urlopen(url).read() for name, url in links.urls.items()}  # no key
    assert set(files) == {"fake.json", "table.npz", "manifest.json"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert set(verify(tmp_path).files) == {"fake.json", "table.npz"}  # what was sent can be checked
    run = training._guaranteed_model_id()
    moved = server.http().get(f"/api/v1/training_runs/{run}/checkpoints/external_weights/out/archive")
    assert moved.status_code == 302
    with tarfile.open(fileobj=io.BytesIO(urllib.request.urlopen(moved.headers["location"]).read())) as tar:
        assert {entry.name: tar.extractfile(entry).read() for entry in tar} == files  # type: ignore[union-attr]
    forged = moved.headers["location"].replace("/archive.tar", "/../../journal.sqlite")
    assert server.http(None).get(forged).status_code == 404
    assert server.http(None).get(moved.headers["location"].replace("external_weights", "weights")).status_code == 404


def test_the_command_line_of_the_sdk_lists(server: Served, training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner
    from tinker.cli.__main__ import main_cli

    path = training.save_state("cli").result().path
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)

    def ask(*words: str) -> str:
        return str(CliRunner().invoke(main_cli, ["--format", "json", *words], catch_exceptions=False).stdout)

    run = training._guaranteed_model_id()
    assert run in ask("run", "list")
    assert run in ask("run", "info", run)
    assert path in ask("checkpoint", "list")
    assert path in ask("checkpoint", "info", path)
    assert BASE in ask("model", "list")


def test_a_failure_names_no_folder_of_the_server(server: Served, client: Any, training: Any) -> None:
    path = training.save_state("rank8").result().path
    other = client.create_lora_training_client(base_model=BASE, rank=4)
    with pytest.raises(tinker.RequestFailedError, match="other adapter settings") as failure:
        other.load_state(path).result()
    assert str(server.folder) not in str(failure.value)
