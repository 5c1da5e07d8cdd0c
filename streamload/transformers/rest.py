"""Untie weights, initialize tensors that the checkpoint lacks, and finish a loaded model."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from streamload.checkpoint.open import Checkpoint
from streamload.devices.allocators import taken
from streamload.devices.torch.quantized import set_aside
from streamload.devices.torch.tensors import CODED, coded_of
from streamload.errors import StateDictMismatchError
from streamload.loading.place import Devices
from streamload.loading.report import LoadReport
from streamload.offloading.torch_modules import stood_in
from streamload.planning.sources import Source
from streamload.transformers.configuration import Wanted, folder_of
from streamload.transformers.names import Names

_log = logging.getLogger("streamload")

# Tensors that transformers is to compute are filled with a mark, to notice those it does not.
_BLOCK_NBYTES = 2**16  # marked and compared at once
_FEWEST_MARKED = 16  # bools and the like whose mark is a pattern: fewer may have it by chance
_SEED = 0x5EED


def untie(names: Names, alike: Callable[[Checkpoint, Source, Source], bool]) -> bool:
    """Untie weights that the checkpoint stores twice and that differ; return whether any did.

    So does transformers. Weights for which `alike` returns True stay tied, and load once.
    """
    model, checkpoint, fill = names.model, names.checkpoint, names.fill
    different = [
        (target, source)
        for target, source in model.all_tied_weights_keys.items()
        if target in fill and source in fill and not alike(checkpoint, fill[target], fill[source])
    ]
    for target, source in different:
        _log.warning(
            "%s: %s and %s are stored with different values: they are not tied, though "
            "config.json says so",
            checkpoint.path,
            target,
            source,
        )
        give_own(model, target)
        del model.all_tied_weights_keys[target]
    return bool(different)


def give_own(model: Any, name: str) -> None:
    """Replace a parameter, which may be tied to another, by one of its own without values."""
    prefix, _, leaf = name.rpartition(".")
    module = model.get_submodule(prefix)
    old = getattr(module, leaf)
    setattr(module, leaf, nn.Parameter(torch.empty_like(old), requires_grad=old.requires_grad))


def stored_alike(checkpoint: Checkpoint, a: Source, b: Source) -> bool:
    """Return whether both copies of a tied weight have one dtype and shape; reads no data."""
    one, other = (checkpoint.tensors[source.rows[0].tensor].dtype for source in (a, b))
    return a.shape == b.shape and one is other


def beside_nbytes(names: Names, devices: Devices) -> int:
    """Return the bytes of a model's tensors that the checkpoint lacks or has in another shape.

    Each device counts all of them, since their places are not known yet.
    """
    model = names.model
    state = model.state_dict(keep_vars=True)
    filled = {
        id(state[name])
        for name, source in names.fill.items()
        if name in state and source.shape == tuple(state[name].shape)
    }
    for name, said in coded_of(model).items():
        filled.update(id(state[each]) for each in said.names(name))
    rest = [t.nbytes for t in (*model.parameters(), *model.buffers()) if id(t) not in filled]
    infos = [device.info for device in devices.opened.values()]
    return max(sum(taken(info.allocator, info.granularity_nbytes, rest)) for info in infos)


def initialise_the_rest(model: Any, checkpoint: Checkpoint, report: LoadReport) -> None:
    """Let transformers compute tensors that the checkpoint lacks, on their modules' devices."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the old one: its id stays taken
    for prefix, module in model.named_modules():
        for entries in (module._parameters, module._buffers):
            for key, old in entries.items():
                if old is None:
                    continue
                if old.device.type != "meta" and key not in module._non_persistent_buffers_set:
                    old._is_hf_initialized = True  # transformers leaves it as it is
                    continue
                if id(old) not in made:
                    name = f"{prefix}.{key}" if prefix else key
                    made[id(old)] = old, _on(torch.device(device_of(name, report)), old)
                entries[key] = made[id(old)][1]
        if hasattr(module, CODED):
            module._is_hf_initialized = True  # its weights are codes
    with stood_in(model):
        model.initialize_weights()
        model.tie_weights(recompute_mapping=False)
    unset = {id(new) for old, new in made.values() if old.device.type == "meta" and _is_unset(new)}
    left = [*model.named_parameters(), *model.named_buffers()]
    problems = [
        f"{name}: the checkpoint does not hold it, and transformers does not compute it"
        for name, tensor in left
        if tensor.device.type == "meta" or id(tensor) in unset
    ]
    if problems:
        raise StateDictMismatchError(checkpoint.path, problems=problems)


def _on(device: torch.device, old: torch.Tensor) -> torch.Tensor:
    """Return a tensor on a device; if it was on the meta device, filled with `_marked`'s marks."""
    if old.device.type == "meta":
        new = torch.empty_like(old, device=device, memory_format=torch.contiguous_format)
        for block, mark in _marked(new):
            block.copy_(mark)
    else:
        new = old.to(device)
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


def _is_unset(tensor: torch.Tensor) -> bool:
    """Return whether transformers left a tensor as it is, with its mark in every byte."""
    if not tensor.numel() or (not _has_mark(tensor.dtype) and tensor.numel() < _FEWEST_MARKED):
        return False
    return all(torch.equal(block, mark) for block, mark in _marked(tensor))


def _has_mark(dtype: torch.dtype) -> bool:
    """Return whether bytes of 128 can mark tensors of a dtype: no model computes that value."""
    return dtype.itemsize > 1 or dtype is torch.int8


def _marked(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a contiguous tensor's bytes in blocks, each with the bytes that mark it as unset.

    A mark is one unlikely value, if the dtype has one; else a random pattern, or a few zeros.
    """
    dtype = tensor.dtype
    if _has_mark(dtype):
        mark = torch.full((_BLOCK_NBYTES,), 128, dtype=torch.uint8, device="cpu")
    elif tensor.numel() < _FEWEST_MARKED:
        mark = torch.zeros(tensor.nbytes, dtype=torch.uint8, device="cpu")
    else:
        # a generator of its own: torch's is the caller's
        numbers = np.random.default_rng(_SEED)
        most = 2 if dtype is torch.bool else 256
        mark = torch.from_numpy(numbers.integers(most, size=_BLOCK_NBYTES, dtype=np.uint8))
    mark = mark.to(tensor.device)
    # contiguous again, where transformers has put other data in its place
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for block in flat.split(_BLOCK_NBYTES):
        yield block, mark[: block.numel()]


def device_of(name: str, report: LoadReport) -> str | int:
    """Return the device for a tensor that the load did not fill: that of the module around it."""
    parts = name.split(".")
    around = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
    places = report.device_map
    known = (places[module] for module in around if module in places)
    return next(known, report.plan.devices[0].device)


def finish(names: Names, report: LoadReport, wanted: Wanted) -> None:
    """Make a loaded model ready for use, as transformers' own ``from_pretrained`` does."""
    model, folder = names.model, folder_of(names.checkpoint)
    for name, value in names.computed.items():
        model.get_parameter(name).data.copy_(value)
    model._weight_conversions = names.transforms  # `save_pretrained` goes back by them
    model.eval()
    # before transformers 5 wrote a file of their own, generation settings were in config.json
    known = any((folder / name).is_file() for name in ("generation_config.json", "config.json"))
    if known and model.can_generate() and hasattr(model, "adjust_generation_fn"):
        model.adjust_generation_fn(
            wanted.generation_config,
            False,
            None,
            folder,
            cache_dir=None,
            force_download=False,
            proxies=None,
            local_files_only=True,
            token=None,
            revision="main",
            subfolder="",
            trust_remote_code=wanted.trust_remote_code,
            **{name: value for name, value in wanted.changes.items() if name != "dtype"},
        )
    model.streamload_report = report
    places = dict(report.device_map)
    if len(set(places.values())) > 1:
        accelerate = importlib.import_module("accelerate")
        skip = sorted(model._skip_keys_device_placement or ())
        with set_aside(model):  # codes are on their devices
            accelerate.dispatch_model(model, device_map=places, skip_keys=skip)
