"""`streamload.nn`: Linears that stay quantised, in models of tinygrad."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as sn
from array_files import save
from nn_helpers import Transformer, made, quantised
from safetensors_files import write_arrays, write_safetensors
from tinygrad import Tensor, TinyJit, Variable, dtypes, nn
from tinygrad.helpers import GlobalCounters
from tinygrad.nn.state import get_state_dict, load_state_dict
from tinygrad.uop.ops import Ops

import streamload
import streamload.nn
from streamload.codecs.product import operands
from streamload.codecs.scheme import CodedWeight
from streamload.devices.tinygrad import linear, product
from streamload.devices.tinygrad.product import Weight
from streamload.errors import PlanInfeasibleError, StateDictMismatchError
from streamload.nn import QuantLinear, replace_linears

DEVICES = (pytest.param("CPU", marks=pytest.mark.slow), "CL")
LAYERS = ("int8", "q8_0", "q4_0", "nf4")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", LAYERS)
def test_the_product_is_that_of_the_decoded_weight(format: str, device: str) -> None:
    offsets = np.arange(24, dtype=np.float32)
    layer, weight = made(format, 24, 192, device, bias=Tensor(offsets, device=device))
    for dtype, shape in [("float16", (2, 5, 192)), ("float32", (2, 5, 192)), ("float32", (192,))]:
        x = np.random.default_rng(1).standard_normal(shape).astype(dtype)
        expected = x.astype(np.float64) @ weight.T.astype(np.float64) + offsets
        found = layer(Tensor(x, device=device)).numpy()
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        most = np.abs(expected).max() * (2.0**-11 if dtype == "float16" else 2.0**-20)
        assert np.abs(found - expected).max() <= most


@pytest.mark.parametrize("device", DEVICES)
def test_int8_takes_rows_of_any_width(device: str) -> None:
    for width in (1, 37):
        layer, weight = made("int8", 5, width, device)
        x = np.random.default_rng(1).standard_normal((3, width)).astype(np.float32)
        assert np.allclose(layer(Tensor(x, device=device)).numpy(), x @ weight.T, atol=1e-5)


def peak_nbytes(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """The most memory of tinygrad's buffers that a call needs beyond what there is before it."""
    from tinygrad.device import Buffer

    before, most = GlobalCounters.mem_used, 0
    allocate = Buffer.allocate

    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal most
        found = allocate(self, *arguments, **options)
        most = max(most, GlobalCounters.mem_used - before)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Buffer, "allocate", watched)
        run()
    return most


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", LAYERS)
def test_no_decoded_weight_is_ever_held(
    format: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product is one kernel, and needs memory for its result and for wider activations only."""
    width, outputs = 2048, 256  # 1 MB as float16
    layer, _ = made(format, outputs, width, device)
    results: list[Tensor] = []
    token = Tensor(np.ones((1, width), np.float32), device=device).realize()
    kernels = GlobalCounters.kernel_count
    most = peak_nbytes(lambda: results.append(layer(token).realize()), monkeypatch)
    assert GlobalCounters.kernel_count - kernels == 1
    assert most == outputs * 4
    prompt = Tensor(np.ones((2, width), np.float16), device=device).realize()
    kernels = GlobalCounters.kernel_count
    most = peak_nbytes(lambda: results.append(layer(prompt).realize()), monkeypatch)
    assert GlobalCounters.kernel_count - kernels == 2
    assert most == 2 * (outputs * 2 + width * 4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_product_repeats(device: str) -> None:
    layer, weight = made("q8_0", 8, 64, device)
    step = TinyJit(lambda x: layer(x).realize())
    for seed in range(4):
        x = np.random.default_rng(seed).standard_normal((1, 1, 64)).astype(np.float32)
        found = step(Tensor(x, device=device).realize()).numpy()
        assert np.allclose(found, x @ weight.T, atol=1e-4)


@pytest.mark.skipif(version("tinygrad").startswith("0.13"), reason="it runs no program of others")
@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_gradients_of_a_compiled_kernel(format: str) -> None:
    """Those of the activations and the bias; the kernel itself, for CUDA, is not run."""
    bias = Tensor(np.arange(8, dtype=np.float32), device="CL")
    layer, weight = made(format, 8, 64, "CL", bias=bias)
    x = Tensor(np.ones((1, 2, 64), np.float32), device="CL").realize()
    names = [part.name("weight") for part in operands(CodedWeight(format, (8, 64)))]
    held = Weight(format, (8, 64), [getattr(layer, name) for name in names], bias)
    y = product._launched(x, held, linear._expression)
    assert y is not None and any(node.op is Ops.PROGRAM for node in y.uop.toposort())
    g = np.random.default_rng(3).standard_normal(y.shape).astype(np.float32)
    of_x, of_bias = y.gradient(x, bias, gradient=Tensor(g, device="CL"))
    assert np.allclose(of_x.numpy(), g @ weight, atol=1e-5)
    assert np.allclose(of_bias.numpy(), g.sum((0, 1)), atol=1e-5)


@pytest.mark.parametrize("format", ["int8", "nf4"])  # blocks are dequantised without a word
def test_what_an_error_says_of_stored_codes_loads_their_values(tmp_path: Path, format: str) -> None:
    """Plain Linears get no codes without scales; each suggested line gives the product."""
    rng = np.random.default_rng(3)
    tensors, weights = dict[str, Any](), dict[str, Any]()
    for seed, name in enumerate(("layers.0.q", "layers.1.q", "layers.1.k")):
        parts, weights[name] = quantised(format, 64, 64, seed)
        tensors |= {f"{name}.weight{suffix}": array for suffix, array in parts.items()}
    head = rng.standard_normal((8, 64)).astype(np.float32)
    tensors["head.weight"] = head
    path = write_arrays(tmp_path / "model.safetensors", tensors)

    def made() -> Any:
        layers = [{"q": nn.Linear(64, 64, bias=False)} for _ in range(2)]
        layers[1]["k"] = nn.Linear(64, 64, bias=False)
        return {"layers": layers, "head": nn.Linear(64, 8, bias=False)}

    given: dict[str, Any] = {"device": "CPU", "progress": False}
    for strict in (True, False):
        model = made()
        with pytest.raises(StateDictMismatchError) as caught:
            streamload.load_state_dict(model, path, strict=strict, **given)
        lines = [each.arguments for each in caught.value.suggestions]
        assert any("replace_linears" in line for line in lines)
        assert not any("strict=" in line or "shapes=" in line for line in lines)
        for line in lines:
            model, changed = made(), dict[str, Any]()
            if line.startswith("streamload.nn."):
                exec(line, {"streamload": streamload, "model": model})
            else:
                changed = eval(f"dict({line})")
            streamload.load_state_dict(model, path, strict=strict, **given, **changed)
            x = rng.standard_normal((3, 64)).astype(np.float32)
            layers = {f"layers.{i}.{k}": m for i in (0, 1) for k, m in model["layers"][i].items()}
            for name, layer in layers.items():
                want = x @ weights[name].T
                found = layer(Tensor(x, device="CPU")).numpy()
                assert np.allclose(found, want, atol=2e-2), (line, name)
            assert np.allclose(model["head"].weight.numpy(), head, atol=1e-3)


@pytest.mark.skipif(
    version("tinygrad").startswith("0.13"), reason="its own Linear computes other values there"
)
def test_a_variable_number_of_tokens() -> None:
    layer, weight = made("q4_0", 8, 64, "CPU")
    tokens = Variable("tokens", 1, 8)
    step = TinyJit(lambda x: layer(x).realize())
    for count in (2, 3, 4, 5):
        x = np.random.default_rng(count).standard_normal((1, 8, 64)).astype(np.float32)
        found = step(Tensor(x, device="CPU").realize()[:, : tokens.bind(count)])
        some = found.shrink(((0, 1), (0, count), (0, 8))).numpy()
        assert np.allclose(some, x[:, :count] @ weight.T, atol=1e-4)


@pytest.mark.parametrize("format", [pytest.param("int8", marks=pytest.mark.slow), "q4_0"])
def test_a_model_computes_with_quantized_linears(format: str) -> None:
    """Names, dtypes and shapes are those of the format; logits are those of decoded weights."""
    Tensor.manual_seed(0)
    full, model = Transformer(), Transformer()
    load_state_dict(model, get_state_dict(full), verbose=False)
    done = replace_linears(model, lambda name: format if name.startswith("layers.") else None)
    names = [f"layers.{i}.{m}.weight" for i in range(2) for m in ("q", "k", "v", "o", "up", "down")]
    assert dict(done.replaced) == dict.fromkeys(names, format)
    assert done.kept == ()
    state = get_state_dict(model)
    expected = get_state_dict(full)
    scales = [f"{name}_scale" for name in names if format == "int8"]
    assert set(state) == {*expected, *scales}
    assert model.head.weight is model.embedding.weight
    for seed, name in enumerate(names):
        rows, width = expected[name].shape
        parts, weight = quantised(format, rows, width, seed)
        for suffix, array in parts.items():
            tensor = state[name + suffix]
            assert tensor.shape == array.shape
            assert tensor.dtype == getattr(dtypes, array.dtype.name)
            tensor.replace(Tensor(array.copy()))
        expected[name].replace(Tensor(weight.copy()))
    ids = Tensor(np.array([[1, 7, 39, 0, 5]], np.int32))
    want = full(ids).numpy()
    assert np.allclose(model(ids).numpy(), want, atol=2e-4 * np.abs(want).max())
    assert state["layers.0.up.bias"] is model.layers[0].up.bias


def test_new_layers_take_no_memory_until_they_are_loaded() -> None:
    Tensor.rand(1).realize()  # the state of random numbers takes memory too
    before = GlobalCounters.mem_used
    model = {"a": nn.Linear(256, 256, bias=False)}
    model["a"].weight = Tensor(np.ones((256, 256), np.float32)).realize()
    assert GlobalCounters.mem_used - before == 256 * 256 * 4
    replace_linears(model, lambda name: "q8_0")
    assert GlobalCounters.mem_used == before


class Pair(NamedTuple):
    one: Any
    other: Any


def test_linears_are_found_wherever_state_dicts_find_them() -> None:
    shared = nn.Linear(32, 4)
    tied = nn.Linear(32, 4)
    tied.weight = shared.weight
    model = {
        "list": [shared, [tied]],
        "tuple": (nn.Linear(32, 8), "text", None),
        "named": Pair(shared, nn.LayerNorm(4)),
        "ordered": OrderedDict(x=nn.Linear(64, 2)),
    }
    names = set(get_state_dict(model))
    done = replace_linears(model, lambda name: "q8_0")
    assert set(get_state_dict(model)) == names
    assert set(done.replaced) == {
        *("list.0.weight", "list.1.0.weight", "tuple.0.weight", "named.one.weight"),
        "ordered.x.weight",
    }
    first, second = model["list"][0], model["list"][1][0]
    layers = (first, second, model["tuple"][0], model["named"].one, model["ordered"]["x"])
    assert all(type(layer) is QuantLinear for layer in layers)
    assert model["named"].one is first
    assert second.weight is first.weight
    assert (first.bias, second.bias) == (shared.bias, tied.bias)
    assert model["tuple"][1:] == ("text", None)
    assert type(model["named"].other) is nn.LayerNorm


def test_what_is_no_linear_is_left_and_named() -> None:
    """Convolutions, embeddings, what is tied to them, subclasses, and single tensors."""

    class Scaled(nn.Linear):  # type: ignore[misc]
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) * 2

    model = {
        "head": nn.Linear(32, 4, bias=False),
        "embedding": nn.Embedding(4, 32),
        "convolution": nn.Conv2d(32, 4, 3),
        "scaled": Scaled(32, 4),
        "experts": Tensor.empty(2, 4, 32),
        "linear": nn.Linear(32, 4),
    }
    model["head"].weight = model["embedding"].weight
    before = dict(model)
    done = replace_linears(model, lambda name: "q4_0")
    assert dict(done.replaced) == {"linear.weight": "q4_0"}
    left = ("head.weight", "embedding.weight", "convolution.weight", "scaled.weight", "experts")
    assert done.kept == left
    assert all(model[name] is before[name] for name in before if name != "linear")


def test_sharded_linears_are_named_as_such(tmp_path: Path) -> None:
    weight = np.ones((64, 64), np.float32)
    path = write_arrays(tmp_path / "model.safetensors", {"a.weight": weight, "b.weight": weight})
    model = {name: nn.Linear(64, 64, bias=False) for name in "ab"}
    model["a"].weight.shard_(("CPU:0", "CPU:1"), axis=0)
    given: dict[str, Any] = {"quant": {"*.weight": "int8"}, "progress": False}
    report = streamload.load_state_dict(model, path, **given)
    assert any("sharded: a.weight" in note for note in report.notes)
    model = {name: nn.Linear(64, 64, bias=False) for name in "ab"}
    for layer in model.values():
        layer.weight.shard_(("CPU:0", "CPU:1"), axis=0)
    with pytest.raises(ValueError, match=r"theirs are Linear on several devices \(shard_\)"):
        streamload.load_state_dict(model, path, **given)


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (
            "q4_0",
            r"'b\.weight' cannot be 'q4_0': .*blocks of 32 .* does not divide shape \(4, 40\); "
            r"write \{'b\.weight': 'int8'\}, .* or \{'b\.weight': None\} to leave it as it is",
        ),
        (
            "nf4",
            r"'a\.weight' cannot be 'nf4': rows of 32 have no whole blocks of 64 elements; write",
        ),
        (
            "q6_k",
            r"'a\.weight' cannot be 'q6_k': tinygrad computes with int8, q8_0, q4_0, nf4 only; ",
        ),
    ],
)
def test_a_weight_that_a_format_cannot_hold_is_named(format: str, message: str) -> None:
    model = {"a": nn.Linear(32, 4), "b": nn.Linear(40, 4)}
    with pytest.raises(ValueError, match=message):
        replace_linears(model, lambda name: format)
    assert all(type(layer) is nn.Linear for layer in model.values())


def test_names_of_one_weight_need_one_format() -> None:
    linear = nn.Linear(32, 4)
    model = {"a": linear, "b": linear}
    with pytest.raises(ValueError, match=r"'a\.weight' and 'b\.weight' are one weight.*None.*both"):
        replace_linears(model, {"b.weight": "q8_0"}.get)
    assert model == {"a": linear, "b": linear}


@pytest.mark.parametrize("device", DEVICES)
def test_a_load_fills_the_layers(tmp_path: Path, device: str) -> None:
    """From a checkpoint of floats, which are quantised on the way, and from one of the parts."""
    weight = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    bias = np.arange(16, dtype=np.float32)
    for format in LAYERS:
        parts, _ = quantised(format, 16, 64)
        whole = {"q.weight": weight}
        stored = {f"q.weight{suffix}": array for suffix, array in parts.items()}
        for kind, tensors in (("whole", whole), ("stored", stored)):
            tensors["q.bias"] = bias
            path = write_arrays(tmp_path / f"{format}-{kind}.safetensors", tensors)
            linear = nn.Linear(64, 16)
            linear.weight = Tensor.empty(16, 64, device=device)
            linear.bias = Tensor.empty(16, device=device)
            model = {"q": linear}
            replace_linears(model, lambda name, format=format: format)
            streamload.load_state_dict(model, path, device=device, progress=False)
            state = get_state_dict(model)
            assert np.array_equal(state["q.bias"].numpy(), bias)
            for suffix, array in parts.items():
                found = state[f"q.weight{suffix}"]
                assert found.device == device
                assert np.array_equal(found.numpy(), array)


def stored(model: Transformer) -> dict[str, Any]:
    return {n: t.numpy() for n, t in get_state_dict(model).items() if n != "head.weight"}


@pytest.mark.parametrize(
    "format",
    # each compiles the kernels of two models
    ["q8_0", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "q4_0"))],
)
def test_a_load_puts_the_layers_in_place(tmp_path: Path, format: str) -> None:
    """`quant=` with a model: when it is known to fit; where it does not, the model is as it was."""
    full = Transformer()
    path = save(tmp_path, stored(full))
    model = Transformer()
    before = get_state_dict(model)
    with pytest.raises(PlanInfeasibleError):
        streamload.load_state_dict(model, path, device="CPU", budget=1000, quant=format)
    assert get_state_dict(model) == before
    options: dict[str, Any] = {"device": "CPU", "dtype": "checkpoint", "progress": False}
    report = streamload.load_state_dict(model, path, quant=format, **options)
    expected = {name for name in before if name.startswith("layers.") and before[name].ndim > 1}
    assert set(report.errors) == expected
    assert model.head.weight is model.embedding.weight
    streamload.load_state_dict(full, path, **options)
    ids = Tensor([[1, 2, 3]], device="CPU")
    logits, found = full(ids).numpy(), model(ids).numpy()
    assert 0 < np.abs(found - logits).max() < 0.2 * np.abs(logits).max()
    again = streamload.load_state_dict(model, path, **options)  # its layers hold codes now
    assert set(again.errors) == expected
    with pytest.raises(ValueError, match="holds values already"):
        streamload.load_state_dict(full, path, quant=format, **options)


@pytest.mark.parametrize("format", ["int8", "q8_0", "q4_0"])
def test_shared_weights_are_held_once(tmp_path: Path, format: str) -> None:
    class Shared:
        def __init__(self) -> None:
            one, two, three = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
            two.weight = one.weight
            three.weight = Tensor(one.weight.uop)
            self.layers = [one, two, {"x": (one, three)}]

        def __call__(self, x: Tensor) -> Tensor:
            one, two, inner = self.layers
            for layer in (one, two, *inner["x"]):  # type: ignore[misc]
                x = layer(x)
            return x

    random = np.random.default_rng(1)
    names = ("layers.0.weight", "layers.0.bias", "layers.1.bias")
    shapes = ((64, 64), (64,), (64,))
    values = {
        n: random.standard_normal(s).astype(np.float32) for n, s in zip(names, shapes, strict=True)
    }
    path = tmp_path / "model.safetensors"
    sn.save_file(values, path)
    model = Shared()
    report = streamload.load_state_dict(model, path, quant=format, progress=False)
    one, two, inner = model.layers
    layers = (one, two, *inner["x"])
    assert {type(layer) for layer in layers} == {QuantLinear} and inner["x"][0].weight is one.weight
    assert len({id(layer.weight.uop.buffer.base) for layer in layers}) == 1
    assert len(report.errors) == 1
    w, b, c = values.values()
    x = random.standard_normal((3, 64)).astype(np.float32)
    expected = (((x @ w.T + b) @ w.T + c) @ w.T + b) @ w.T
    found = model(Tensor(x)).numpy()
    most = 0.3 if format == "q4_0" else 0.03
    assert np.linalg.norm(found - expected) < most * np.linalg.norm(expected)


def test_auto_chooses_a_format_for_a_model(tmp_path: Path) -> None:
    path = save(tmp_path, stored(Transformer()))
    options: dict[str, Any] = {"device": "CPU", "dtype": "checkpoint"}
    whole = streamload.plan(path, budget="1GB", **options).devices[0].peak_nbytes
    options |= {"progress": False, "quant": "auto"}
    report = streamload.load_state_dict(Transformer(), path, budget=whole - 1000, **options)
    assert any("auto" in note and "q8_0" in note for note in report.notes)
    assert report.errors


def test_auto_passes_over_formats_that_no_layer_has(tmp_path: Path) -> None:
    """It takes int8 where rows have no blocks, and refuses a budget for which all are too large."""

    class Layers:
        def __init__(self) -> None:
            self.layers = [nn.Linear(132, 132, bias=False) for _ in range(16)]

    arrays = {f"layers.{i}.weight": np.ones((132, 132), np.float32) for i in range(16)}
    path = write_arrays(tmp_path / "model.safetensors", arrays)
    options: dict[str, Any] = {"device": "CPU", "quant": "auto", "progress": False}
    report = streamload.load_state_dict(Layers(), path, budget="0.5MB", **options)
    assert any('quant="auto" took int8' in note for note in report.notes)
    with pytest.raises(PlanInfeasibleError, match="needs"):
        streamload.load_state_dict(Layers(), path, budget="0.1MB", **options)


@pytest.mark.parametrize("code", ["BF16", "F16", "F32"])
def test_nf4_of_every_dtype_fills_linears(tmp_path: Path, code: str) -> None:
    """The text of a weight's state is longer for bfloat16; also stored, and from one to another."""
    values = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
    paths = {}
    for each, dtype in (("BF16", ml_dtypes.bfloat16), ("F16", np.float16), ("F32", np.float32)):
        paths[each] = tmp_path / each
        paths[each].mkdir()
        data = {"l.weight": (each, (8, 128), values.astype(dtype).tobytes())}
        write_safetensors(paths[each] / "model.safetensors", data)
    stored = tmp_path / "stored"
    streamload.convert(paths[code], stored, quant="nf4", progress=False)
    for dtype in (None, "float16"):
        identity = Tensor(np.eye(128, dtype=np.float32), device="CL")
        model = {"l": nn.Linear(128, 8, bias=False)}
        options: dict[str, Any] = {"device": "CL", "progress": False}
        streamload.load_state_dict(model, paths[code], quant="nf4", dtype=dtype, **options)
        assert type(model["l"]) is QuantLinear
        found = model["l"](identity).numpy().T
        assert np.abs(found - values).max() < 0.5
        plain = {"l": nn.Linear(128, 8, bias=False)}
        replace_linears(plain, lambda name: "nf4")
        for path, quant in [(stored, None), *((path, "nf4") for path in paths.values())]:
            streamload.load_state_dict(plain, path, quant=quant, **options)
            other = plain["l"](identity).numpy().T
            assert np.abs(other - values).max() < 0.5
        streamload.load_state_dict(plain, stored, **options)
        assert np.array_equal(plain["l"](identity).numpy().T, found)


def test_a_model_with_a_captured_tinyjit_is_loaded_again(tmp_path: Path) -> None:
    class Model:
        def __init__(self) -> None:
            self.l = nn.Linear(16, 8, bias=False)
            self.forward_jit = TinyJit(self.forward)

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x).realize()

    model, x = Model(), np.ones((1, 16), np.float32)
    for seed in range(3):
        values = np.random.default_rng(seed).standard_normal((8, 16)).astype(np.float32)
        path = save(tmp_path, {"l.weight": values})
        report = streamload.load_state_dict(model, path, device="CL", progress=False)
        assert [p.name for p in report.plan.placements] == ["l.weight"]
        for _ in range(3):
            found = model.forward_jit(Tensor(x, device="CL").realize()).numpy()
        assert np.allclose(found, values.sum(1), atol=1e-5)
    assert "forward_jit.captured.ret" in get_state_dict(model)
