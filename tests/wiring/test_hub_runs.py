"""A run whose model and data are on the hub, by the real clients: it records the commits, and a resume uses them."""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.model.tiny import save_tiny
from support.hub_server import TOKEN, folder_files, hub_server, run_with_hub

WORDS = (*"0123456789", "+", "=", "add", "sum")
CONFIG = """
[run]
name = "t"
tensorboard = false
[model]
path = "acme/tiny"
lora = { rank = 2 }
[sft]
steps = 2
batch_size = 2
max_tokens = 24
sources = [{ type = "hub", path = "acme/sums", split = "train", columns = { prompt = "question" } }]
[checkpoint]
every = 1
"""
# starts a run, goes on with it after its last checkpoint was lost and the hub has moved on, then explains the file
SCRIPT = """
import shutil, sys, urllib.request
from pathlib import Path
from headrace import cli
def headrace(*args):
    try:
        cli.app([*args], standalone_mode=False)
    except cli.HeadraceError as exc:
        print(f"failed: {exc}")
headrace("train", "run.toml")
[run] = Path("runs").iterdir()
shutil.rmtree(run / "checkpoints" / "sft" / "step_000002")
urllib.request.urlopen(sys.argv[1] + "/move-on").read()
headrace("train", "run.toml", "--resume")
headrace("explain", "run.toml")
headrace("train", "run.toml", "--set", "sft.sources.0.path=acme/absent")
headrace("export", str(run / "checkpoints" / "sft" / "step_000002"), "--adapter", "--out", "mine", "--hub", "me/mine")
shutil.rmtree("mine")
headrace("train", "run.toml", "--set", "model.path=me/mine", "--set", "run.name=further")
"""


def rows(*numbers: int) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"question": f"{n} +", "answer": str(n)} for n in numbers]), file)
    return file.getvalue()


@pytest.mark.slow
def test_a_run_uses_one_commit_of_the_hub_from_its_start_to_its_last_resume(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a", words=WORDS, width=32, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    save_tiny(tmp_path / "b", words=WORDS, width=32, layers=1, heads=2, kv_heads=1, context=64, seed=1)
    (tmp_path / "run.toml").write_text(CONFIG)
    with hub_server() as hub:
        model = hub.commit("models", "acme/tiny", folder_files(tmp_path / "a"))
        data = hub.commit("datasets", "acme/sums", {"README.md": b"one", "data/train.parquet": rows(1, 2, 3)})
        later = folder_files(tmp_path / "b")

        def move_on() -> None:
            hub.commit("models", "acme/tiny", later)
            hub.commit("datasets", "acme/sums", {"README.md": b"two", "data/train.parquet": rows(7, 8, 9)})

        hub.on_request["/move-on"] = move_on
        done = run_with_hub(
            hub.url, tmp_path / "home", "-c", SCRIPT, hub.url, cwd=tmp_path, OMP_NUM_THREADS="1", HF_TOKEN=TOKEN
        )
    assert done.returncode == 0, done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("failed")]
    assert len(failed) == 1, done.stdout
    assert failed[0].startswith("failed: 'sft.sources[0].path' is \"acme/absent\", and there is no dataset acme/absent")
    [run] = (tmp_path / "runs").glob("t_*")
    recorded = json.loads((run / "inputs.json").read_text())["hub"]
    assert recorded == {
        "model.path": {"repo": "acme/tiny", "revision": "main", "commit": model},
        "sft.sources[0].path": {"repo": "acme/sums", "revision": "main", "commit": data},
    }
    assert f'path = "acme/tiny@{model}"' in (run / "config.toml").read_text()
    last = run / "checkpoints" / "sft" / "step_000002"
    assert json.loads((last / "state.json").read_text())["state"]["hub"]["model.path"] == f"acme/tiny@{model}"
    adapter = json.loads((last / "adapter" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("acme/tiny", model)
    [further] = (tmp_path / "runs").glob("further_*")
    assert "of rank 2, is continued on its base acme/tiny" in (further / "log.txt").read_text()
    # the file itself means the newest commit, of which no weights have been fetched
    assert "a run first downloads 0.00 GB into" in done.stdout
