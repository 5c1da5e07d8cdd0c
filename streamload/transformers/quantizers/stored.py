"""Load quantized checkpoints into the modules of transformers' quantizers, as stored."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.stored import read_states
from streamload.codecs.weights import QuantizedWeight
from streamload.core.dtypes import parse_dtype
from streamload.core.tensors import TensorInfo
from streamload.core.units import format_bytes
from streamload.devices.torch.product import TILE_NBYTES
from streamload.devices.torch.tensors import PARTS
from streamload.errors import CheckpointError, ShapeMismatch, StateDictMismatchError
from streamload.loading.place import Devices
from streamload.planning.quant_policy import said_of_dense
from streamload.transformers.configuration import first_line, folder_of, placeholder
from streamload.transformers.internals import AutoHfQuantizer
from streamload.transformers.names import Names, Renames
from streamload.transformers.quantizers.bitsandbytes import (
    EightBit,
    FourBit,
    Maker,
    TorchAo,
    put_together,
)

#: By method, the packages that it needs: their modules, and pip's names.
_NEEDED: Mapping[str, Mapping[str, str]] = {
    "bitsandbytes": {"bitsandbytes": "bitsandbytes", "accelerate": "accelerate"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
    "fp8": {},
    "mxfp4": {},
    "torchao": {"torchao": "torchao"},
    "gptq": {"optimum": "optimum", "gptqmodel": "gptqmodel"},
    "awq": {"gptqmodel": "gptqmodel", "accelerate": "accelerate"},
}
#: Attributes of configurations that list modules of floats.
_SKIPS = ("llm_int8_skip_modules", "modules_to_not_convert")
_FP8_CAPABILITY = (8, 9)


def cast_biases(model: Any, before: Mapping[str, Any]) -> list[str]:
    """Return the names of modules that are not those ``before``; their biases get model.dtype.

    These modules make them in torch's default dtype, which transformers sets for a while.
    """
    new = [name for name, module in model.named_modules() if before.get(name) is not module]
    for name in new:
        bias = getattr(model.get_submodule(name), "bias", None)
        if bias is not None:
            bias.data = bias.data.to(model.dtype)
    return new


@contextmanager
def _set_aside(model: Any, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Hide modules inside a ``with``, by their names, from quantizers that would change them."""
    for name in modules:
        model.set_submodule(name, nn.Identity())
    yield
    for name, module in modules.items():
        model.set_submodule(name, module)


def _floats(model: Any, is_part: bool, quantized: Callable[[], Set[str]]) -> dict[str, nn.Module]:
    """Return the Linears, by name, whose weights are not `quantized`, though nothing says so.

    A ``quantization_config`` need not name those that share a weight, for no tensor is theirs; that
    of a multimodal model has other names than its parts.
    """
    held = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (is_part or held[id(module.weight)] > 1)
    }
    stored = quantized() if found else ()
    return {n: module for n, module in found.items() if f"{n}.weight" not in stored}


@dataclass(slots=True)
class Quantization:
    """The steps of a load that quantized weights need; here none, for models of floats."""

    checkpoint: Checkpoint
    quantizer: Any = None  # of transformers
    notes: list[str] = field(default_factory=list)  # sentences for users
    beside_nbytes: int = 0  # besides the weights, in the model's first run
    stays: str = ""  # why the model cannot be offloaded

    def prepare(self, model: Any, devices: Devices, renames: Callable[..., Renames]) -> None:
        """Put modules for quantized weights into a model on the meta device.

        Called before tensors are matched to parameters. `devices`: those of the load; `renames`:
        returns the rules from names of tensors to names of the model, if they are needed; with
        ``of_quantizer=False`` without those that need the quantizer's modules.
        """

    def check(self, model: Any, names: Names) -> None:
        """Raise an error if tensors that match modules for quantized weights do not fit."""

    def stage(self, model: Any, names: Names) -> None:
        """Put meta buffers for codes and scales into modules after matching, for the load."""

    def assemble(self, model: Any) -> None:
        """Build the modules' quantized weights over the loaded buffers, without copies."""

    def finish(self, model: Any) -> None:
        """Mark a loaded model as quantized."""


@dataclass(slots=True)
class QuantizedCheckpoint(Quantization):
    """The steps for a checkpoint that a quantizer of transformers opens, loaded as stored."""

    method: str = ""  # its name in the configuration
    # until `assemble`: (module, its parameter, the parts of the parameter)
    _staged: list[tuple[str, str, QuantizedWeight]] = field(default_factory=list)

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, config: Any, asked: Any = None
    ) -> QuantizedCheckpoint | None:
        """Return the steps for a `config`, merged with `asked`; None for checkpoints of floats."""
        said, stated = stated_in(config)
        if said is None:
            return None
        path, method = folder_of(checkpoint) / "config.json", method_of(stated)
        problem = expected = ""
        if method not in _NEEDED:
            problem = "the checkpoint is quantised, and is loaded as it is by transformers alone"
            expected = f"one of {', '.join(_NEEDED)}"
        elif needed := missing(method):
            problem = (
                "the checkpoint is quantised, and its modules are those of packages that are not "
                f"installed: pip install {' '.join(needed)}"
            )
            expected = ", ".join(_NEEDED[method])
        elif not checkpoint.groups:
            problem = (
                "quantization_config says that the checkpoint is quantised, and no weight of it is"
            )
            expected = "weights with their scales"
        if problem:
            raise CheckpointError(path, problem, expected, method)
        try:
            config.quantization_config = AutoHfQuantizer.merge_quantization_configs(said, asked)
            quantizer = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
        except Exception as error:  # any, from a quantizer of transformers
            problem = f"transformers does not open the quantised checkpoint: {first_line(error)}"
            raise CheckpointError(path, problem, found=method) from error
        return cls(checkpoint, quantizer, method=method)

    def prepare(self, model: Any, devices: Devices, renames: Callable[..., Renames]) -> None:
        """Put modules of transformers' quantizer into a model on the meta device."""
        names, device_map = placed(devices)
        config, before = self.quantizer.quantization_config, dict(model.named_modules())

        def stored(named: Renames) -> Set[str]:
            return {named(group.name)[0] for group in self.checkpoint.groups.values()}

        whole = self.checkpoint.config.get("model_type")
        is_part = whole not in (None, model.config.model_type)
        floats = _floats(model, is_part, lambda: stored(renames(of_quantizer=False)))
        for key in _SKIPS if is_part else ():
            if hasattr(config, key):
                setattr(config, key, list(floats))
        try:
            if self.method in ("fp8", "mxfp4"):  # asks for a GPU, or dequantises
                config.dequantize = self.method == "mxfp4"
            else:
                self.quantizer.validate_environment(device_map=device_map, weights_only=True)
            with torch.device("meta"), _set_aside(model, floats):
                self.quantizer.preprocess_model(
                    model=model,
                    dtype=model.dtype,
                    device_map=device_map,
                    checkpoint_files=[str(header.path) for header in self.checkpoint.shards],
                    use_kernels=False,
                )
        except Exception as error:  # likewise
            self._refuse(f"its modules cannot be made: {first_line(error)}", names, error)
        if self.method in ("bitsandbytes", "fp8"):
            cast_biases(model, before)
        if self.method in ("bitsandbytes", "torchao", "mxfp4"):
            self._stage(model, renames())
        if self.method == "bitsandbytes":
            numels = (math.prod(group.shape or ()) for *_, group in self._staged if group.bits == 4)
            self._say_of_dense(names, model.dtype, numels)
        if self.method == "compressed-tensors":
            self._take_packed_zeros(model, renames())
            self._keep_compressed(model)
        if self.method == "torchao":
            self._check_dtype(model.dtype)
            said = said_of_dense(self._largest_nbytes(model.dtype))
            self.notes.append(f"torchao dequantises a weight when it is computed with: {said}")
        if self.method in ("gptq", "awq"):
            most = max(group.nbytes for group in self.checkpoint.groups.values())
            self.notes.append(
                "gptqmodel repacks weights for its kernel: the plan counts them once, and the "
                f"largest takes {format_bytes(most, up=True)} more when it is repacked"
            )
            self.stays = (
                "gptqmodel repacks all weights when they are loaded, and what streams is as the "
                "files have it: load it with a larger budget, or offload the model that was "
                'quantised, or what "streamload convert IN OUT --quant nf4" makes of that'
            )
        if self.method == "mxfp4":
            config.dequantize = False
            self._keep_mxfp4(model)
            self._say_kept("MXFP4 experts", self._largest_nbytes(model.dtype))
        if self.method == "fp8":
            from streamload.transformers.quantizers import fp8 as packed

            packed.as_stored(model, stored(renames()), model.dtype)
            if not _has_fp8_kernels(names):
                if left := packed.keep_packed(model):
                    self._refuse(f"{left} of transformers needs kernels for FP8", names)
                self._say_kept("FP8 weights", packed.dense_numel(model) * model.dtype.itemsize)

    def _check_dtype(self, dtype: torch.dtype) -> None:
        """Raise CheckpointError if torchao's float8 weights cannot multiply floats of a dtype."""
        for group in self.checkpoint.groups.values():
            facts = group.facts
            if group.kind != "torchao-Float8Tensor" or facts.get("act_quant_kwargs") is not None:
                continue  # activations that are quantised, too, keep their dtype
            stated = str((facts.get("dtype") or {}).get("_data"))
            if hasattr(torch, stated) and getattr(torch, stated) is not dtype:
                raise CheckpointError(
                    group.values.shard,
                    "torchao multiplies a float8 weight with floats of the dtype that it had "
                    f'before it was quantised; write dtype="{stated}"',
                    expected=f"a model in {stated}",
                    found=str(dtype).removeprefix("torch."),
                    tensor=group.name,
                )

    def _refuse(self, problem: str, devices: list[str], cause: Exception | None = None) -> None:
        raise CheckpointError(
            folder_of(self.checkpoint) / "config.json",
            f"the quantised checkpoint does not run on {', '.join(devices)}: {problem}",
            found=self.method,
        ) from cause

    def _say_kept(self, what: str, dense_nbytes: int) -> None:
        self.notes.append(
            f"{what} stay packed: for many tokens a module dequantises its own, and "
            f"{said_of_dense(dense_nbytes)}"
        )

    def _largest_nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes in `dtype` of the largest quantized weight, or expert of a fused one."""
        sizes = (math.prod((group.shape or ())[-2:]) for group in self._with_shapes())
        return max(sizes, default=0) * int(dtype.itemsize)

    def _with_shapes(self) -> Iterable[QuantizedWeight]:
        """Return the quantized weights with shapes, read from files if headers lack them."""
        return read_states(self.checkpoint.layouts, self.checkpoint.groups).values()

    def _stage(self, model: Any, renames: Renames) -> None:
        """Put meta buffers for the stored tensors of each weight into its module, to be loaded."""
        wrong = []
        for group in self._with_shapes():
            name, _ = renames(group.name)
            prefix, _, leaf = name.rpartition(".")
            try:
                module = model.get_submodule(prefix)
                old = getattr(module, leaf)
            except AttributeError:
                continue  # `Names.check` reports it
            if not _takes(module, old, group):
                continue
            expected = _unpacked(module, old)
            if group.kind == "mxfp4":
                expected = (expected[0], expected[2], expected[1])
            if group.shape is not None and group.shape != expected:
                wrong.append(ShapeMismatch(name, expected, group.shape))
                continue
            del module._parameters[leaf]
            for key, info in _entries(group).items():
                module._buffers[key] = placeholder(info.shape, info.dtype)
                module.__dict__.setdefault(PARTS, set()).add(key)
            self._staged.append((prefix, leaf, group))
        if wrong:
            raise StateDictMismatchError(self.checkpoint.path, wrong_shape=wrong)

    def _say_of_dense(self, names: list[str], dtype: torch.dtype, numels: Iterable[int]) -> None:
        """Note the memory in which products with many tokens dequantise weights of 4 bits.

        ``names``: of devices; on the host kernels decode a part of a weight at once.
        """
        largest = max(numels, default=0) * dtype.itemsize
        if largest:
            on_host = all(name.partition(":")[0] == "cpu" for name in names)
            said = said_of_dense(min(largest, TILE_NBYTES) if on_host else largest)
            self.notes.append(f"for many tokens a weight of 4 bits is dequantised: {said}")

    def _take_packed_zeros(self, model: Any, renames: Renames) -> None:
        """Replace modules' zero points by packed ones; compressed-tensors builds them unpacked."""
        for group in self.checkpoint.groups.values():
            info = group.members.get("zero_point")
            if info is None:
                continue
            prefix, _, leaf = renames(info.name)[0].rpartition(".")
            try:
                parameters = model.get_submodule(prefix)._parameters
            except AttributeError:
                continue
            if leaf in parameters:
                packed = placeholder(info.shape, info.dtype)
                parameters[leaf] = nn.Parameter(packed, requires_grad=False)

    def _keep_compressed(self, model: Any) -> None:
        """Let modules decompress in each call; if some cannot, reserve bytes for all weights."""
        from streamload.transformers.quantizers import compressed_tensors as packed_compressed

        others = packed_compressed.keep_packed(model, self.quantizer.compressor)
        if not others:
            self._say_kept("compressed weights", self._largest_nbytes(model.dtype))
            return
        self.stays = (
            f"compressed-tensors decompresses all of the model when it first runs, for {others[0]} "
            'is no Linear or Embedding of torch: dequantise the checkpoint once, with "streamload '
            'convert IN OUT --dtype bfloat16", and offload that'
        )
        for group in self._with_shapes():
            itemsize = group.members["scale"].dtype.itemsize
            self.beside_nbytes += math.prod(group.shape or ()) * itemsize
        self.notes.append(
            f"{format_bytes(self.beside_nbytes)} stay free: compressed-tensors decompresses the "
            f"model when it first runs, for {others[0]} is no Linear or Embedding of torch"
        )

    def _keep_mxfp4(self, model: Any) -> None:
        from streamload.transformers.quantizers import mxfp4 as packed_mxfp4

        for prefix in dict.fromkeys(prefix for prefix, _, _ in self._staged):
            module = model.get_submodule(prefix)
            if not packed_mxfp4.keep_packed(module):
                problem = f"experts of MXFP4 are those of gpt-oss, not {type(module).__name__}"
                self._refuse(problem, ["any device"])
        self._staged.clear()  # they stay as they are

    def check(self, model: Any, names: Names) -> None:
        """Raise CheckpointError if a module expects quantized values and its tensor has floats."""
        state, quantised = model.state_dict(), self.checkpoint.members
        for tensor, parameter in names.first.items():
            if tensor in quantised:
                continue
            info = self.checkpoint.tensors[tensor]
            wanted = parse_dtype(str(state[parameter].dtype))
            if wanted.bits <= 8 and wanted.kind != "bool" and wanted is not info.dtype:
                raise CheckpointError(
                    info.shard,
                    f"quantization_config says that {parameter} is quantised, and it is not",
                    expected=f"{wanted} and its scales",
                    found=info.dtype,
                    tensor=tensor,
                )

    def assemble(self, model: Any) -> None:
        """Build transformers' quantized weights over the loaded buffers, without copies."""
        for prefix, leaf, group in self._staged:
            name = f"{prefix}.{leaf}"
            maker: Maker = FourBit() if group.bits == 4 else EightBit()
            if self.method == "torchao":
                maker = TorchAo(self.quantizer, name)
            module, keys = model.get_submodule(prefix), list(_entries(group))
            put_together(module, name, keys, maker, group.shape or (), model.dtype)
        self._staged.clear()

    def finish(self, model: Any) -> None:
        """Mark a loaded model as quantized, with transformers' quantizer."""
        model.hf_quantizer = self.quantizer
        self.quantizer.postprocess_model(model)


def placed(devices: Devices) -> tuple[list[str], dict[Any, str]]:
    """Return the names of a load's devices, and a device_map for transformers' quantizers."""
    names = list(devices.opened)
    return names, {"": names[0]} if len(names) == 1 else dict(enumerate(names))


def stated_in(config: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return a model's ``quantization_config``, as it is and as a dict; without one (None, {})."""
    said = getattr(config, "quantization_config", None)
    for key in config.sub_configs if said is None else ():
        said = said or getattr(getattr(config, key, None), "quantization_config", None)
    if said is None:
        return None, {}
    return said, said if isinstance(said, Mapping) else said.to_dict()


def method_of(stated: Mapping[str, Any]) -> str:
    """Return the "quant_method" of a ``quantization_config`` as text: "fp8", "gptq", ..."""
    return str(getattr(stated.get("quant_method"), "value", stated.get("quant_method")))


def _entries(group: QuantizedWeight) -> dict[str, TensorInfo]:
    """Return the tensors of a quantized weight, by their names in its module."""
    module = group.name[: group.name.rfind(".") + 1]
    return {info.name.removeprefix(module): info for info in group.members.values()}


def _unpacked(module: nn.Module, weight: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a module's weight before quantization packs it."""
    if isinstance(module, nn.Linear):
        return (module.out_features, module.in_features)
    return tuple(weight.shape)


def _takes(module: nn.Module, weight: torch.Tensor, group: QuantizedWeight) -> bool:
    """Return whether a module can hold a quantized weight; if not, `Names.check` reports it."""
    if group.kind.startswith("bnb-"):
        return type(module).__name__ == ("Linear8bitLt" if group.bits == 8 else "Linear4bit")
    return group.kind != "mxfp4" or weight.dim() == 3


def missing(method: str) -> list[str]:
    """Return the packages that a quantization method needs and that are missing, by pip's names."""
    return [pip for name, pip in _NEEDED.get(method, {}).items() if not _installed(name)]


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _has_fp8_kernels(devices: list[str]) -> bool:
    """Return whether transformers' own FP8 kernels run on all of the devices."""
    cuda = all(torch.device(name).type == "cuda" for name in devices)
    if not cuda or not _installed("kernels"):
        return False
    return all(torch.cuda.get_device_capability(name) >= _FP8_CAPABILITY for name in devices)
