"""Who keeps weights in few bits: nobody who is wrong or large, and what the real packages do on this machine."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headrace.errors import ModelError
from headrace.model import quantizers
from headrace.model.quantized import Bits, QuantizedLinear
from headrace.model.quantizers import Make, choose, try_out

CPU = torch.device("cpu")
BESIDE = Path(sys.prefix) / "quantizers"  # `make install` puts torchao there: transformers would load it everywhere


class Scaled(nn.Module):
    """A layer whose products are off by a share."""

    def __init__(self, layer: nn.Linear, bits: Bits, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = QuantizedLinear(layer, bits), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * torch.as_tensor(self.inner(x))


def off_by(factor: float) -> Make:
    return lambda layer, bits: Scaled(layer, bits, factor)


def fails(layer: nn.Linear, bits: Bits) -> nn.Module:
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_is_right_everywhere(bits: Bits, dtype: torch.dtype) -> None:
    try_out(QuantizedLinear, bits, device=CPU, dtype=dtype)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (off_by(1.05), "off by 5"),
        (off_by(float("nan")), "off by nan"),
        (fails, "does not work on cpu in float32"),
        (lambda layer, bits: layer, "takes 32 bits"),
    ],
)
def test_what_is_wrong_or_large_or_broken_is_refused(make: Make, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        try_out(make, 8, device=CPU, dtype=torch.float32)


def test_auto_takes_the_first_that_is_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    makers: dict[str, Make] = {"torchao": fails, "bitsandbytes": QuantizedLinear, "plain": QuantizedLinear}
    monkeypatch.setattr(quantizers, "maker", makers.__getitem__)
    assert choose("auto", 4, device=CPU, dtype=torch.float32) == "bitsandbytes"
    makers["bitsandbytes"] = off_by(1.5)
    assert choose("auto", 4, device=CPU, dtype=torch.float32) == "plain"
    with pytest.raises(ModelError, match="8-bit weights cannot be kept by torchao: it does not work"):
        choose("torchao", 8, device=CPU, dtype=torch.float32)
    makers["torchao"] = QuantizedLinear
    assert choose("auto", 4, device=CPU, dtype=torch.float32) == "torchao"
    assert choose("plain", 4, device=CPU, dtype=torch.float32) == "plain"


@pytest.mark.parametrize("name", ["torchao", "bitsandbytes"])
def test_one_that_is_not_there_says_how_it_is_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # an import of it fails, whether it is there or not
    for module in [each for each in sys.modules if each.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ModelError, match=rf"pip install 'headrace\[{name}\]'"):
        choose(name, 8, device=CPU, dtype=torch.float32)  # type: ignore[arg-type]


# --- the real packages, in a process of their own ---

PROGRAM = """
import json, sys
import numpy as np, torch
from headrace.errors import ModelError
from headrace.model.load import prepare
from headrace.model.quantized import QuantizedLinear, model_bytes
from headrace.model.quantizers import choose, quantize_by
from headrace.model.tiny import make_model
from headrace.train.references import FewBits, ReferenceModels
from headrace.types import Datum, float_array, int_array

def make(dtype, width=128):
    model = make_model(vocab_size=64, width=width, layers=2, heads=4, kv_heads=2, context=64, seed=3)
    return prepare(model.to(dtype), None, source="tiny")

def score(dtype, few=None, width=128):
    kept = []
    models = ReferenceModels(lambda _: kept.append(make(dtype, width)) or kept[0], few_bits=lambda _: few)
    return models.score("it", texts), kept[0].model

rng, found = np.random.default_rng(0), []
tokens = [int_array(rng.integers(0, 64, 25)) for _ in range(4)]
texts = [Datum(inputs=each[:-1], targets=each[1:], arrays={"weights": float_array(np.ones(24))}) for each in tokens]
for dtype in (torch.float32, torch.bfloat16):
    exact, full = score(dtype)
    for bits in (8, 4):
        for quantizer in (sys.argv[1], "plain"):
            told = {"dtype": str(dtype), "bits": bits, "quantizer": quantizer}
            try:
                choose(quantizer, bits, device=torch.device("cpu"), dtype=dtype)
            except ModelError as exc:
                found.append({**told, "refused": str(exc)})
                continue
            out, small = score(dtype, FewBits(bits=bits, quantizer=quantizer))
            error = float(np.mean([np.abs(a - b).mean() for a, b in zip(out, exact)]))
            again, _ = score(dtype, FewBits(bits=bits, quantizer=quantizer))
            found.append({
                **told,
                "error": error,
                "size": model_bytes(small) / model_bytes(full),
                "plain_layers": sum(isinstance(each, QuantizedLinear) for each in small.modules()),
                "same": all(a.tobytes() == b.tobytes() for a, b in zip(out, again)),
            })
_, narrow = score(torch.bfloat16, FewBits(bits=4, quantizer=sys.argv[1]), width=48)
left = sum(isinstance(each, QuantizedLinear) for each in narrow.modules())
shapes = [(128, 32), (36, 32), (128, 8)]
by = [quantize_by(torch.nn.ModuleList([torch.nn.Linear(*shape)]), 4, sys.argv[1]) for shape in shapes]
print(json.dumps({"found": found, "plain_when_narrow": left, "by": by, "auto": choose(
    "auto", 8, device=torch.device("cpu"), dtype=torch.bfloat16)}))
"""


# Layers are 98 % of this model, and scales and zeros are of its own type: 8.25 and 6 bits of 32, 8.2 and 5 of 16.
LARGEST = {
    ("torch.float32", 8): 0.29,
    ("torch.float32", 4): 0.21,
    ("torch.bfloat16", 8): 0.53,
    ("torch.bfloat16", 4): 0.34,
}


def there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None or (BESIDE / name).is_dir()


@pytest.mark.slow  # a process of its own, which imports torch once more
@pytest.mark.parametrize("name", ["torchao", "bitsandbytes"])
def test_a_package_scores_as_near_as_plain_torch_in_as_little(name: str) -> None:
    if not there(name):
        pytest.skip(f"needs {name}: pip install 'headrace[{name}]'")
    environment = {**os.environ, "PYTHONPATH": str(BESIDE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    by = {(each["dtype"], each["bits"], each["quantizer"]): each for each in told["found"]}
    assert len(by) == 8
    for dtype in ("torch.float32", "torch.bfloat16"):
        for bits in (8, 4):
            here, plain = by[dtype, bits, name], by[dtype, bits, "plain"]
            assert "refused" not in here, here
            assert here["plain_layers"] == 0
            assert plain["plain_layers"] == 14
            assert here["size"] < LARGEST[dtype, bits]
            assert 0 < here["error"] < 2 * plain["error"] + 1e-3
            assert here["same"]
        assert by[dtype, 4, name]["error"] > by[dtype, 8, name]["error"]
    assert told["plain_when_narrow"] > 0  # 48 inputs are no multiple of 32
    assert told["by"] == [name, "plain", "plain" if name == "torchao" else name]
    assert told["auto"] == ("torchao" if there("torchao") else name)
