"""Models whose parameters are DTensors, by transformers' own parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedModel

from streamload.transformers.rest import give_own


@dataclass(frozen=True, slots=True)
class Distribution:
    """The mesh of ranks that a ``DistributedConfig`` describes, and this rank's device."""

    config: Any
    mesh: Any  # transformers' own; None for a single process
    device: str | None

    @classmethod
    def of(cls, config: Any) -> Self | None:
        """Join the ranks of torch.distributed, as transformers does; None without a config."""
        if config is None:
            return None
        prepare = getattr(PreTrainedModel, "prepare_distribute_model", None)
        if prepare is None:
            raise ValueError("cannot use distributed_config=: it needs a later transformers")
        if getattr(config, "pp_size", 1) > 1:
            raise ValueError(
                'cannot split layers by pp_size=: write split="layers" or a mesh such as "2x4" of '
                "streamload.distributed.load_state_dict"
            )
        config, device, mesh = prepare(config, device_map=None)
        return cls(config, mesh, None if mesh is None else str(device))

    def apply(self, model: Any) -> Any:
        """Make the parameters of a model on the meta device DTensors, tied as they were."""
        for name in model.all_tied_weights_keys:  # transformers distributes before it ties
            give_own(model, name)
        model = type(model).maybe_distribute_model(model, self.config, self.mesh)
        model.tie_weights(recompute_mapping=False)
        return model
