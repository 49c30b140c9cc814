"""Measure GPU utilisation and memory, for the metrics of a run and of a service."""

import contextlib
from collections.abc import Callable, Mapping

import torch

from headrace.errors import BackendError, boundary
from headrace.protocols import MetricSink


def gpu_values() -> dict[str, float]:
    """Measure the CUDA device that this process uses; empty if it uses none. Utilisation needs nvidia-ml-py.

    `perf/gpu_memory_used_gb` is the memory used by all programs on the device, `perf/gpu_memory_peak_gb` the peak of
    this program's tensors, both in 10^9 bytes.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    free, total = torch.cuda.mem_get_info()
    values = {
        "perf/gpu_memory_used_gb": (total - free) / 1e9,
        "perf/gpu_memory_peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }
    with (
        contextlib.suppress(BackendError),
        boundary(BackendError, "no nvidia-ml-py, or a driver that does not report it"),
    ):
        values["perf/gpu_utilization"] = torch.cuda.utilization() / 100
    return values


class GpuMetricsSink:
    """Adds the values of `measure` to every record."""

    def __init__(self, sink: MetricSink, measure: Callable[[], Mapping[str, float]]) -> None:
        self._sink, self._measure = sink, measure

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._sink.log(step, {**values, **self._measure()})

    def close(self) -> None:
        self._sink.close()
