"""What is told of a GPU, with the driver's answers stood in for: by hand."""

import pytest
import torch

from headrace.observe.sinks.gpu import GpuMetricsSink, gpu_values
from headrace.testing import MemorySink


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 41_500_000_000)
    monkeypatch.setattr(torch.cuda, "utilization", lambda: 73)
    return monkeypatch


def test_memory_is_in_gigabytes_and_utilisation_a_share(gpu: pytest.MonkeyPatch) -> None:
    assert gpu_values() == {
        "perf/gpu_memory_used_gb": 50.0,
        "perf/gpu_memory_peak_gb": 41.5,
        "perf/gpu_utilization": 0.73,
    }


@pytest.mark.parametrize("error", [ModuleNotFoundError("pynvml"), RuntimeError("no driver"), ZeroDivisionError()])
def test_without_nvml_only_memory_is_told(gpu: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse() -> int:
        raise error

    gpu.setattr(torch.cuda, "utilization", refuse)
    assert gpu_values() == {"perf/gpu_memory_used_gb": 50.0, "perf/gpu_memory_peak_gb": 41.5}


def test_a_process_that_uses_no_gpu_tells_nothing_and_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert gpu_values() == {}


def test_what_is_measured_is_in_every_record(gpu: pytest.MonkeyPatch) -> None:
    inner = MemorySink()
    sink = GpuMetricsSink(inner, gpu_values)
    sink.log(1, {"loss/total": 1.0})
    sink.close()
    assert inner.records == [(1, {"loss/total": 1.0, **gpu_values()})]
    assert inner.closed
