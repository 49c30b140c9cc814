"""Write metrics to MLflow, if mlflow or mlflow-skinny is installed: one MLflow run for each stage, over all starts."""

import importlib
import importlib.util
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.errors import ConfigError, boundary

RUN_TAG, STAGE_TAG = "headrace.run", "headrace.stage"
MAX_PARAMS, MAX_VALUE = 100, 500  # of one request; characters
_NOT_ALLOWED = re.compile(r"[^\w./ -]")  # in the names of MLflow


def mlflow_installed() -> bool:
    return importlib.util.find_spec("mlflow") is not None


class MlflowSink:
    """Logs one stage to an MLflow run of an experiment. A run with the same tags, of an earlier start, goes on.

    The configuration becomes parameters, which MLflow does not let change: they are those of the first start. Raises
    ConfigError when MLflow cannot be started: no package, no server.
    """

    def __init__(
        self, *, tracking_uri: str, experiment: str, group: str, stage: str, config: Mapping[str, Any]
    ) -> None:
        if not mlflow_installed():
            raise ConfigError("the sink \"mlflow\" needs the package mlflow-skinny: pip install 'headrace[mlflow]'")
        hint = "give metrics.mlflow.tracking_uri, or set MLFLOW_TRACKING_URI"
        with boundary(ConfigError, f"MLflow cannot be started ({hint})"):
            self._mlflow: Any = importlib.import_module("mlflow")
            self._client: Any = self._mlflow.MlflowClient(tracking_uri=tracking_uri or None)
            found = self._client.get_experiment_by_name(experiment)
            number = self._client.create_experiment(experiment) if found is None else found.experiment_id
            tags = {RUN_TAG: group, STAGE_TAG: stage}
            wanted = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
            runs = self._client.search_runs([number], filter_string=wanted, max_results=1)
            if runs:
                self._id = runs[0].info.run_id
                self._client.update_run(self._id, status="RUNNING")
            else:
                run = self._client.create_run(number, run_name=f"{group}/{stage}", tags=tags)
                self._id = run.info.run_id
                self._log_parameters(config)

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        param = self._mlflow.entities.Param
        params = [param(_name(key), text[:MAX_VALUE]) for key, text in _flat(config)]
        for begin in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + MAX_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values of a step in one request; characters that MLflow does not allow in names become "_"."""
        metric, now_ms = self._mlflow.entities.Metric, int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[metric(_name(name), float(value), now_ms, step) for name, value in values.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _name(name: str) -> str:
    return _NOT_ALLOWED.sub("_", name)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)
