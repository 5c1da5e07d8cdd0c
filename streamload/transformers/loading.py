"""`from_pretrained` for models of transformers; `streamed` makes other packages call it."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Unpack

from transformers import PreTrainedModel

from streamload.checkpoint.fetch import documents
from streamload.checkpoint.open import open_checkpoint
from streamload.core.location import Url, is_url
from streamload.devices.names import framework
from streamload.errors import CheckpointError, DeviceError, OffloadError
from streamload.files.hub import repository_of
from streamload.loading.options import NAMES, OF_PASSES, OPTIONS, OffloadOptions, Options, takes
from streamload.loading.place import open_devices
from streamload.offloading.offload import for_passes
from streamload.transformers.adapters import Adapter
from streamload.transformers.arguments import found_at, takes_those_of_transformers
from streamload.transformers.configuration import Wanted
from streamload.transformers.distribution import Distribution
from streamload.transformers.prepared import Prepared, load_untied, without_stale_notes

#: Options of streamload, and transformers' names of the same.
_SAME = {"dtype": "torch_dtype", "device": "device_map", "budget": "max_memory"}


@takes_those_of_transformers
@takes(without=NAMES, defaults={"strict": False})
def from_pretrained(
    path: str | os.PathLike[str],
    *,
    model_class: Any = None,
    config: Any = None,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
    revision: str | None = None,
    subfolder: str = "",
    local_files_only: bool = False,
    variant: str | None = None,
    trust_remote_code: bool | None = None,
    key_mapping: Mapping[str, str] | None = None,
    generation_config: Any = None,
    quantization_config: Any = None,
    distributed_config: Any = None,
    adapter_name: str | None = None,
    config_changes: Mapping[str, Any] | None = None,
    offload: bool = False,
    **options: Unpack[OffloadOptions],
) -> Any:
    """Load a model of transformers, streamed under a budget in bytes.

    The model equals that of transformers' own ``from_pretrained``: the same class, weights, ties,
    buffers and generation config, in evaluation mode. Arguments of
    transformers are taken too, such as ``torch_dtype=``, ``device_map=`` and ``num_labels=``; the
    error for one without a counterpart names the argument to write here.

    A quantized checkpoint stays quantized: of bitsandbytes, compressed-tensors, torchao, GPTQ, AWQ,
    FP8 and MXFP4 the stored bytes go into the modules of transformers' own quantizer, and ``dtype``
    applies to all other weights. Where transformers would dequantize the model (FP8 and MXFP4
    without their kernels, compressed-tensors), each module dequantizes its weight when it computes.

    Args:
        path: a folder with ``config.json`` and safetensors files (or those that torch.save writes),
            one of those files, an index, or ``org/name`` on the Hugging Face Hub. Or
            the folder of an adapter: its base is streamed, and peft adds the adapter to it. The
            base is a model in that folder; else, and of a repository, what the adapter names.
        budget: most bytes on each device, as in `streamload.load_state_dict`. Tensors that the
            checkpoint does not hold count too: missing parameters, those of other shapes, and
            buffers that transformers computes (as many bytes stay free on each of several devices).
        device: "cuda:0", "cpu" or another of torch's; a list of devices that the layers are split
            over, dispatched by accelerate. None: ``STREAMLOAD_DEVICE``, else torch's default, else
            the first accelerator, else the CPU. In a list of GPUs and "cpu", accelerate keeps the
            CPU's share in host memory, and brings it to the first GPU a layer at a time to compute
            there: when the model runs, that layer takes memory of the GPU beyond the budget.
        dtype: a dtype or its name, "checkpoint" (each weight as it is stored), or patterns by the
            checkpoint's names, the first that matches deciding. None, and for weights that match no
            pattern: the dtype in ``config.json``, or if it has none, that of the checkpoint's first
            float, as with transformers' ``dtype="auto"``; bfloat16 becomes float16 where a device
            does not compute in it. Weights that transformers keeps in float32 in a 16-bit model
            stay so, except under "checkpoint" and patterns other than ``"*"``.
        model_class: a class of transformers, an Auto class or one of your own; None takes the one
            that ``config.json`` names.
            A model without a head may be taken out of the checkpoint of one that has it.
        config: a configuration (copied) to use in place of ``config.json``, or the path of one.
        attn_implementation: "eager", "sdpa", ...; None lets transformers choose.
        experts_implementation: "eager", "grouped_mm", ...; None lets transformers choose.
        revision: of ``org/name``: a branch, a tag or a commit. A folder has none.
        subfolder: the folder in ``path`` that holds the checkpoint.
        local_files_only: read a repository from the local cache, and ask no hub.
        variant: as in `streamload.open_checkpoint`.
        trust_remote_code: run the code in the checkpoint's folder if ``config.json`` names a
            class in it.
        key_mapping: patterns of names in the checkpoint to their replacements, as in transformers.
        generation_config: generation settings to use in place of those in the checkpoint's folder.
        quantization_config: a ``BitsAndBytesConfig``: weights are quantized on the way into the
            modules of bitsandbytes that transformers chooses, to bitsandbytes' own bytes; fused
            experts, which it leaves at 16 bits, into modules of streamload.
        distributed_config: a ``DistributedConfig`` of transformers, such as
            ``DistributedConfig(tp_size=2)``: each rank of torch.distributed reads its shards alone,
            under a budget of its own, onto the device that transformers gives it.
        adapter_name: the adapter's name in peft; None for "default".
        quant: quantize the weights of layers on the way, into modules of streamload, which need no
            package: a format, or patterns by name, as in `streamload.load_state_dict`. "stored"
            keeps the codes of a GGUF file or of MLX, which otherwise become floats.
        config_changes: attributes of the configuration. They are taken as arguments, too:
            ``num_labels=3``.
        offload: if the model does not fit, layers stream through the budget at every pass, as with
            `streamload.offload`; the model's ``streamload_offload`` is the handle that this
            returns, with ``plan``, ``report`` and ``close()``. Quantized weights stream as they are
            stored, except GPTQ's and AWQ's, which are refused.
        tokens: with ``offload``, leave room for the activations of a pass of so many tokens.
        stay: with ``offload``, patterns of names of parameters that stay on the device.
        layers: with ``offload``, patterns of names of the modules that are layers.
        host: with ``offload``, most bytes of layers that host memory keeps.
        on_overrun: with ``offload``, the effect of a pass with more tokens than there is room for:
            "warn" or "error"; see `streamload.offload`.
        strict: missing and unexpected names are an error, except those that the model's class
            ignores. With False, matching weights are loaded, the rest is initialized at random as
            by transformers, and a warning and the report name it. Initialized weights count
            against the budget.
        shapes: "error" for a parameter whose shape is not that of its tensor, or "skip" to
            initialize it like one that is missing: transformers' ``ignore_mismatched_sizes=True``.
        reserve: as in `streamload.load_state_dict`; the model's own buffers are added.
        context: as in `streamload.load_state_dict`; the cache is that of transformers, full.
        **options: see `OffloadOptions`.

    Returns:
        The model, a ``transformers.PreTrainedModel``; its ``streamload_report`` is the
        `LoadReport`, and with several devices its ``hf_device_map`` has the device by module.

    Raises:
        CheckpointError: there is no configuration or no class for it, the checkpoint needs code of
            its own, is invalid, or is quantized in a way that is not opened here, does not run on
            the device, or needs a package that is not installed.
        StateDictMismatchError: names or shapes do not match, or transformers makes a parameter of
            the checkpoint's tensors in a way that is not a choice of rows; before any data is
            loaded.
        PlanInfeasibleError: it does not fit; before any data is read or memory allocated. If the
            checkpoint stores weights twice that ``config.json`` ties, and only one copy fits, both
            are read first, to see whether they differ.
        BudgetExceededError: something holds memory that the plan counts on.
        MemoryTakenError: others took memory during the load, and it does not fit any more.
        UnsupportedCastError: a dtype cannot be cast or held.
        OutOfRangeError: under ``out_of_range="error"``.
        OffloadError: with ``offload``, the model cannot be offloaded.
        DeviceError: a device is not there, does not work or failed, or there are several and
            accelerate is not installed.
        ValueError: an argument is invalid.
    """
    every: Mapping[str, object] = options
    changed = [name for name in OF_PASSES if every[name] != OPTIONS[name].default]
    if changed and not offload:
        raise ValueError(f"{changed[0]} says how a model is offloaded: write offload=True")
    read = Options.parse(options)
    if offload:
        read = for_passes(read)
    device = read.device
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"expected the path of a checkpoint, not {type(path).__name__}")
    others: dict[str, Any] = {"device": device, "offload": offload or None}
    others |= {"quant": options["quant"], "quantization_config": quantization_config}
    excluded = next((name for name, value in others.items() if value is not None), None)
    if distributed_config is not None and excluded is not None:
        raise ValueError(f"cannot use {excluded}= with distributed_config=: leave one of them out")
    distribution = Distribution.of(distributed_config)
    if distribution is not None:
        device = distribution.device
        read = replace(read, device=device)
    _check_accelerate(device)
    found = found_at(path, revision, subfolder, local_files_only=local_files_only)
    with ExitStack() as held:
        base, folder = found, held.enter_context(documents(found, read.fetch))
        adapter = Adapter.at(folder, is_named=repository_of(path) is not None)
        if adapter is not None and adapter.base is not None:
            try:
                base = found_at(adapter.base, None, local_files_only=local_files_only)
            except CheckpointError as error:  # often a folder of the author's machine
                problem = f"{error.problem}; the adapter {found} names it as its base: write "
                problem += f"from_pretrained(BASE, adapters=[{json.dumps(str(found))}])"
                raise replace(error, problem=problem) from error.__cause__
            folder = held.enter_context(documents(base, read.fetch))
        checkpoint = replace(open_checkpoint(base, variant=variant), path=folder)
        implementations = {
            "attn_implementation": attn_implementation,
            "experts_implementation": experts_implementation,
        }
        wanted = Wanted(
            model_class=model_class,
            config=config,
            changes=config_changes or {},
            implementations={name: one for name, one in implementations.items() if one is not None},
            trust_remote_code=bool(trust_remote_code),
            key_mapping=key_mapping,
            generation_config=generation_config,
            quantization=quantization_config,
            distribution=distribution,
        )
        if quantization_config is not None and options["quant"] is not None:
            raise ValueError("quant and quantization_config say the same: leave one of them out")
        if offload and adapter is not None:
            raise OffloadError(
                f"{found} is an adapter, whose modules stand in those that stream: offload its "
                f"base, and add it on the way: from_pretrained({str(base)!r}, offload=True, "
                f"adapters=[{str(found)!r}])"
            )
        given = os.fsdecode(path)
        name = str(found) if isinstance(found, Url) and is_url(given) else given
        devices = open_devices(device, framework("torch"), {})
        prepared = Prepared.of(
            checkpoint,
            name if adapter is None or adapter.base is None else adapter.base,
            wanted,
            devices,
            options["dtype"],
            read,
        )
        if offload:
            offloaded = load_untied(lambda: prepared.offload(devices, read), prepared)
            report = offloaded.load
        else:
            adapter_nbytes = 0 if adapter is None else adapter.nbytes
            report = load_untied(lambda: prepared.load(devices, adapter_nbytes, read), prepared)
        report = replace(without_stale_notes(report, prepared.model), path=str(base))
        if offload:
            offloaded.load = report
            prepared.model.streamload_offload = offloaded
        prepared.finish(report)
        if adapter is not None:
            adapter.add_to(prepared.model, adapter_name)
        return prepared.model


@contextmanager
def streamed(**options: Unpack[OffloadOptions]) -> Iterator[None]:
    """Replace transformers' own ``from_pretrained`` by streamload's inside a ``with`` block.

    For packages that call it: ``with streamed(budget="3GB"): model = SentenceTransformer(path)``;
    likewise ``transformers.pipeline`` and others. All threads are affected until the block ends.

    Args:
        **options: those of `from_pretrained`; they override the arguments that the package passes.
    """
    replaced = {*options, *(_SAME.get(name, name) for name in options)}
    theirs = PreTrainedModel.__dict__["from_pretrained"]

    def stream(cls: Any, *arguments: Any, **given: Any) -> Any:
        rest = {name: value for name, value in given.items() if name not in replaced}
        return from_pretrained(*arguments, model_class=cls, **rest, **options)

    PreTrainedModel.from_pretrained = classmethod(stream)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = theirs


def _check_accelerate(device: object) -> None:
    """Raise DeviceError if `device` lists several devices and accelerate is not installed."""
    if isinstance(device, str) or not isinstance(device, Sequence):
        return
    if len(device) > 1 and importlib.util.find_spec("accelerate") is None:
        raise DeviceError(
            ", ".join(map(str, device)),
            "a model runs on several devices by accelerate, which is not installed "
            "(pip install accelerate)",
        )
