"""The real package, offline: what it wrote is read back with its own reader."""

import json
import math
import sys
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.observe.sinks.wandb import WandbSink, wandb_installed


def open_sink(folder: Path, stage: str) -> WandbSink:
    return WandbSink(
        folder, project="p", entity="", mode="offline", group="demo", stage=stage, config={"rl": {"steps": 3}}
    )


def written(folder: Path) -> dict[str, list[tuple[int, dict[str, float]]]]:
    """Rows by the name of W&B's run."""
    import wandb
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    wandb.teardown()  # ends the process that writes, and waits for it, as the end of a program does
    found = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        store, name, rows = DataStore(), "", []
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            match record.WhichOneof("record_type"):
                case "run":
                    name = f"{record.run.project}: {record.run.run_group}, {record.run.display_name}"
                case "history":
                    items = {
                        "".join(item.nested_key) or item.key: json.loads(item.value_json)
                        for item in record.history.item
                    }
                    rows.append((record.history.step.num, {k: v for k, v in items.items() if not k.startswith("_")}))
        found[name] = rows
    return found


@pytest.mark.skipif(not wandb_installed(), reason="the extra headrace[wandb] is not installed")
def test_offline_every_stage_is_a_run_of_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    sft = open_sink(tmp_path, "sft")
    sft.log(1, {"loss/total": 0.1 + 0.2})
    sft.log(1, {"eval/pass@1": 1})  # a second record of the step joins its row
    sft.log(2, {"loss/total": math.nan})
    sft.close()
    rl = open_sink(tmp_path, "rl")
    rl.log(1, {"reward/mean": 0.5})
    rl.close()
    found = written(tmp_path)
    assert found["p: demo, demo/rl"] == [(1, {"reward/mean": 0.5})]
    (first, second) = found["p: demo, demo/sft"]
    assert first == (1, {"loss/total": 0.1 + 0.2, "eval/pass@1": 1.0})
    assert second[0] == 2
    assert math.isnan(second[1]["loss/total"])


def test_without_wandb_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert not wandb_installed()
    with pytest.raises(ConfigError, match="pip install"):
        open_sink(tmp_path, "rl")
