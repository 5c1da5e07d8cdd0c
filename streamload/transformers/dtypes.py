"""Choose the dtype that a model of transformers is built in, and those of its weights."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from streamload.checkpoint.open import Checkpoint
from streamload.core.dtypes import BF16, F16, DType, DTypeArgument, parse_dtype
from streamload.devices.names import environment_fp16_cast
from streamload.errors import CheckpointError
from streamload.loading.options import Options
from streamload.loading.place import Devices
from streamload.planning.moves import DTypePolicy
from streamload.transformers.configuration import folder_of
from streamload.transformers.internals import build_glob_alternation, plan_of_dtypes
from streamload.transformers.names import Names

COMPUTED_IN = ("float16", "bfloat16", "float32", "float64")  # what torch takes as its default


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtype that a model is built in, and the caller's ``dtype=``, for its weights."""

    asked: DTypeArgument  # by the caller
    main: DType  # in which the model is built

    @classmethod
    def choose(
        cls,
        checkpoint: Checkpoint,
        config: Any,
        asked: DTypeArgument,
        options: Options,
        devices: Devices,
    ) -> Dtypes:
        """Choose the dtype to build the model in; may probe bfloat16 on the devices."""
        policy = DTypePolicy.parse(asked, environment_fp16_cast())
        rules = dict(policy.rules)
        rest = rules.get("*")
        if rest is not None:
            if rest.name not in COMPUTED_IN:
                raise ValueError(f"a model computes in {', '.join(COMPUTED_IN)}, not in {rest}")
            return cls(asked, rest)
        stored = _stored(checkpoint)
        if "*" in rules and len(stored) == 1:  # "checkpoint"
            return cls(asked, stored[0])
        main = _stated(checkpoint, config) or next(iter(stored), None)
        if main is None:  # no floats
            main = parse_dtype(str(torch.get_default_dtype()))
        if main is BF16 and "*" not in rules:
            specs = devices.specs(options.budget, policy, options.cast, {}, bf16_undecided=True)
            if policy.fp16_cast is not None or not all(spec.native_bf16 for spec in specs):
                main = F16
        return cls(asked, main)

    def updated(self, quantizer: Any) -> Dtypes:
        """Return a copy with the dtype that a quantizer wants, if the caller asked for none."""
        if self.asked is not None or quantizer is None:
            return self
        return replace(self, main=parse_dtype(str(quantizer.update_dtype(_torch(self.main)))))

    def rules(self, names: Names) -> dict[str, Any]:
        """Return dtypes by pattern of names: the caller's, and those that transformers fixes."""
        given, rest = split_rules(self.asked, self.main)
        if rest == "checkpoint":
            return {**given, "*": rest}
        out = dict(given)
        kept = _kept(names.model, _torch(self.main))
        state, checkpoint = names.model.state_dict(), names.checkpoint
        for tensor, parameter in names.first.items():
            if tensor in checkpoint.members:
                continue  # it stays as it is stored
            wanted = parse_dtype(str(kept(parameter) or state[parameter].dtype))
            if not wanted.kind == checkpoint.tensors[tensor].dtype.kind == "float":
                continue
            if wanted is not self.main and not any(fnmatchcase(tensor, one) for one in given):
                out[glob.escape(tensor)] = wanted
        return {**out, "*": rest}


def split_rules(asked: DTypeArgument, otherwise: DType | None) -> tuple[dict[str, Any], Any]:
    """Split a ``dtype=`` into dtypes by pattern, and the dtype of the rest, or `otherwise`."""
    if isinstance(asked, Mapping):
        given = dict(asked)
        return given, given.pop("*", otherwise)
    return {}, otherwise if asked is None else asked


def _torch(dtype: DType) -> Any:
    return getattr(torch, dtype.name)


def _stated(checkpoint: Checkpoint, config: Any) -> DType | None:
    """Return the dtype in the configuration, if any; CheckpointError if no model computes in it."""
    if getattr(config, "dtype", None) is None:
        return None
    stated = str(config.dtype).removeprefix("torch.")
    if stated not in COMPUTED_IN:
        raise CheckpointError(
            folder_of(checkpoint) / "config.json",
            "the dtype is none that a model computes in",
            expected=", ".join(COMPUTED_IN),
            found=stated,
        )
    return parse_dtype(stated)


def _stored(checkpoint: Checkpoint) -> list[DType]:
    """Return the dtypes of the checkpoint's floats; the first is transformers' ``dtype="auto"``."""
    infos = sorted(checkpoint.tensors.values(), key=lambda info: (info.shard.name, info.name))
    found = dict.fromkeys(info.dtype for info in infos if info.dtype.name in COMPUTED_IN)
    blocks = any(info.dtype.is_packed for info in infos)  # few others are float32
    return list({F16: None} | found if blocks else found)


def _kept(model: Any, dtype: torch.dtype) -> Any:
    """Return a function from a parameter's name to the dtype that transformers fixes, or None."""
    plan = plan_of_dtypes(model, dtype)
    if not plan:
        return lambda name: None
    pattern, _, of_group = build_glob_alternation(list(plan))

    def kept(name: str) -> Any:
        found = pattern.search(name)
        return plan[of_group[found.lastgroup]] if found else None

    return kept
