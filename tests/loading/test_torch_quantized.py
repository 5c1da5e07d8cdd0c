"""`quant=` with modules of torch: what they hold, what they compute, and what is undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from load_helpers import load
from quant_bounds import elements_of
from quant_kernels_helpers import columns_of

import streamload
from streamload.codecs.scheme import SCHEMES
from streamload.core.dtypes import F32
from streamload.errors import PlanInfeasibleError, UnsupportedCastError

torch = needs.module("torch")
import safetensors.torch as st  # noqa: E402
from product_bounds import worst  # noqa: E402
from torch import nn  # noqa: E402

from streamload.devices.torch import product  # noqa: E402
from streamload.devices.torch import quantized as torch_modules  # noqa: E402
from streamload.devices.torch.quantized import QuantLinear  # noqa: E402

NAMES = tuple(name for name in torch_modules.computed() if columns_of(name) <= 32)
WIDE, NARROW = 160, 96


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(NARROW, WIDE)
        self.down = nn.Linear(WIDE, NARROW, bias=False)
        self.norm = nn.LayerNorm(NARROW)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Small(nn.Module):
    """A model with layers, an embedding and a head that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, NARROW)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(NARROW, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = torch.arange(24).reshape(2, 12)


def empty(device: str = "meta", make: Callable[[], Any] = Small) -> Any:
    with torch.device(device):
        return make().eval()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Path]:
    torch.manual_seed(1)
    model = Small().eval()
    path = tmp_path / "model.safetensors"
    state = {name: t.clone() for name, t in model.state_dict().items() if name != "head.weight"}
    st.save_file(state, path)
    return model, path


def error(found: Any, expected: Any) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


#: The most that the small model's logits are off by.
ERRORS = {"int8": 0.01, "bitsandbytes-int8": 0.01, "q8_0": 0.01, "q4_0": 0.08}


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_linears_hold_the_parts_and_compute_with_them(
    saved: tuple[Any, Path], name: str, device: str
) -> None:
    expected, path = saved
    model = empty(device)
    report = load(model, path, quant=name, device="cpu")
    parts = load(None, path, quant=name, device="torch:cpu").state_dict
    state = model.state_dict()
    assert state.keys() - {"head.weight"} == parts.keys()
    for part, tensor in parts.items():
        assert state[part].dtype == tensor.dtype
        assert torch.equal(state[part], tensor)
    assert [type(layer.up) for layer in model.layers] == [QuantLinear] * 2
    assert type(model.head) is nn.Linear and model.head.weight is model.embed.weight
    assert report.resident_nbytes < 0.6 * load(empty(), path, device="cpu").resident_nbytes
    assert error(model(IDS), expected(IDS)) < ERRORS.get(name, 0.15)
    module = model.layers[0].up
    made = SCHEMES[name].of((WIDE, NARROW), F32)
    values = {p.suffix: module._buffers[p.name("weight")].numpy() for p in made.parts}
    np.testing.assert_allclose(module.weight, elements_of(made, values), rtol=1e-6, atol=1e-8)
    x = torch.randn(3, NARROW)
    assert worst(module(x), x, module.weight, module.bias) < 1


@pytest.mark.parametrize("name", ["nf4-nested", "int8", "q4_0"])
def test_a_weight_is_decoded_in_pieces(
    saved: tuple[Any, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = saved
    model = empty()
    load(model, path, quant=name, device="cpu")
    whole = model.layers[0].up.weight
    monkeypatch.setattr(product, "_PIECE_NUMEL", 320)
    monkeypatch.setattr(product, "_host_kernel_of", lambda *_: None)
    assert torch.equal(model.layers[0].up.weight, whole)
    half = model.layers[0].up.dense("weight", torch.bfloat16)
    assert torch.equal(half, whole.to(torch.bfloat16))


def test_a_loaded_model_is_loaded_again(saved: tuple[Any, Path], tmp_path: Path) -> None:
    _, path = saved
    model = empty()
    load(model, path, quant="nf4-nested", device="cpu")
    memory = {name: t.data_ptr() for name, t in model.state_dict().items()}
    before = model(IDS)
    torch.manual_seed(2)
    other = Small().eval()
    state = {name: t.clone() for name, t in other.state_dict().items() if name != "head.weight"}
    st.save_file(state, tmp_path / "other.safetensors")
    load(model, tmp_path / "other.safetensors")
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == memory
    assert error(model(IDS), other(IDS)) < 0.15
    load(model, path, quant="nf4-nested")
    assert torch.equal(model(IDS), before)


def test_modules_are_copied_moved_and_saved(saved: tuple[Any, Path]) -> None:
    _, path = saved
    model = empty()
    load(model, path, quant="nf4", device="cpu")
    logits = model(IDS)
    other = copy.deepcopy(model)
    assert torch.equal(other(IDS), logits)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    other.layers[0].up._buffers["weight"].zero_()
    other.load_state_dict(state)
    assert torch.equal(other(IDS), logits)
    other.to(torch.bfloat16)
    assert other.layers[0].up.weight.dtype is torch.bfloat16
    absmax = other.state_dict()["layers.0.up.weight.absmax"]
    assert torch.equal(absmax, state["layers.0.up.weight.absmax"])
    assert error(other(IDS).float(), logits) < 0.02


@pytest.mark.parametrize("fails_at", range(6))
def test_a_move_that_fails_leaves_all_parts(saved: tuple[Any, Path], fails_at: int) -> None:
    _, path = saved
    model = empty()
    load(model, path, quant="nf4-nested", device="cpu")
    before = model(IDS)
    calls = iter(range(1000))

    def move(tensor: Any) -> Any:
        if next(calls) == fails_at:
            raise torch.OutOfMemoryError("no memory")
        return tensor.clone()

    with pytest.raises(torch.OutOfMemoryError):
        model.layers[0].up._apply(move)
    assert torch.equal(model(IDS), before)


def test_patterns_choose(saved: tuple[Any, Path]) -> None:
    _, path = saved
    model = empty()
    load(model, path, quant={"*0.up.weight": "q8_0", "*.down.*": "nf4"}, device="cpu")
    said = {name: getattr(m, torch_modules.CODED, {}) for name, m in model.named_modules()}
    assert {name: s["weight"][0] for name, s in said.items() if s} == {
        "layers.0.up": "q8_0",
        "layers.0.down": "nf4",
        "layers.1.down": "nf4",
    }
    assert type(model.layers[1].up) is nn.Linear


def test_auto_takes_the_least_loss_that_fits(saved: tuple[Any, Path]) -> None:
    """As without a model: nothing where all fits, then one format after the other."""
    _, path = saved
    sizes = {}
    for name in ("q8_0", "nf4"):
        sizes[name] = load(empty(), path, quant=name, device="cpu").plan.devices[0].peak_nbytes
    model = empty()
    load(model, path, quant="auto", device="cpu")
    assert type(model.layers[0].up) is nn.Linear
    for name, nbytes in sizes.items():
        model = empty()
        report = load(model, path, quant="auto", device="cpu", budget=nbytes)
        assert getattr(model.layers[0].up, torch_modules.CODED)["weight"][0] == name
        assert any(f'quant="auto" took {name}' in note for note in report.notes)


def test_what_others_need_as_it_is_stays(saved: tuple[Any, Path]) -> None:
    _, path = saved
    model = empty()
    report = load(model, path, quant={"embed.weight": "q8_0", "*": "q8_0"}, device="cpu")
    assert type(model.head) is nn.Linear
    (note,) = (note for note in report.notes if "not quantised" in note)
    assert "1 tensors of 18.43 kB" in note and "embed.weight" in note
    with pytest.raises(ValueError, match="theirs are Embedding and Linear, which share it"):
        load(empty(), path, quant={"embed.weight": "q8_0"}, device="cpu")


def test_linears_that_share_a_weight_share_its_codes(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64, bias=False)])
            self.layers[1].weight = self.layers[0].weight

    torch.manual_seed(1)
    values = {"layers.0.weight": torch.randn(64, 64), "layers.0.bias": torch.randn(64)}
    st.save_file(values, tmp_path / "model.safetensors")
    model = empty("meta", Twice)
    load(model, tmp_path / "model.safetensors", quant={"layers.0.weight": "nf4"}, device="cpu")
    one, other = model.layers
    assert type(one) is type(other) is QuantLinear
    assert one._buffers["weight"] is other._buffers["weight"]
    assert one._buffers["weight.absmax"] is other._buffers["weight.absmax"]
    assert error(other.weight, values["layers.0.weight"]) < 0.15


def linears(model: Any) -> dict[str, Any]:
    return {
        name: (type(m), list(m._parameters.items()), list(m._buffers.items()), vars(m).keys())
        for name, m in model.named_modules()
    }


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_load_that_does_not_begin_leaves_the_model(
    saved: tuple[Any, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = saved
    model = empty(device)
    before, values = linears(model), model.state_dict() if device == "cpu" else {}
    values = {name: t.clone() for name, t in values.items()}

    def same() -> bool:
        now = linears(model)
        kept = all(torch.equal(t, values[n]) for n, t in model.state_dict().items() if values)
        return kept and str(now) == str(before)

    with pytest.raises(PlanInfeasibleError):
        load(model, path, quant="nf4", device="cpu", budget=20_000)
    assert same()

    def fail(*_: Any) -> None:
        raise OSError("gone")

    monkeypatch.setattr("streamload.loading.load.stream", fail)
    with pytest.raises(OSError, match="gone"):
        load(model, path, quant="nf4", device="cpu")
    assert same()


def test_what_has_no_whole_blocks_is_refused(tmp_path: Path) -> None:
    st.save_file({"layers.0.weight": torch.randn(64, 50)}, tmp_path / "model.safetensors")
    model = empty("meta", lambda: one_linear(50, 64))
    with pytest.raises(UnsupportedCastError, match=r'"layers\.0\.weight": None'):
        load(model, tmp_path / "model.safetensors", quant="q8_0", device="cpu")
    assert type(model["layers"][0]) is nn.Linear


def one_linear(inputs: int, outputs: int) -> Any:
    return nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(inputs, outputs, bias=False)])})


def test_a_load_that_fails_is_completed_by_another(
    saved: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, path = saved
    data = path.read_bytes()
    model = empty()
    checkpoint = streamload.open_checkpoint(path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(streamload.errors.StreamloadError):
        load(model, checkpoint, quant="nf4", device="cpu")
    path.write_bytes(data)
    load(model, path, quant="nf4", device="cpu")
    assert error(model(IDS), expected(IDS)) < 0.15


def test_no_wider_weight_is_held(tmp_path: Path) -> None:
    torch.manual_seed(1)
    st.save_file({"layers.0.weight": torch.randn(4096, 1024)}, tmp_path / "model.safetensors")
    model = empty("meta", lambda: one_linear(1024, 4096))
    load(model, tmp_path / "model.safetensors", quant="q8_0", device="cpu")
    for _ in range(2):
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        assert held == 4096 * 1024 // 32 * 34
        assert model["layers"][0](torch.ones(1024)).isfinite().all()


def test_formats_without_a_module_are_refused() -> None:
    with pytest.raises(ValueError, match="not with other"):
        torch_modules.swapping(nn.Module(), [], {"a.weight": "other"})


# --- writes ---------------------------------------------------------------------------------------


def _vectors(weight: Any) -> None:
    torch.nn.utils.vector_to_parameters(torch.zeros(weight.numel()), [weight])


def _in_inference_mode(weight: Any) -> None:
    with torch.inference_mode():
        weight.t().mul_(2)


def _assign(weight: Any) -> None:
    weight.data = torch.zeros(WIDE, NARROW)


def _rows(weight: Any) -> None:
    for row in weight:
        row.zero_()


WRITES: dict[str, Callable[[Any], object]] = {
    "zero_": lambda w: w.zero_(),
    "item": lambda w: w.__setitem__(0, 1.0),
    "iadd": lambda w: w.__iadd__(1),
    "data in place": lambda w: w.data.copy_(torch.ones(WIDE, NARROW)),
    "data": _assign,
    "out": lambda w: torch.add(torch.ones(WIDE, NARROW), 1, out=w),
    "view": lambda w: w.view(-1)[3:5].fill_(1),
    "transpose": lambda w: w.T.zero_(),
    "detach": lambda w: w.detach().zero_(),
    "same dtype": lambda w: w.to(torch.float32).contiguous().zero_(),
    "chunk": lambda w: w.chunk(2)[1].zero_(),
    "rows": _rows,
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "init": lambda w: nn.init.normal_(w),
    "vectors": _vectors,
    "inference mode": _in_inference_mode,
    "memory": lambda w: w.set_(torch.zeros(WIDE, NARROW)),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_write_to_a_decoded_weight_raises(saved: tuple[Any, Path], how: str) -> None:
    _, path = saved
    model = empty()
    load(model, path, quant="int8", device="cpu")
    module = model.layers[0].up
    before = module.weight.clone()
    with pytest.raises(RuntimeError, match=r"layers\.0\.up\.weight .*module\.weight = torch\.nn"):
        WRITES[how](module.weight)
    assert torch.equal(module.weight, before) and not module.requantized.numel


def test_a_decoded_weight_reads_as_a_plain_tensor(saved: tuple[Any, Path], tmp_path: Path) -> None:
    """Results, copies, files and parameters made of it are plain; arrays cannot be written."""
    _, path = saved
    model = empty()
    load(model, path, quant="q8_0", device="cpu")
    weight = model.layers[0].up.weight
    results = (
        weight + 1,
        weight.clone(),
        weight.bfloat16(),
        copy.deepcopy(weight),
        weight @ weight.T,
    )
    assert {type(each) for each in results} == {torch.Tensor}
    own = nn.Parameter(weight.clone()), nn.Parameter(model.layers[0].up.weight)
    assert {type(each) for each in own} == {nn.Parameter}
    own[1].data.zero_()
    torch.save({"w": weight}, tmp_path / "w.pt")
    st.save_file({"w": weight}, tmp_path / "w.safetensors")
    for back in (torch.load(tmp_path / "w.pt"), st.load_file(tmp_path / "w.safetensors")):
        assert type(back["w"]) is torch.Tensor and torch.equal(back["w"], weight)
    with pytest.raises(ValueError, match="read-only"):
        weight.numpy()[0] = 1
    with pytest.raises(BufferError, match=r"layers\.0\.up\.weight"):
        torch.from_dlpack(weight)


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_in_place_of_a_weight_is_quantized(
    saved: tuple[Any, Path], tmp_path: Path, name: str
) -> None:
    """Into the codes that a load makes of it; errors are counted; anything else is refused."""
    _, path = saved
    model = empty()
    load(model, path, quant=name, device="cpu")
    torch.manual_seed(2)
    other = Small().eval()
    state = {n: t.clone() for n, t in other.state_dict().items() if n != "head.weight"}
    st.save_file(state, tmp_path / "other.safetensors")
    expected = empty()
    load(expected, tmp_path / "other.safetensors", quant=name, device="cpu")
    module, wanted = model.layers[0].up, expected.layers[0].up
    memory = module._buffers["weight"].data_ptr()
    module.weight = nn.Parameter(other.layers[0].up.weight.detach())
    assert module._buffers["weight"].data_ptr() == memory
    assert all(torch.equal(t, wanted._buffers[n]) for n, t in module._buffers.items())
    off = error(module.weight, other.layers[0].up.weight)
    assert module.requantized.relative == pytest.approx(off, rel=0.1 if "nested" in name else 1e-3)
    with pytest.raises(TypeError, match=r"module\.weight = torch\.nn\.Parameter"):
        module.weight = torch.zeros(WIDE, NARROW)
    with pytest.raises(ValueError, match=r"expected floats of the shape \[160, 96\]"):
        module.weight = nn.Parameter(torch.zeros(3, 3))
    before = module.weight.clone()
    with pytest.raises(RuntimeError, match=f"up.weight is held as {name}"):
        model.load_state_dict({"layers.0.up.weight": torch.zeros(WIDE, NARROW)}, strict=False)
    assert torch.equal(module.weight, before)


def dequantized(model: Any, make: Callable[[], Any] = Small) -> Any:
    """A plain model of the values that another one decodes to."""
    plain = make().eval()
    for module, other in zip(plain.modules(), model.modules(), strict=True):
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(other.weight.detach().clone())
            module.bias = other.bias
        elif isinstance(module, (nn.Embedding, nn.LayerNorm)):
            module.load_state_dict(other.state_dict())
    return plain


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"init_lora_weights": False}),
    "DoRA": ("LoraConfig", {"init_lora_weights": False, "use_dora": True}),
    "PiSSA": ("LoraConfig", {"init_lora_weights": "pissa"}),
    "OLoRA": ("LoraConfig", {"init_lora_weights": "olora"}),
    "IA3": ("IA3Config", {"feedforward_modules": ["down"], "init_ia3_weights": False}),
    "LoKr": ("LoKrConfig", {"init_weights": False}),
    "HRA": ("HRAConfig", {"init_weights": False}),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", ["int8", "nf4-nested"])
def test_what_peft_merges_is_quantized_again(
    saved: tuple[Any, Path], adapter: str, name: str
) -> None:
    """As in the dequantised model, off by what quantising loses: merged, unmerged and unloaded."""
    peft = needs.module("peft", needed=False)
    _, path = saved
    model = empty()
    load(model, path, quant=name, device="cpu")
    models = [model, dequantized(model)]
    before = model(IDS)
    kind, options = ADAPTERS[adapter]
    found: list[list[Any]] = []
    for each in models:
        torch.manual_seed(3)
        config = getattr(peft, kind)(target_modules=["up", "down"], **options)
        with_adapter = peft.get_peft_model(each, config).eval()
        logits = [with_adapter(IDS)]
        with_adapter.merge_adapter()
        logits.append(with_adapter(IDS))
        with_adapter.unmerge_adapter()
        logits.append(with_adapter(IDS))
        logits.append(with_adapter.merge_and_unload(safe_merge=True)(IDS))
        found.append(logits)
    most = 0.05 if name == "int8" else 0.3  # IA3 divides by what it multiplied with
    assert all(error(mine, theirs) < most for mine, theirs in zip(*found, strict=True))
    if adapter not in ("PiSSA", "OLoRA"):  # which take out what they add
        assert error(found[0][3], before) > 2 * error(found[0][3], found[1][3])
    assert 0 < model.layers[0].up.requantized.relative < most


def test_peft_wraps_no_codes(saved: tuple[Any, Path]) -> None:
    """A weight named in ``target_parameters`` is refused, others are wrapped."""
    peft = needs.module("peft", needed=False)
    _, path = saved
    model = empty()
    load(model, path, quant={"*up*": "int8"}, device="cpu")
    config = peft.LoraConfig(target_modules=[], target_parameters=["down.weight"])
    assert "lora_A" in str(peft.get_peft_model(copy.deepcopy(model), config))
    config = peft.LoraConfig(target_modules=[], target_parameters=["up.weight"])
    with pytest.raises(ValueError, match=r"layers\.0\.up\.weight by target_parameters=.*codes"):
        peft.get_peft_model(model, config)


@pytest.mark.parametrize("name", ["int8", "nf4-nested"])
def test_torch_fx_traces_quantized_modules(saved: tuple[Any, Path], name: str) -> None:
    _, path = saved
    model = empty()
    load(model, path, quant=name, device="cpu")
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(IDS), model(IDS))
    called = {str(node.target) for node in traced.graph.nodes if node.op == "call_module"}
    assert {"layers.0.up", "layers.1.down"} <= called


@pytest.mark.slow
def test_compiled_code_loses_no_write(saved: tuple[Any, Path]) -> None:
    _, path = saved
    model = empty()
    load(model, path, quant="int8", device="cpu")
    module = model.layers[0].up

    def write() -> Any:
        return module.weight[0].zero_()

    def read(x: Any) -> Any:
        return module(x.to(module.weight.dtype)) * module.weight.norm()

    with pytest.raises(RuntimeError, match="cannot write"):
        torch.compile(write, backend="eager")()
    x = torch.randn(2, NARROW)
    assert torch.equal(torch.compile(read, backend="eager")(x), read(x))


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "dispatch_model", "hook"])
@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_accelerate_moves_no_codes(
    saved: tuple[Any, Path], tmp_path: Path, name: str, how: str
) -> None:
    """It would replace them by decoded values; what offloads a model leaves it as it was."""
    accelerate = needs.module("accelerate")
    _, path = saved
    model = empty()
    load(model, path, quant=name, device="cpu")
    expected = model(IDS)
    calls: dict[str, Callable[[], object]] = {
        "cpu_offload": lambda: accelerate.cpu_offload(model, "cpu"),
        "disk_offload": lambda: accelerate.disk_offload(model, tmp_path, "cpu"),
        "dispatch_model": lambda: accelerate.dispatch_model(
            model, {"embed": "cpu", "layers": "disk", "head": "cpu"}, offload_dir=tmp_path
        ),
        "hook": lambda: accelerate.utils.set_module_tensor_to_device(
            model, "layers.0.up.weight", "cpu"
        ),
    }
    with pytest.raises(RuntimeError, match=r"cannot let accelerate move layers\.\d\.\w+\.weight"):
        calls[how]()
    assert torch.equal(model(IDS), expected)


def test_a_layer_of_torch_with_a_hook_of_accelerate_reads_its_weights(tmp_path: Path) -> None:
    """`nn.TransformerEncoderLayer` does, from the forward that the hook calls."""
    accelerate = needs.module("accelerate")
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    st.save_file(layer.state_dict(), tmp_path / "model.safetensors")
    load(layer, tmp_path / "model.safetensors", quant="int8", device="cpu")
    x = torch.randn(1, 3, 64)
    with torch.no_grad():
        expected = layer(x)
        accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.ModelHook())
        assert torch.equal(layer(x), expected)


# --- shared weights -------------------------------------------------------------------------------


class Shared(nn.Module):
    """A layer that stands twice, weights that are tied, and one over the memory of another."""

    def __init__(self) -> None:
        super().__init__()
        one, two, three = Layer(), Layer(), Layer()
        two.up.weight = one.up.weight
        three.down.weight.data = one.down.weight.data
        self.layers = nn.ModuleList([one, two, one, three])
        self.inner = nn.ModuleDict({"x": nn.ModuleList([two.down])})

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.inner["x"][0](torch.relu(self.layers[0].up(x)))


@pytest.mark.parametrize("name", NAMES)
def test_shared_weights_are_held_once_and_right_in_each_use(tmp_path: Path, name: str) -> None:
    """Modules and parameters at any depth; copies, moves and writes keep them shared."""
    torch.manual_seed(1)
    expected = Shared().eval()
    once = {t.data_ptr(): (n, t.clone()) for n, t in reversed(expected.state_dict().items())}
    st.save_file(dict(once.values()), tmp_path / "model.safetensors")
    model = Shared().eval()
    report = load(model, tmp_path / "model.safetensors", quant=name, device="cpu")
    held = {t.untyped_storage().data_ptr(): t.nbytes for t in model.state_dict().values()}
    assert sum(held.values()) <= report.resident_nbytes < sum(held.values()) + 64 * len(held)
    assert len(report.errors) == 4
    x = torch.randn(3, NARROW)
    plain = dequantized(model, Shared)
    assert error(model(x), plain(x)) < 1e-6
    for other in (model, copy.deepcopy(model).to(torch.bfloat16).to(torch.float32)):
        other.layers[0].up.weight = nn.Parameter(torch.zeros(WIDE, NARROW))
        assert not other.layers[1].up.weight.any()


def loaded_up(saved: tuple[Any, Path], quant: str) -> Any:
    model = empty()
    load(model, saved[1], quant=quant, device="cpu")
    return model.layers[0].up


def test_parts_of_another_dtype_are_computed_with(saved: tuple[Any, Path]) -> None:
    """What ``load_state_dict(assign=True)`` puts in place of parts, kernels do not read."""
    module = loaded_up(saved, "int8")
    expected = module.weight
    module._buffers["weight_scale"] = module.weight_scale.double()
    assert torch.equal(module.weight, expected)
    x = torch.randn(1, NARROW)
    with torch.inference_mode():
        assert worst(module(x), x, expected, module.bias) < 1


def test_compiled_products_have_no_break(saved: tuple[Any, Path]) -> None:
    up = loaded_up(saved, "nf4-nested")
    x = torch.randn(3, 2, NARROW)
    compiled = torch.compile(up, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), up(x))
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    compiled(ours).sum().backward()
    nn.functional.linear(theirs, up.weight.clone()).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(torch.vmap(up)(x), up(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert up(x).dtype is torch.bfloat16


def test_products_under_default_devices_tracers_and_duals(saved: tuple[Any, Path]) -> None:
    """Another default device, torch.jit.trace and forward-mode derivatives find right products."""
    up = loaded_up(saved, "int8")
    x = torch.randn(2, NARROW)
    expected = nn.functional.linear(x, up.weight.clone(), up.bias)
    with torch.inference_mode(), torch.device("meta"):
        torch.testing.assert_close(up(x), expected.detach())
    traced = torch.jit.trace(up, x, check_trace=False)
    y = torch.randn(2, NARROW)
    torch.testing.assert_close(traced(y), up(y))
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(up(dual)).tangent
    torch.testing.assert_close(tangent, torch.ones_like(x) @ up.weight.clone().T)
    assert up(x[:0]).shape == (0, WIDE)


def test_a_tile_is_bounded(saved: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    up = loaded_up(saved, "q8_0")
    monkeypatch.setattr(product, "TILE_NBYTES", 7 * NARROW * 4)
    seen: list[int] = []
    decode = product.decode

    def spy(of: Any, *given: Any) -> Any:
        seen.append(of.rows)
        return decode(of, *given)

    monkeypatch.setattr(product, "decode", spy)
    x = torch.randn(20, NARROW)
    with torch.inference_mode():
        found = up(x)
    assert max(seen) == 7 and sum(seen) == WIDE
    assert worst(found, x, up.weight, up.bias) < 1


def test_products_of_unusual_inputs(saved: tuple[Any, Path]) -> None:
    """Lazy negatives and zeros, huge and sparse inputs are multiplied; integers are refused."""
    up = loaded_up(saved, "int8")
    weight = up.weight.clone()
    x = torch.randn(2, NARROW)
    with torch.inference_mode():
        torch.testing.assert_close(up(torch._neg_view(x)), up(-x))
        zeros = up(torch._efficientzerotensor(2, NARROW))
        torch.testing.assert_close(zeros, up.bias.detach().expand(2, -1))
        assert worst(up(x * 1e37), x * 1e37, weight, up.bias) < 1
        torch.testing.assert_close(up(x.to_sparse()), up(x))
        with pytest.raises(RuntimeError, match="pass floats"):
            up(torch.ones(2, NARROW, dtype=torch.int64))
    module = copy.deepcopy(up)
    with torch.no_grad():
        module._buffers["weight_scale"][0], module._buffers["weight"][0, 0] = torch.inf, 0
        assert torch.isnan(module(torch.ones(1, NARROW))[0, 0])


def test_a_write_before_the_backward_pass_is_noticed(saved: tuple[Any, Path]) -> None:
    up = loaded_up(saved, "q8_0")
    y = up(torch.randn(2, NARROW, requires_grad=True)).sum()
    state = {name: part.clone() for name, part in up.state_dict().items()}
    up.load_state_dict(state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    up.load_state_dict(state, assign=True)
    assert torch.equal(up._buffers["weight"], state["weight"])


def test_gradients_through_a_checkpoint_of_activations(saved: tuple[Any, Path]) -> None:
    """Its saved tensors may be unpacked once: what peft trains with little memory needs that."""
    from torch.utils.checkpoint import checkpoint

    up = loaded_up(saved, "int8")
    ours = torch.randn(2, NARROW, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    checkpoint(up, ours, use_reentrant=False).sum().backward()
    up(theirs).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_traced_transforms_have_the_operator(saved: tuple[Any, Path]) -> None:
    """A graph of torch.func's transforms computes what the module does."""
    from torch.fx.experimental.proxy_tensor import make_fx

    up = loaded_up(saved, "nf4")
    x = torch.randn(3, NARROW)
    graph = make_fx(torch.vmap(up))(x)
    torch.testing.assert_close(graph(x), up(x))
