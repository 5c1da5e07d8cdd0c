"""torch's devices, and the parameters of modules: what stands where, and what becomes of it."""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import forked
import needs
import numpy as np
import pytest
from load_helpers import load

from streamload.codecs.cast_reference import cast_bytes
from streamload.core.dtypes import BF16, BY_NAME, F16, F32
from streamload.devices import names
from streamload.devices.base import StagedElements
from streamload.errors import (
    AllocationError,
    DeviceError,
    DeviceNotFoundError,
    StateDictMismatchError,
)

torch = needs.module("torch")
nn = torch.nn

from safetensors.torch import save_file  # noqa: E402
from torch_staged_helpers import same_bits  # noqa: E402

from streamload.devices.torch.device import FRAMEWORK, CPUDevice, TorchDevice  # noqa: E402
from streamload.devices.torch.tensors import TorchParameter  # noqa: E402


def save(folder: Path, tensors: Mapping[str, Any]) -> Path:
    path = folder / "x.safetensors"
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path
    )
    return path


def parameter(model: Any, name: str) -> TorchParameter:
    found = [p for p in FRAMEWORK.parameters(model) if name in p.names]
    assert len(found) == 1
    assert isinstance(found[0], TorchParameter)
    return found[0]


def linear(rows: int = 4, columns: int = 4, **arguments: Any) -> Any:
    return nn.Linear(columns, rows, bias=False, **arguments)


def numbers(*shape: int, seed: int = 0, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype or torch.float32)


def filled(device: Any, dtype: Any, data: bytes) -> Any:
    buffer = device.allocate(dtype, (len(data) // dtype.itemsize,))
    staging = device.staging(len(data))
    staging.view[:] = data
    device.copy(staging, 0, len(data), buffer, 0).wait()
    staging.close()
    return buffer


# --- devices --------------------------------------------------------------------------------------


def test_the_generic_path_stages_on_any_backend() -> None:
    """Bytes go through plain staging to any offset of a buffer, and are read back from there."""
    device = TorchDevice("cpu")
    assert (device.info.host_visible, device.info.threads) == (False, 0)
    data = bytes(range(256)) * 4
    buffer = device.allocate(F32, (16, 16))
    staging = device.staging(len(data) + 64)
    staging.view[64:] = data
    for at in range(0, 1024, 100):
        n = min(100, 1024 - at)
        device.copy(staging, 64 + at, n, buffer, at).wait()
    assert device.read(buffer, 0, 1024) == data
    assert device.read(buffer, 3, 77) == data[3:77]
    assert device.read(buffer, 5, 5) == b""
    staging.close()
    with pytest.raises(DeviceError, match="cpu"):
        device.window(buffer, 0, 4)
    assert device.allocated_nbytes() is None
    assert device.counters() == {}


def test_a_device_cast_is_at_its_place_and_right() -> None:
    device = TorchDevice("cpu")
    codes = np.arange(1 << 16, dtype="<u2").tobytes()
    expected = bytearray(len(codes))
    cast_bytes(BF16, F16, memoryview(codes), memoryview(expected))
    buffer = filled(device, F16, b"\xaa" * (len(codes) + 8))
    staging = device.staging(len(codes))
    staging.view[:] = codes
    device.cast_copy(StagedElements(staging, 0, len(codes), BF16), buffer, 4, F16)
    staging.close()
    assert device.read(buffer, 0, 4) == device.read(buffer, len(codes) + 4, len(codes) + 8)
    found = np.frombuffer(device.read(buffer, 4, len(codes) + 4), np.float16)
    want = np.frombuffer(expected, np.float16)
    assert ((found.view("u2") == want.view("u2")) | (np.isnan(found) & np.isnan(want))).all()


def test_windows_of_the_cpu_are_the_tensor_itself() -> None:
    device = CPUDevice("cpu")
    buffer = device.allocate(F32, (2, 3))
    values = np.arange(6, dtype=np.float32).tobytes()
    with device.window(buffer, 0, 12) as first, device.window(buffer, 12, 24) as second:
        first[:], second[:] = values[:12], values[12:]
    assert buffer.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert device.read(buffer, 4, 20) == values[4:20]
    with device.window(buffer, 8, 8) as nothing:
        assert nothing.nbytes == 0
    part = torch.zeros(10)[4:]
    with device.window(part, 4, 8) as view:
        view[:] = np.float32(7).tobytes()
    assert part.tolist() == [0, 7, 0, 0, 0, 0]


def test_a_window_that_an_error_still_shows_does_not_hide_the_error() -> None:
    """The error that was raised inside comes out, although its traceback refers to the window."""
    device = CPUDevice("cpu")
    buffer = device.allocate(F32, (4,))
    with pytest.raises(KeyError), device.window(buffer, 0, 16) as view:
        part = view[:4]
        raise KeyError(len(part))


@pytest.mark.parametrize("kind", [TorchDevice, CPUDevice])
def test_released_memory_is_gone_whoever_holds_the_tensor(kind: Any) -> None:
    device = kind("cpu")
    buffer = device.allocate(BF16, (1000,))
    storage = torch.multiprocessing.reductions.StorageWeakRef(buffer.untyped_storage())
    device.release(buffer)
    assert storage.expired()
    assert buffer.numel() == 0


@pytest.mark.parametrize("kind", [TorchDevice, CPUDevice])
def test_memory_that_cannot_be_had_is_an_error_with_the_bytes(kind: Any) -> None:
    with pytest.raises(AllocationError) as caught:
        kind("cpu").allocate(F32, (2**48,))
    assert (caught.value.device, caught.value.nbytes) == ("cpu", 2**50)


def test_the_cpu_says_what_it_is() -> None:
    info = CPUDevice("cpu").info
    assert (info.name, info.framework) == ("cpu", "torch")
    assert (info.host_visible, info.shared_memory, info.granularity_nbytes) == (True, True, 64)
    assert info.unsupported == {name for name, dtype in BY_NAME.items() if dtype.bits < 8}


# --- names and probes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "canonical"),
    [("cpu", "cpu"), ("CPU", "cpu"), ("cpu:0", "cpu"), ("cuda", "cuda:0"), ("CUDA:1", "cuda:1")],
)
def test_names_are_torchs_with_an_index(name: str, canonical: str) -> None:
    assert FRAMEWORK.canonical(name) == canonical
    assert FRAMEWORK.canonical(canonical) == canonical


@pytest.mark.parametrize(
    "name", ["cuda:99", "xpu", "mps", "hpu", "mtia", "privateuseone", "meta", "cpu:-1", "floppy"]
)
def test_a_device_that_is_not_here_is_an_error_with_its_name(name: str) -> None:
    with pytest.raises(DeviceNotFoundError) as caught:
        FRAMEWORK.device(name)
    assert caught.value.device.partition(":")[0] == name.partition(":")[0]


@pytest.mark.parametrize("name", ["hpu", "meta"])
def test_a_probe_of_what_is_not_here_says_so(name: str) -> None:
    result = FRAMEWORK.probe(name, False)
    assert not result.works
    assert result.problem


def test_the_cpu_is_the_default_and_a_candidate() -> None:
    assert FRAMEWORK.candidates()[-1] == "cpu"
    assert FRAMEWORK.trusted("cpu")
    if FRAMEWORK.candidates() != ["cpu"]:
        pytest.skip("there is an accelerator")
    assert FRAMEWORK.default_device() == "cpu"
    torch.set_default_device("meta")
    try:
        assert FRAMEWORK.default_device() == "cpu"
    finally:
        torch.set_default_device(None)


def test_loads_work_under_any_default_device(tmp_path: Path) -> None:
    """A default device of meta, as people set it to build a model, does not reach the load."""
    path = save(tmp_path, {"weight": numbers(4, 4)})
    with torch.device("meta"):
        module = linear()
        report = load(None, path, device="torch:cpu")
        load(module, path, device="cpu")
    for found in (module.weight, report.state_dict["weight"]):
        assert same_bits(found, numbers(4, 4))


def test_a_full_probe_of_the_cpu_tells_what_is_true() -> None:
    """Dtypes that add are not broken, those that do not exist are absent, casts are exact."""
    result = FRAMEWORK.probe("cpu", True)
    assert result.works
    assert set(result.dtypes) == set(BY_NAME)
    for name in ("float32", "float64", "int8", "uint8", "int64", "bool", "complex64"):
        assert result.dtypes[name] == "native"
    assert {result.dtypes[name] for name in ("float16", "bfloat16")} <= {"native", "emulated"}
    assert result.dtypes["float4_e2m1fn"] == "absent"
    device = CPUDevice("cpu")
    for src_name, dst_name in result.device_casts:
        src, dst = BY_NAME[src_name], BY_NAME[dst_name]
        codes = np.arange(1 << src.bits, dtype=f"<u{src.itemsize}").tobytes()
        want = bytearray(len(codes) // src.itemsize * dst.itemsize)
        cast_bytes(src, dst, memoryview(codes), memoryview(want))
        staging = device.staging(len(codes))
        staging.view[:] = codes
        buffer = device.allocate(dst, (1 << src.bits,))
        device.cast_copy(StagedElements(staging, 0, len(codes), src), buffer, 0, dst)
        staging.close()
        found, expected = (
            np.frombuffer(data, dst.numpy) for data in (device.read(buffer, 0, len(want)), want)
        )
        bits = f"u{dst.itemsize}"
        with np.errstate(all="ignore"):
            nans = np.isnan(found.astype(np.float32)) & np.isnan(expected.astype(np.float32))
        assert ((found.view(bits) == expected.view(bits)) | nans).all()
    assert ("bfloat16", "float32") in result.device_casts


def test_the_fingerprint_follows_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that changes what CUDA does makes a kept probe stale."""
    before = FRAMEWORK.fingerprint("cuda:0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert FRAMEWORK.fingerprint("cuda:0") != before


# --- what a module has ----------------------------------------------------------------------------


class Everything(nn.Module):  # type: ignore[misc, name-defined]
    """Parameters and buffers in every place that torch has for them."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(numbers(3))
        self.register_buffer("kept", numbers(2))
        self.register_buffer("dropped", numbers(2), persistent=False)
        self.register_buffer("none", None)
        self.register_parameter("nothing", None)
        self.plain = numbers(5)  # no part of the state
        self.list = nn.ModuleList([nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 1)])])
        self.dict = nn.ModuleDict({"one": nn.LayerNorm(3), "two": nn.BatchNorm1d(2)})
        self.parameters_list = nn.ParameterList([numbers(1), numbers(2)])
        self.parameters_dict = nn.ParameterDict({"left": numbers(2), "right": numbers(1)})


def test_names_are_those_of_state_dict() -> None:
    module = Everything()
    found = [name for p in FRAMEWORK.parameters(module) for name in p.names]
    assert sorted(found) == sorted(module.state_dict())
    assert FRAMEWORK.unstored(module) == {"dropped": "cpu"}
    assert FRAMEWORK.unstored({"a": numbers(1)}) == {}


def test_every_place_is_loaded(tmp_path: Path) -> None:
    want = {
        name: torch.full_like(tensor, i)
        for i, (name, tensor) in enumerate(Everything().state_dict().items())
    }
    path = save(tmp_path, want)
    with torch.device("meta"):
        meta = Everything()
    for module in (Everything(), meta):
        load(module, path, device="cpu")
        state = module.state_dict()
        assert all(same_bits(state[name], tensor) for name, tensor in want.items())
        assert list(state) == list(want)


def test_dicts_may_nest(tmp_path: Path) -> None:
    model: dict[str, Any] = {"a": {"b": {"c": numbers(2)}, "n": 3}, "x.y": numbers(1), "s": "text"}
    load(model, save(tmp_path, {"a.b.c": numbers(2, seed=1), "x.y": numbers(1, seed=2)}))
    assert same_bits(model["a"]["b"]["c"], numbers(2, seed=1))
    assert same_bits(model["x.y"], numbers(1, seed=2))
    assert (model["a"]["n"], model["s"]) == (3, "text")


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    model = {"a.b": torch.zeros(2), "a": {"b": torch.zeros(2)}}
    with pytest.raises(ValueError, match=r"a\.b"):
        load(model, save(tmp_path, {"a.b": numbers(2)}))
    assert not any(t.any() for t in (model["a.b"], model["a"]["b"]))  # type: ignore[index, call-overload, attr-defined]


def test_a_dict_that_holds_itself_is_refused(tmp_path: Path) -> None:
    """A cycle has no names: it is an error that says so, not the end of the stack."""
    model: dict[str, Any] = {"a": numbers(2)}
    model["again"] = model
    with pytest.raises(ValueError, match="again"):
        load(model, save(tmp_path, {"a": numbers(2)}))


def test_other_holders_of_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="list"):
        FRAMEWORK.parameters([numbers(2)])


def test_compiled_modules_have_the_names_of_what_they_wrap() -> None:
    module = linear()
    found = parameter(torch.compile(module), "weight")
    assert found.wrapped == ("_orig_mod.weight",)
    assert found.buffer().data_ptr() == module.weight.data_ptr()


# --- ties -----------------------------------------------------------------------------------------


def tied_by_object() -> Any:
    """Two layers with one parameter."""
    module = nn.Sequential(linear(), linear())
    module[1].weight = module[0].weight
    return module


def tied_by_memory() -> Any:
    """Two parameters over the same memory."""
    module = nn.Sequential(linear(), linear())
    module[1].weight.data = module[0].weight.data
    return module


def tied_by_module() -> Any:
    """One layer in two places."""
    layer = linear()
    return nn.Sequential(layer, layer)


TIED = [tied_by_object, tied_by_memory, tied_by_module]


@pytest.mark.parametrize("make", TIED)
@pytest.mark.parametrize("dtype", [None, "float64"])
def test_tied_weights_stay_tied(tmp_path: Path, make: Callable[[], Any], dtype: str | None) -> None:
    for stored in ("0.weight", "1.weight"):
        module = make()
        identities = [id(layer.weight) for layer in module]
        assert parameter(module, "0.weight").names == ("0.weight", "1.weight")
        report = load(module, save(tmp_path, {stored: numbers(4, 4, seed=1)}), dtype=dtype)
        assert module[0].weight.data_ptr() == module[1].weight.data_ptr()
        assert [id(layer.weight) for layer in module] == identities
        assert torch.equal(module[0].weight.float(), numbers(4, 4, seed=1))
        assert len(report.tied) == 1


@pytest.mark.parametrize("make", TIED)
@pytest.mark.parametrize("keep", [True, False])
def test_a_failed_load_does_not_part_what_is_tied(
    tmp_path: Path, make: Callable[[], Any], keep: bool
) -> None:
    module = make()
    first = parameter(module, "0.weight")
    if not keep:
        assert first.release() == ""
    first.invalidate(keep)
    again = parameter(module, "0.weight")
    assert again.names == ("0.weight", "1.weight")
    load(module, save(tmp_path, {"1.weight": numbers(4, 4, seed=1)}))
    assert module[0].weight.data_ptr() == module[1].weight.data_ptr()
    assert same_bits(module[0].weight, numbers(4, 4, seed=1))


def test_tied_on_meta_are_tied_when_loaded(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = tied_by_object()
    load(module, save(tmp_path, {"0.weight": numbers(4, 4)}), device="cpu")
    assert module[0].weight is module[1].weight
    assert same_bits(module[0].weight, numbers(4, 4))


def test_a_tie_whose_values_differ_is_refused(tmp_path: Path) -> None:
    both = {"0.weight": numbers(4, 4), "1.weight": numbers(4, 4)}
    load(tied_by_memory(), save(tmp_path, both))
    both["1.weight"] = numbers(4, 4, seed=1)
    with pytest.raises(StateDictMismatchError, match="values differ"):
        load(tied_by_memory(), save(tmp_path, both))


def test_freed_memory_ties_nothing(tmp_path: Path) -> None:
    module = nn.Sequential(linear(), linear())
    for layer in module:
        layer.weight.untyped_storage().resize_(0)
    found = FRAMEWORK.parameters(module)
    assert [(p.names, p.nbytes, p.span) for p in found] == [
        (("0.weight",), 0, None),
        (("1.weight",), 0, None),
    ]


FREED = """
import sys, torch, streamload
from streamload.errors import StateDictMismatchError
freed = torch.nn.Linear(4, 4, bias=False)
freed.weight.untyped_storage().resize_(0)
for module in (freed, {"weight": torch._efficientzerotensor((4, 4))}):
    try:
        streamload.load_state_dict(module, sys.argv[1], progress=False)
    except StateDictMismatchError as error:
        print("refused" if "weight" in str(error) else error, flush=True)
    else:
        weight = module["weight"] if isinstance(module, dict) else module.weight
        print("loaded" if weight.sum().item() == 16 else weight, flush=True)
"""


def test_tensors_without_memory_are_not_written_through(tmp_path: Path) -> None:
    """A tensor with elements and no storage is loaded anew or refused; nothing is at address 0."""
    path = save(tmp_path, {"weight": torch.ones(4, 4)})
    done = forked.run([sys.executable, "-c", FREED, path], forked.TORCH)
    assert done.returncode != -signal.SIGSEGV, done.stdout
    said = done.stdout.splitlines()
    assert len(said) == 2 and set(said) <= {"loaded", "refused"}, (said, done.stderr)


# --- refused --------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):  # type: ignore[misc, name-defined]
    """A subclass, as DTensor and quantized weights are."""


def nested() -> Any:
    """A nested tensor of the old layout: it has no shape."""
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)


def quantized() -> Any:
    """A quantized tensor of torch's old kind."""
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)


ODD: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": quantized,
    "nested": nested,
    "subclass": lambda: torch.ones(3).as_subclass(Wrapped),
    "subclass in a parameter": lambda: nn.Parameter(torch.ones(3).as_subclass(Wrapped)),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch._neg_view(torch.ones(3)),
    "lazy": nn.parameter.UninitializedParameter,
    "lazy buffer": nn.parameter.UninitializedBuffer,
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_block_of_bytes_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    model = {"odd": ODD[kind](), "fine": torch.zeros(2)}
    path = save(tmp_path, {"odd": torch.ones(3), "fine": torch.ones(2)})
    with pytest.raises(StateDictMismatchError, match="odd: it") as caught:
        load(model, path)
    assert len(caught.value.problems) == 1
    assert not model["fine"].any()
    # where the checkpoint does not have it, it is in nobody's way
    load(model, save(tmp_path, {"fine": torch.ones(2)}), strict=False)
    assert model["fine"].all()


def test_parts_of_one_tensor_are_written_where_they_are(tmp_path: Path) -> None:
    flat = torch.zeros(20)
    module = nn.Module()
    module.a = nn.Parameter(flat[:8].view(2, 4))
    module.b = nn.Parameter(flat[8:].view(3, 4))
    want = {"a": numbers(2, 4), "b": numbers(3, 4)}
    path = save(tmp_path, want)
    load(module, path)
    assert torch.equal(flat, torch.cat([want["a"].flatten(), want["b"].flatten()]))
    assert parameter(module, "a").release() != ""
    before = flat.clone()
    with pytest.raises(StateDictMismatchError, match="view of a larger tensor"):
        load(module, path, dtype="float16")
    assert torch.equal(flat, before)
    assert module.a.dtype is torch.float32


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_an_empty_part_of_a_tensor_is_no_obstacle(tmp_path: Path, dtype: str | None) -> None:
    """A parameter without elements stands on nothing, wherever it was cut from."""
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(10)[:0])
    load(module, save(tmp_path, {"w": torch.zeros(0)}), dtype=dtype)
    assert module.w.shape == (0,)


def test_a_view_with_gaps_is_refused(tmp_path: Path) -> None:
    """Neither written in place nor replaced: it is part of something else."""
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(8, 6)[:, :4])
    with pytest.raises(StateDictMismatchError, match="w: it is a view of a larger tensor"):
        load(module, save(tmp_path, {"w": numbers(8, 4)}))


def overlapping(kind: str) -> Any:
    """A module two of whose parameters share some bytes, and are not the same."""
    module = nn.Module()
    flat = torch.zeros(16)
    if kind == "shifted":
        module.a, module.b = nn.Parameter(flat[:12]), nn.Parameter(flat[4:])
    elif kind == "transposed":
        module.a = nn.Parameter(flat.view(4, 4))
        module.b = nn.Parameter(flat.view(4, 4).t())
    else:
        module.a = nn.Parameter(torch.zeros(8, dtype=torch.complex64))
        module.b = nn.Parameter(torch.view_as_real(module.a.data))
    return module


@pytest.mark.parametrize("kind", ["shifted", "transposed", "of another dtype"])
def test_parameters_that_overlap_are_refused(tmp_path: Path, kind: str) -> None:
    module = overlapping(kind)
    path = save(tmp_path, {name: torch.ones_like(p) for name, p in module.named_parameters()})
    with pytest.raises(StateDictMismatchError, match="shares memory with"):
        load(module, path)
    assert not module.a.any()


# --- release --------------------------------------------------------------------------------------


def test_release_gives_the_memory_back_and_keeps_the_object() -> None:
    """The storage dies although module and optimizer still hold the parameter; its grad goes."""
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.weight.grad = torch.ones(4, 4)
    storage = torch.multiprocessing.reductions.StorageWeakRef(module.weight.untyped_storage())
    weight = module.weight
    assert parameter(module, "weight").release() == ""
    assert storage.expired()
    assert module.weight is weight is optimizer.param_groups[0]["params"][0]
    assert (weight.numel(), weight.grad, weight.requires_grad) == (0, None, True)


def graph(weight: Any) -> Any:
    """A graph whose backward needs the weight's values, through a view of it."""
    return nn.functional.linear(torch.ones(2, 4, requires_grad=True), weight)


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "graph": graph,
    "view": lambda weight: weight[1:],
    "detached": lambda weight: weight.detach(),
    "numpy": lambda weight: weight.detach().numpy(),
    "storage": lambda weight: weight.untyped_storage(),
    "numpy of a slice": lambda weight: weight.detach().numpy()[2:],
    "dlpack": lambda weight: np.from_dlpack(weight.detach()),
}


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("make", [linear, lambda: tied_by_memory()])
def test_memory_that_others_hold_is_not_released(kind: str, make: Callable[[], Any]) -> None:
    module = make()
    name, weight = next(module.named_parameters())
    weight.grad = torch.ones(4, 4)
    values, address = weight.detach().clone(), weight.data_ptr()
    holder = HOLDERS[kind](weight)
    p = parameter(module, name)
    assert "holds its memory" in p.release()
    for _, found in module.named_parameters():
        assert (found.data_ptr(), found.requires_grad) == (address, True)
        assert same_bits(found, values)
    assert same_bits(weight.grad, torch.ones(4, 4))
    del holder
    gc.collect()
    assert p.release() == ""
    assert weight.numel() == 0


def test_a_cycle_of_garbage_does_not_hold_memory() -> None:
    module = linear()

    class Node:
        pass

    node: Any = Node()
    node.me, node.view = node, module.weight.detach()
    del node
    assert parameter(module, "weight").release() == ""


def test_a_graph_over_a_leaf_notices_that_it_was_replaced(tmp_path: Path) -> None:
    """backward() through a graph that saved the parameter itself raises: its values are new."""
    for transposed in (False, True):
        weight = nn.Parameter(numbers(4, 4).t() if transposed else numbers(4, 4))
        model = {"weight": weight}
        loss = (torch.ones(2, 4, requires_grad=True) @ weight).sum()
        load(model, save(tmp_path, {"weight": numbers(4, 4, seed=1)}))
        assert same_bits(weight, numbers(4, 4, seed=1))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_graph_over_half_written_memory_notices(tmp_path: Path) -> None:
    module = linear()
    loss = (torch.ones(2, 4, requires_grad=True) @ module.weight).sum()
    parameter(module, "weight").invalidate(keep=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_values_of_a_graph_are_released_without_a_warning() -> None:
    """A buffer that was computed, and is no leaf, is like any other; nothing is warned of."""
    module = nn.Module()
    module.register_buffer("scale", nn.Parameter(numbers(3)) * 2)
    with warnings.catch_warnings(action="error"):
        assert parameter(module, "scale").release() == ""


# --- attach ---------------------------------------------------------------------------------------


class Special(nn.Parameter):  # type: ignore[misc, name-defined]
    """A parameter of a class of its own."""


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("meta", [True, False])
def test_class_attributes_grad_flag_and_hooks_stay(
    tmp_path: Path, meta: bool, requires_grad: bool
) -> None:
    """From meta or replaced: the subclass, what was set on it, and hooks that can be removed."""
    with torch.device("meta" if meta else "cpu"):
        module = linear()
        module.weight = Special(torch.empty(4, 4), requires_grad=requires_grad)
    module.eval()
    module.weight.tag = {"some": "thing"}
    seen: list[str] = []
    calls = [module.register_forward_hook(lambda *_: seen.append("forward"))]
    if requires_grad:
        calls.append(module.weight.register_hook(lambda grad: seen.append("grad")))
        accumulate = module.weight.register_post_accumulate_grad_hook
        calls.append(accumulate(lambda parameter: seen.append("accumulated")))
    weight = module.weight
    load(module, save(tmp_path, {"weight": numbers(4, 4)}), device="cpu", dtype="float64")
    assert type(module.weight) is Special
    assert (module.weight is weight) is not meta
    assert (module.weight.requires_grad, module.weight.is_leaf) == (requires_grad, True)
    assert module.weight.tag == {"some": "thing"}
    assert not module.training
    x = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    module(x).sum().backward()
    assert seen == ["forward", "grad", "accumulated"][: len(calls)]
    assert (module.weight.grad is not None) == requires_grad
    seen.clear()
    for call in calls:
        call.remove()
    module(x).sum().backward()
    assert seen == []
    assert not [key for key in vars(module.weight) if key.startswith("_streamload")]


@pytest.mark.parametrize("dtype", [None, "float64"])
def test_an_optimizer_goes_on_with_the_loaded_weights(tmp_path: Path, dtype: str | None) -> None:
    """It refers to the same parameters, in place or replaced, and its next step changes them."""
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    load(module, save(tmp_path, {"weight": numbers(4, 4)}), dtype=dtype)
    module(torch.ones(1, 4, dtype=module.weight.dtype)).sum().backward()
    assert module.weight.grad.dtype is module.weight.dtype
    optimizer.step()
    assert torch.equal(module.weight.float(), numbers(4, 4) - 1)


def test_grads_stay_with_parameters_that_are_written_in_place(tmp_path: Path) -> None:
    module = linear()
    path = save(tmp_path, {"weight": numbers(4, 4)})
    module.weight.grad = torch.ones(4, 4)
    load(module, path)
    assert same_bits(module.weight.grad, torch.ones(4, 4))
    load(module, path, dtype="float64")
    assert module.weight.grad is None


def test_an_integer_where_a_float_was_needs_no_grad(tmp_path: Path) -> None:
    """A quantized checkpoint into a module on meta: the parameter is there, without a gradient."""
    with torch.device("meta"):
        module = linear()
    path = save(tmp_path, {"weight": torch.ones(4, 4, dtype=torch.int8)})
    for _ in range(2):
        load(module, path, device="cpu")
        assert isinstance(module.weight, nn.Parameter)
        assert (module.weight.dtype, module.weight.requires_grad) == (torch.int8, False)


ANY_DTYPE = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
    torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.mark.parametrize("dtype", ANY_DTYPE, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 3)])
def test_every_dtype_and_shape_goes_in(tmp_path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    """In place, from meta and into a dict: the bytes are those of the file."""
    code = torch.randint(0, 2, shape, dtype=torch.uint8)
    want = code.to(torch.float32).to(dtype) if dtype.is_floating_point else code.to(dtype)
    path = save(tmp_path, {"it": want})
    for device in ("cpu", "meta"):
        module = nn.Module()
        floats = dtype.is_floating_point or dtype.is_complex
        empty = torch.empty(shape, dtype=dtype, device=device)
        module.it = nn.Parameter(empty, requires_grad=floats)
        load(module, path, device="cpu", dtype="checkpoint")
        assert same_bits(module.it, want)
    found = load(None, path, device="torch:cpu", dtype="checkpoint").state_dict["it"]
    assert same_bits(found, want)


def test_other_memory_formats_are_replaced_and_right(tmp_path: Path) -> None:
    """A channels_last convolution, and a transposed parameter, get the file's values."""
    module = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    module.t = nn.Parameter(torch.zeros(3, 5).t())
    assert not module.weight.is_contiguous()
    identities = [id(p) for p in module.parameters()]
    want = {n: numbers(*p.shape, seed=1) for n, p in module.named_parameters()}
    report = load(module, save(tmp_path, want))
    assert all(same_bits(p, want[n]) for n, p in module.named_parameters())
    assert [id(p) for p in module.parameters()] == identities
    actions = {p.name: p.action for p in report.plan.placements}
    assert actions == {"weight": "replace", "t": "replace", "bias": "in_place"}


def test_an_expanded_buffer_counts_what_it_holds(tmp_path: Path) -> None:
    """Elements that share one number are replaced; the memory that goes is that one number's."""
    model = {"w": torch.zeros(1).expand(1000)}
    assert parameter(model, "w").nbytes <= 4
    load(model, save(tmp_path, {"w": numbers(1000)}))
    assert same_bits(model["w"], numbers(1000))


def test_recurrent_layers_compute_with_what_was_loaded(tmp_path: Path) -> None:
    want = nn.LSTM(3, 4)
    with torch.device("meta"):
        meta = nn.LSTM(3, 4)
    path = save(tmp_path, want.state_dict())
    for module in (nn.LSTM(3, 4), meta):
        load(module, path, device="cpu")
        x = numbers(5, 1, 3)
        assert torch.equal(module(x)[0], want(x)[0])


# --- inference mode -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "float64"])
@pytest.mark.parametrize("meta", [True, False])
def test_a_load_in_inference_mode_leaves_parameters_that_train(
    tmp_path: Path, meta: bool, dtype: str | None
) -> None:
    with torch.device("meta" if meta else "cpu"):
        module = linear()
    path = save(tmp_path, {"weight": numbers(4, 4)})
    with torch.inference_mode():
        load(module, path, device="cpu", dtype=dtype)
    assert module.weight.requires_grad
    module(torch.ones(1, 4, dtype=module.weight.dtype)).sum().backward()
    assert module.weight.grad is not None


@pytest.mark.parametrize("dtype", [None, "float64"])
@pytest.mark.parametrize("outside", [True, False])
def test_modules_made_in_inference_mode_can_be_loaded_and_used(
    tmp_path: Path, outside: bool, dtype: str | None
) -> None:
    with torch.inference_mode():
        module = linear()
    path = save(tmp_path, {"weight": numbers(4, 4)})
    with torch.inference_mode(not outside):
        load(module, path, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(module.weight.float(), numbers(4, 4))
        module(torch.ones(1, 4, dtype=module.weight.dtype))
    with torch.inference_mode():
        module(torch.ones(1, 4, dtype=module.weight.dtype))


def test_a_refused_release_leaves_inference_tensors_what_they_are() -> None:
    with torch.inference_mode():
        module = linear()
        holder = module.weight.view(-1)
    p = parameter(module, "weight")
    values = module.weight.detach().clone()
    assert p.release() != ""
    assert module.weight.is_inference()
    p.invalidate(keep=True)
    p.revive()
    assert same_bits(module.weight, values)
    assert holder.shape == (16,)


# --- invalid and back -----------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", [None, "float64"])
def test_an_invalid_parameter_raises_and_a_second_load_mends_it(
    tmp_path: Path, keep: bool, dtype: str | None
) -> None:
    module = nn.Sequential(linear(), nn.ReLU())
    weight = module[0].weight
    weight.tag = "mine"
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    hook_calls: list[int] = []
    weight.register_hook(lambda grad: hook_calls.append(1))
    p = parameter(module, "0.weight")
    address = weight.data_ptr()
    if not keep:
        assert p.release() == ""
    p.invalidate(keep)
    assert p.invalid
    assert module[0].weight.device.type == "meta"
    assert isinstance(module[0].weight, nn.Parameter)
    assert module[0].weight.shape == (4, 4)
    with pytest.raises((RuntimeError, NotImplementedError)):
        module(torch.ones(1, 4)).sum().item()
    again = parameter(module, "0.weight")
    assert (again.invalid, again.nbytes) == (True, 64 if keep else 0)
    assert again.device == "cpu"
    report = load(module, save(tmp_path, {"0.weight": numbers(4, 4)}), dtype=dtype)
    assert module[0].weight is weight is optimizer.param_groups[0]["params"][0]
    assert torch.equal(weight.float(), numbers(4, 4))
    assert (weight.tag, weight.requires_grad) == ("mine", True)
    assert vars(weight) == {"tag": "mine"}
    in_place = keep and dtype is None
    assert report.plan.placements[0].action == (
        "in_place" if in_place else "replace" if keep else "new"
    )
    assert (weight.data_ptr() == address) >= in_place
    module(torch.ones(1, 4, dtype=weight.dtype)).sum().backward()
    assert hook_calls == [1]


USES: dict[str, Callable[[Any], Any]] = {
    "linear": lambda w: nn.functional.linear(torch.ones(1, 4), w),
    "linear with a bias": lambda w: nn.functional.linear(torch.ones(1, 4), w, torch.ones(4)),
    "matmul": lambda w: torch.ones(1, 4) @ w,
    "bmm": lambda w: torch.bmm(torch.ones(1, 1, 4), w[None]),
    "conv": lambda w: nn.functional.conv1d(torch.ones(1, 4, 3), w[:, :, None]),
    "embedding": lambda w: nn.functional.embedding(torch.tensor([1]), w),
    "add": lambda w: w + 1,
    "norm": lambda w: nn.functional.layer_norm(torch.ones(1, 4), (4,), w[0]),
    "detached": lambda w: torch.ones(1, 4) @ w.detach(),
    "data": lambda w: torch.ones(1, 4) @ w.data,
    "state": lambda w: nn.ParameterList([w]).state_dict()["0"] @ torch.ones(4, 1),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", [nn.Parameter, lambda tensor: tensor])
def test_nothing_is_computed_with_an_invalid_tensor(use: str, kind: Callable[[Any], Any]) -> None:
    """Values never come out: torch's own matrix products on the CPU do not notice a meta tensor."""
    model = {"w": kind(numbers(4, 4))}
    parameter(model, "w").invalidate(keep=True)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises((RuntimeError, NotImplementedError)):
            USES[use](model["w"]).sum().item()


def test_invalid_twice_is_invalid_once() -> None:
    module = linear()
    weight = module.weight
    for _ in range(3):
        parameter(module, "weight").invalidate(keep=True)
    parameter(module, "weight").revive()
    assert module.weight is weight
    assert vars(weight) == {}


def test_an_invalid_parameter_that_was_cast_meanwhile_is_right(tmp_path: Path) -> None:
    """`module.bfloat16()` on an invalid float16 parameter raises, or a load after it is right."""
    module = linear(dtype=torch.float16)
    parameter(module, "weight").invalidate(keep=True)
    with suppress(DeviceError):
        module.bfloat16()
    load(module, save(tmp_path, {"weight": numbers(4, 4, dtype=torch.float32)}))
    assert module.weight.dtype in (torch.float16, torch.bfloat16)
    assert same_bits(module.weight, numbers(4, 4).to(module.weight.dtype))


def test_an_invalid_module_can_be_copied_and_pickled(tmp_path: Path) -> None:
    path = save(tmp_path, {"weight": numbers(4, 4)})
    module = linear()
    parameter(module, "weight").invalidate(keep=True)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.weight.device.type == "meta"
        load(twin, path, device="cpu")
        assert same_bits(twin.weight, numbers(4, 4))
        assert module.weight.device.type == "meta"
        assert same_bits(pickle.loads(pickle.dumps(twin)).weight, numbers(4, 4))


def test_what_was_kept_goes_with_the_module() -> None:
    module = linear()
    memory = torch.multiprocessing.reductions.StorageWeakRef(module.weight.untyped_storage())
    p = parameter(module, "weight")
    p.invalidate(keep=True)
    assert not memory.expired()
    gone = weakref.ref(module)
    del module, p
    gc.collect()
    assert gone() is None
    assert memory.expired()


def test_the_framework_is_found_by_what_the_model_is() -> None:
    """Modules and dicts of tensors are torch's; its file is not imported to know that."""
    assert names.framework_of(linear()) == "torch"
    assert names.framework_of({"a": {"b": numbers(1)}}) == "torch"
    assert names.framework("torch") is FRAMEWORK
