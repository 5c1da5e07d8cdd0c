"""`quantization_config=`: quantize weights on the way into modules of bitsandbytes.

transformers builds the modules on the meta device. Each holds the parts of its weight as buffers
under their names in checkpoints, and the load quantizes into these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.scheme import CodedWeight
from streamload.core.tensors import RowTranspose
from streamload.core.units import format_bytes
from streamload.devices.names import framework
from streamload.devices.torch.tensors import CODED
from streamload.loading.place import Devices
from streamload.transformers.configuration import first_line, placeholder
from streamload.transformers.internals import AutoHfQuantizer, should_convert_module
from streamload.transformers.names import Names, Renames
from streamload.transformers.quantizers.bitsandbytes import EightBit, FourBit, put_together
from streamload.transformers.quantizers.stored import (
    QuantizedCheckpoint,
    cast_biases,
    missing,
    placed,
)

_METHOD = "bitsandbytes"
# Arguments of `BitsAndBytesConfig` that may have one value.
_ONLY = {"llm_int8_has_fp16_weight": False, "bnb_4bit_quant_storage": "uint8"}
_8BIT = "bitsandbytes-int8"
_8BIT_EXPERTS = "int8"  # in bitsandbytes-int8, two weights of a module would share the name SCB


@dataclass(slots=True)
class QuantizedOnLoad(QuantizedCheckpoint):
    """The steps for a checkpoint of floats that is quantized into modules of bitsandbytes."""

    format: str = ""  # as in ``quant=``
    _modules: list[str] = field(default_factory=list)  # bitsandbytes' own, until `assemble`

    @classmethod
    def asked(cls, checkpoint: Checkpoint, config: Any, asked: Any) -> QuantizedOnLoad:
        """Return the steps for `asked`, a ``BitsAndBytesConfig`` or dict; set it in `config`.

        Raises ValueError: another method, an option that is not supported, or no such package.
        """
        if isinstance(asked, Mapping) and asked.get("quant_method", _METHOD) == _METHOD:
            asked = BitsAndBytesConfig.from_dict({**asked})
        if not isinstance(asked, BitsAndBytesConfig):
            given = (
                asked.get("quant_method") if isinstance(asked, Mapping) else type(asked).__name__
            )
            raise ValueError(
                f"quantization_config is a BitsAndBytesConfig here, not {given}; "
                'quant="q8_0" and the like need no package'
            )
        if needed := missing(_METHOD):
            raise ValueError(
                f"quantization_config needs packages that are not installed: pip install "
                f'{" ".join(needed)}; quant="nf4" and the like need none'
            )
        for name, only in _ONLY.items():
            found = getattr(asked, name)
            if str(found).removeprefix("torch.") != str(only):
                raise ValueError(f"quantization_config: {name} is {only} here, not {found}")
        nested = "-nested" if asked.bnb_4bit_use_double_quant else ""
        format = f"{asked.bnb_4bit_quant_type}{nested}" if asked.load_in_4bit else _8BIT
        try:
            quantizer = AutoHfQuantizer.from_config(asked, pre_quantized=False)
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"quantization_config: {first_line(error)}") from error
        config.quantization_config = asked
        stays = (
            "layers stream as they are stored, and quantization_config= quantises on the way: "
            f'quantise the checkpoint once, with "streamload convert IN OUT --quant {format}", and '
            "offload that"
        )
        return cls(checkpoint, quantizer, stays=stays, format=format)

    def prepare(self, model: Any, devices: Devices, renames: Callable[..., Renames]) -> None:
        """Put modules of bitsandbytes into a model on the meta device; ValueError if that fails."""
        names, device_map = placed(devices)
        before = dict(model.named_modules())
        try:
            self.quantizer.validate_environment(device_map=device_map, weights_only=True)
            with torch.device("meta"):
                self.quantizer.preprocess_model(
                    model=model, dtype=model.dtype, device_map=device_map
                )
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            self._refuse(f"its modules cannot be made: {first_line(error)}", names, error)
        self._modules = cast_biases(model, before)
        if self.format != _8BIT:
            numels = (model.get_submodule(n).weight.numel() for n in self._modules)
            self._say_of_dense(names, model.dtype, numels)

    def check(self, model: Any, names: Names) -> None:
        """Let the load transpose weights of modules that replace a Conv1D, as bitsandbytes does."""
        for prefix in self._modules:
            module, name = model.get_submodule(prefix), f"{prefix}.weight"
            source = names.fill.get(name)
            if source is None or not issubclass(module.source_cls, Conv1D):
                continue
            rows, columns = source.shape or (0, 0)
            names.fill[name] = replace(
                source, transpose=RowTranspose(1, rows, columns), shape=(columns, rows)
            )

    def stage(self, model: Any, names: Names) -> None:
        """Put meta buffers for weights into modules of bitsandbytes (fused experts: streamload).

        Raises ValueError: the checkpoint does not fill one of bitsandbytes' modules.
        """
        state = model.state_dict(keep_vars=True)
        for name in (f"{prefix}.weight" for prefix in self._modules):
            source = names.fill.get(name)
            if source is None or source.shape != tuple(state[name].shape):
                raise ValueError(
                    f"quantization_config: the checkpoint has no {name} of shape "
                    f"{list(state[name].shape)}, and what is initialised is not quantised on the "
                    f'way: write llm_int8_skip_modules=["{name.removesuffix(".weight")}", ...]'
                )
        for prefix in self._modules:
            module = model.get_submodule(prefix)
            old = module._parameters.pop("weight")
            coded = CodedWeight(self.format, tuple(old.shape))
            for part in coded.made.parts:
                module._buffers[part.name("weight")] = placeholder(part.shape, part.dtype)
            setattr(module, CODED, {"weight": coded})
        self._stage_experts(model, names)

    def _stage_experts(self, model: Any, names: Names) -> None:
        skipped = self.quantizer.modules_to_not_convert
        state = model.state_dict(keep_vars=True)
        fused = {
            name: state[name].nbytes
            for name in names.fill
            if name in state
            and state[name].dim() == 3
            and "experts" in name
            and should_convert_module(name.rpartition(".")[0], skipped)
        }
        format = _8BIT_EXPERTS if self.format == _8BIT else self.format
        swap = framework("torch").swap(model, dict.fromkeys(fused, format))
        swap.put()
        if swap.coded:
            self.notes.append(
                f"{len(swap.coded)} fused weights of experts are {format} in streamload's modules: "
                "bitsandbytes has none for them"
            )
        kept = {name: nbytes for name, nbytes in fused.items() if name not in swap.coded}
        if kept:
            self.notes.append(
                f"not quantised, {len(kept)} fused weights of experts of "
                f"{format_bytes(sum(kept.values()))}: {', '.join(list(kept)[:8])}"
            )

    def _refuse(self, problem: str, devices: list[str], cause: Exception | None = None) -> None:
        raise ValueError(
            f"quantization_config: the model does not run so on {', '.join(devices)}: {problem}; "
            'quant="nf4" and the like have modules of their own'
        ) from cause

    def assemble(self, model: Any) -> None:
        """Build bitsandbytes' weights over the loaded buffers, without copies."""
        for prefix in self._modules:
            module = model.get_submodule(prefix)
            said = getattr(module, CODED)["weight"]
            delattr(module, CODED)
            maker = EightBit() if self.format == _8BIT else FourBit()
            names = list(said.names("weight"))
            put_together(module, f"{prefix}.weight", names, maker, said.shape, model.dtype)
        self._modules.clear()
