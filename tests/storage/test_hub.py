"""The hub is reached by the real clients, at a server of our own; every failure is one sentence of what to do."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.storage.hub import HubName, hub_name
from support.hub_server import TOKEN, HubServer, hub_server, run_with_hub

CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files: socratic/train-*
---
"""
# prints one line of JSON for each line of `CALLS`: its value, or the type and the sentence of its failure
SCRIPT = """
import json, sys
from headrace.errors import HeadraceError
from headrace.storage.hub import *
for call in sys.argv[1:]:
    try:
        print(json.dumps(str(eval(call))))
    except HeadraceError as exc:
        print(json.dumps(f"{type(exc).__name__}: {exc}"))
"""


def parquet(*rows: dict[str, str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file.getvalue()


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with hub_server() as server:
        files = {"config.json": b"{}", "tokenizer.json": b'{"a":1}', "model.safetensors": b"weights"}
        unwanted = {"pytorch_model.bin": b"pickled", "onnx/model.safetensors": b"other", "README.md": b"read me"}
        server.commit("models", "acme/small", files | unwanted)
        server.commit("models", "acme/pickled", {"config.json": b"{}", "pytorch_model.bin": b"pickled"})
        server.commit("models", "acme/gated", files)
        server.commit("models", "acme/none-of-ours", {"README.md": b""})
        data = {
            "README.md": CARD.encode(),
            "main/train-00000-of-00001.parquet": parquet({"question": "1 + 1", "answer": "2"}),
            "main/test-00000-of-00001.parquet": parquet({"question": "1 + 2", "answer": "3"}),
            "socratic/train-00000-of-00001.parquet": parquet({"question": "Why?", "answer": "Because."}),
        }
        server.commit("datasets", "acme/sums", data)
        server.commit("datasets", "acme/gated-sums", data)
        server.gated |= {"acme/gated", "acme/gated-sums"}
        yield server


def answers(endpoint: str, home: Path, *calls: str, **variables: str) -> list[str]:
    done = run_with_hub(endpoint, home, "-c", SCRIPT, *calls, cwd=home.parent, **variables)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_names_of_the_hub_are_told_from_paths() -> None:
    assert hub_name("Qwen/Qwen3-0.6B") == HubName(repo="Qwen/Qwen3-0.6B", revision="main")
    assert hub_name("Qwen/Qwen3-0.6B@v1.0") == HubName(repo="Qwen/Qwen3-0.6B", revision="v1.0")
    for path in ("model", "./model/x", "/data/model", "~/model", "a/b/c", "../x", "a/b.c:d", ""):
        assert hub_name(path) is None, path
    assert hub_name("imdb", "dataset") == HubName(repo="imdb", revision="main")


@pytest.mark.slow
def test_only_what_a_model_needs_is_fetched_and_then_kept(hub: HubServer, tmp_path: Path) -> None:
    listed = "sorted(p.name for p in model_files(hub_name('acme/small')).rglob('*'))"
    described = "sorted(p.name for p in model_description(hub_name('acme/small')).rglob('*'))"
    missing = "missing_bytes(hub_name('acme/small'))"
    train = "load_hub_dataset(hub_name('acme/sums'), subset='main', split='test')[0]"
    commit = "find_commit(hub_name('acme/sums'), 'dataset').pinned"
    out = answers(hub.url, tmp_path / "home", described, missing, listed, missing, train, commit)
    sums = f"acme/sums@{hub.files_at('datasets', 'acme/sums', 'main')[0]}"  # type: ignore[index]
    row = "{'question': '1 + 2', 'answer': '3'}"
    assert out == ["['config.json']", "14", "['config.json', 'model.safetensors', 'tokenizer.json']", "0", row, sums]
    asked = len(hub.requests)
    offline = answers(hub.url, tmp_path / "home", listed, train, commit, HF_HUB_OFFLINE="1")
    assert offline == [out[2], row, sums]
    assert len(hub.requests) == asked


def test_a_download_goes_on_where_its_connection_ended_and_shows_its_progress(hub: HubServer, tmp_path: Path) -> None:
    weights = bytes(range(256)) * (24 << 12)  # 24 MiB; the client writes 10 at a time
    hub.commit("models", "acme/large", {"config.json": b"{}", "model.safetensors": weights})
    hub.cut["model.safetensors"] = 12 << 20
    hub.ranges.clear()
    call = "str(model_files(HubName(repo='acme/large')))"
    done = run_with_hub(hub.url, tmp_path / "home", "-c", SCRIPT, call, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [asked for name, asked in hub.ranges if name == "model.safetensors"] == [
        "",
        f"bytes={10 << 20}-",
        f"bytes={20 << 20}-",
    ]
    assert (Path(json.loads(done.stdout)) / "model.safetensors").read_bytes() == weights
    assert "100%" in done.stderr


def test_every_failure_of_the_hub_says_what_to_do(hub: HubServer, tmp_path: Path) -> None:
    calls = {
        "model_files(hub_name('acme/absent'))": f"ModelError: there is no model acme/absent at {hub.url}: correct",
        "model_files(hub_name('acme/gated'))": f"is gated: accept its terms at {hub.url}/acme/gated, then log in",
        "model_files(hub_name('acme/small@v9'))": "the model acme/small has no revision v9",
        "model_files(hub_name('acme/pickled'))": "has no safetensors",
        "model_description(hub_name('acme/none-of-ours'))": "has no config.json",
        "find_commit(hub_name('acme/absent'), 'dataset')": "DataError: there is no dataset acme/absent",
        "find_commit(hub_name('acme/gated-sums'), 'dataset')": f"terms at {hub.url}/datasets/acme/gated-sums",
        "load_hub_dataset(hub_name('acme/sums'), subset=None, split='train')": "has the subsets main, socratic: say",
        "load_hub_dataset(hub_name('acme/sums'), subset='x', split='train')": "has no subset x; it has main, socratic",
        "load_hub_dataset(hub_name('acme/sums'), subset='main', split='dev')": "has no split dev; it has train, test",
        "load_hub_dataset(hub_name('acme/sums'), subset='main', split=None)": "has the splits train, test: say which",
    }
    for sentence, expected in zip(answers(hub.url, tmp_path / "home", *calls), calls.values(), strict=True):
        assert expected in sentence
        assert "\n" not in sentence
    [gated] = answers(hub.url, tmp_path / "home", "find_commit(hub_name('acme/gated'), 'model').repo", HF_TOKEN=TOKEN)
    assert gated == "acme/gated"


def test_a_folder_is_uploaded_as_a_private_model_by_one_who_may_write(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    call = f"upload_model(Path({str(folder)!r}), 'me/adapter')"
    [refused] = answers(hub.url, tmp_path / "home", call)
    assert f"cannot be uploaded as me/adapter, which {hub.url} does not let you write: log in" in refused
    assert ("models", "me/adapter") not in hub.commits
    [address] = answers(hub.url, tmp_path / "home", call, HF_TOKEN=TOKEN)
    assert address == f"{hub.url}/me/adapter"
    assert hub.commits["models", "me/adapter"][-1][1] == files
    assert hub.private["me/adapter"]


def test_a_missing_network_is_told_at_once(tmp_path: Path) -> None:
    calls = ("model_description(hub_name('acme/small'))", "find_commit(hub_name('acme/sums'), 'dataset')")
    for sentence in answers("http://127.0.0.1:9", tmp_path / "home", *calls):
        assert "the hub at http://127.0.0.1:9 cannot be reached: connect to the network" in sentence
    for sentence in answers("http://127.0.0.1:9", tmp_path / "home", *calls, HF_HUB_OFFLINE="1"):
        assert "HF_HUB_OFFLINE is set: unset it, or fetch it" in sentence
