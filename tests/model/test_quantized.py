"""Quantised weights: how far off they may be, what they save, and what the optional packages do on this machine."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError
from headrace.model import quantized
from headrace.model.load import prepare
from headrace.model.quantized import (
    LEVELS,
    Bits,
    Package,
    Quantization,
    QuantizedLinear,
    choose_quantizer,
    model_bytes,
    quantize,
    quantize_model,
)
from headrace.model.tiny import make_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PACKAGE_FOLDER = Path(sys.prefix) / "quantizers"  # `make install` puts torchao there: transformers would import it


def test_numbers_by_hand() -> None:
    # group of 32: largest 0.7 -> scale 0.1: 0.7, -0.32, 0.04 are 7, -3, 0; all zero: numbers 0
    weight = torch.zeros(2, 32)
    weight[0, :3] = torch.tensor([0.7, -0.32, 0.04])
    numbers, scales = quantize(weight, 4)
    assert numbers[0, :4].tolist() == [7, -3, 0, 0]
    assert scales[0].tolist() == pytest.approx([0.1])
    assert not numbers[1].any()
    layer = torch.nn.Linear(32, 2, bias=False)
    layer.weight.data.copy_(weight)
    assert QuantizedLinear(layer, 4).weight[0, :3].tolist() == pytest.approx([0.7, -0.3, 0.0], abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([8, 4]),
    outputs=st.integers(1, 5),
    inputs=st.sampled_from([1, 7, 32, 33, 128, 192]),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_weight_is_off_by_more_than_half_a_scale(
    bits: Bits, outputs: int, inputs: int, seed: int, dtype: torch.dtype
) -> None:
    layer = torch.nn.Linear(inputs, outputs)
    layer.weight.data.copy_(torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)))
    layer = layer.to(dtype)
    found = QuantizedLinear(layer, bits)
    width = {1: 1, 7: 7, 32: 32, 33: 33, 128: {8: 128, 4: 32}[bits], 192: {8: 64, 4: 32}[bits]}[inputs]
    grouped = layer.weight.detach().float().view(outputs, -1, width)
    rounding = 1.0 if dtype == torch.float32 else 1.0 + 2**-7 * LEVELS[bits]
    allowed = 0.5001 * rounding * grouped.abs().amax(dim=2, keepdim=True) / LEVELS[bits] + 1e-6
    assert ((found.weight.float().view_as(grouped) - grouped).abs() <= allowed).all()
    assert found.weight.dtype == dtype
    if dtype == torch.float32:
        x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(found(x), x @ found.weight.T + layer.bias)


@pytest.mark.parametrize(("bits", "share"), [(8, 0.27), (4, 0.16)])
def test_layers_take_a_part_of_their_memory_and_the_head_stays(bits: Bits, share: float) -> None:
    lm = prepare(
        make_model(vocab_size=8, width=128, layers=2, heads=4, kv_heads=2, context=32, seed=0), None, source="tiny"
    )
    before, head = model_bytes(lm.model), lm.head_weight().clone()
    quantize_model(lm.model, bits)
    assert model_bytes(lm.model) < share * before
    assert torch.equal(lm.head_weight(), head)
    assert sum(isinstance(each, QuantizedLinear) for each in lm.model.modules()) == 14


def test_auto_takes_the_first_installed_package_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torchao", "bitsandbytes"}
    monkeypatch.setattr(quantized, "_is_installed", installed.__contains__)
    assert choose_quantizer(Quantization(bits=4), device=CPU, dtype=torch.float32) == "torchao"
    assert choose_quantizer(Quantization(bits=4), device=CUDA, dtype=torch.bfloat16) == "torchao"
    assert choose_quantizer(Quantization(bits=4), device=CUDA, dtype=torch.float32) == "bitsandbytes"
    assert choose_quantizer(Quantization(bits=8), device=CPU, dtype=torch.float64) == "plain"
    assert choose_quantizer(Quantization(bits=8), device=torch.device("mps"), dtype=torch.float32) == "plain"
    assert choose_quantizer(Quantization(bits=8, quantizer="plain"), device=CPU, dtype=torch.float32) == "plain"
    with pytest.raises(ModelError, match="torchao cannot keep 4-bit weights: it does not work on cuda in float32"):
        choose_quantizer(Quantization(bits=4, quantizer="torchao"), device=CUDA, dtype=torch.float32)
    installed.remove("torchao")
    assert choose_quantizer(Quantization(bits=4), device=CPU, dtype=torch.float32) == "bitsandbytes"
    assert choose_quantizer(Quantization(bits=8), device=CPU, dtype=torch.float32) == "plain"  # it rounds activations
    installed.clear()
    assert choose_quantizer(Quantization(bits=4), device=CPU, dtype=torch.float32) == "plain"


@pytest.mark.parametrize("package", ["torchao", "bitsandbytes"])
def test_a_missing_package_is_an_error_that_says_how_to_install_it(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ModelError, match=rf"pip install 'headrace\[{package}\]'"):
        choose_quantizer(Quantization(bits=8, quantizer=package), device=CPU, dtype=torch.float32)


# --- the real packages, in a process of their own ---

PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np, torch
from headrace.model.load import load_model
from headrace.model.quantized import Quantization, QuantizedLinear, choose_quantizer, model_bytes
from headrace.model.tiny import save_tiny
from headrace.train.frozen_cache import ReferenceModels
from headrace.types import Datum, float_array, int_array

package, folder = sys.argv[1:]

def score(width, dtype, quantization=None):
    loaded = []
    def load(name):
        loaded.append(load_model(name, dtype=dtype, quantization=quantization))
        return loaded[0]
    return ReferenceModels(load).score(f"{folder}/{width}", texts), loaded[0].model

def count_plain(model):
    return sum(isinstance(layer, QuantizedLinear) for layer in model.modules())

for width in (128, 48):
    shape = {"width": width, "layers": 2, "heads": 4, "kv_heads": 2, "context": 64}
    save_tiny(Path(folder) / str(width), words=("a", "b"), seed=3, **shape)
rng, measured = np.random.default_rng(0), []
tokens = [int_array(rng.integers(0, 6, 25)) for _ in range(4)]
texts = [Datum(inputs=each[:-1], targets=each[1:], arrays={"weights": float_array(np.ones(24))}) for each in tokens]
for dtype in (torch.float32, torch.bfloat16):
    exact, full = score(128, dtype)
    for bits in (8, 4):
        for quantizer in (package, "plain"):
            quantization = Quantization(bits=bits, quantizer=quantizer)
            scores, small = score(128, dtype, quantization)
            again, _ = score(128, dtype, quantization)
            measured.append({
                "dtype": str(dtype),
                "bits": bits,
                "quantizer": quantizer,
                "error": float(np.mean([np.abs(a - b).mean() for a, b in zip(scores, exact)])),
                "size": model_bytes(small) / model_bytes(full),
                "plain_layers": count_plain(small),
                "same": all(a.tobytes() == b.tobytes() for a, b in zip(scores, again)),
            })
exact, _ = score(48, torch.bfloat16)
scores, narrow = score(48, torch.bfloat16, Quantization(bits=4, quantizer=package))
print(json.dumps({
    "measured": measured,
    "narrow_plain_layers": count_plain(narrow),
    "narrow_error": float(np.mean([np.abs(a - b).mean() for a, b in zip(scores, exact)])),
    "auto": choose_quantizer(Quantization(bits=4), device=torch.device("cpu"), dtype=torch.bfloat16),
}))
"""


# Layers are 98 % of this model, and scales and zeros are of its own type: 8.25 and 6 bits of 32, 8.2 and 5 of 16.
LARGEST = {
    ("torch.float32", 8): 0.29,
    ("torch.float32", 4): 0.21,
    ("torch.bfloat16", 8): 0.53,
    ("torch.bfloat16", 4): 0.34,
}


def is_available(package: str) -> bool:
    return importlib.util.find_spec(package) is not None or (PACKAGE_FOLDER / package).is_dir()


@pytest.mark.slow  # a process of its own, which imports torch once more
@pytest.mark.parametrize("package", ["torchao", "bitsandbytes"])
def test_a_package_scores_as_near_as_plain_torch_in_as_little(package: str, tmp_path: Path) -> None:
    if not is_available(package):
        pytest.skip(f"needs {package}: pip install 'headrace[{package}]'")
    python_path = os.pathsep.join([str(PACKAGE_FOLDER), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, package, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    by = {(each["dtype"], each["bits"], each["quantizer"]): each for each in report["measured"]}
    assert len(by) == 8
    for dtype in ("torch.float32", "torch.bfloat16"):
        for bits in (8, 4):
            packaged, plain = by[dtype, bits, package], by[dtype, bits, "plain"]
            assert packaged["plain_layers"] == 0
            assert plain["plain_layers"] == 14
            assert packaged["size"] < LARGEST[dtype, bits]
            assert 0 < packaged["error"] < 2 * plain["error"] + 1e-3
            assert packaged["same"]
        assert by[dtype, 4, package]["error"] > by[dtype, 8, package]["error"]
    assert report["narrow_plain_layers"] > 0  # 48 inputs are no multiple of 32
    assert report["narrow_error"] < 2 * by["torch.bfloat16", 4, "plain"]["error"]
    assert report["auto"] == ("torchao" if is_available("torchao") else package)
