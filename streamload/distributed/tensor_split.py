"""`split_tensors`: plan a tensor-parallel split from budgets alone, by transformers' rules."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Unpack

from streamload.checkpoint.open import CheckpointLike, opened
from streamload.core.model_config import language_part
from streamload.loading.load import split_under
from streamload.loading.options import CHANGES, OF_MODELS, PLACE, LoadOptions, Options, takes
from streamload.planning.dequantize import as_in_models, asked, dequantized
from streamload.planning.partition import Node
from streamload.planning.plan import Plan
from streamload.planning.shares import ClusterPlan, Member, Mesh, make_shares

_PLAN = "base_model_tp_plan"


def styles_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return transformers' tensor-parallel plan of a model, a style by module; {} if it has none.

    Reads the source of the configuration's class, since importing transformers takes 300 MB.
    """
    found = find_spec("transformers")
    places = found.submodule_search_locations if found is not None else None
    outer, (_, kind) = str(config.get("model_type")), language_part(config)
    names = (name.replace("-", "_") for name in (outer, kind, kind.removesuffix("_text")))
    folders = [name for name in dict.fromkeys(names) if name.isidentifier()]
    for folder in [Path(place, "models", name) for place in places or () for name in folders]:
        for file in sorted(folder.glob("configuration_*.py")):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    values = _constants(node)
                    if values.get("model_type") == kind and _PLAN in values:
                        return dict(values[_PLAN])
    return {}


def _constants(node: ast.ClassDef) -> dict[str, Any]:
    """Return the attributes of a class that are its type of model, and its plan, if literals."""
    found = {}
    for line in node.body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            with suppress(ValueError):
                found[line.targets[0].id] = ast.literal_eval(line.value)
    return found


@takes(without=(*OF_MODELS, *CHANGES, *PLACE))
def split_tensors(
    path: CheckpointLike,
    *,
    nodes: Sequence[Node],
    split: str = "tensor",
    **options: Unpack[LoadOptions],
) -> ClusterPlan:
    """Plan to split the tensors of a checkpoint over nodes, without reading any data.

    The plan has the nodes in the order of their names. ``split``: "tensor", or a mesh such as
    "2x4": layers over 2 groups of nodes, tensors over the 4 nodes of each. Raises ValueError if
    heads or axes do not divide.
    """
    mesh = Mesh.of(split, len(nodes))
    if mesh is None:
        raise ValueError(f"split is tensor or a mesh such as 2x4, not {split!r}")
    read, checkpoint = Options.parse(options), opened(path)
    weights = asked(checkpoint, read.policy)
    checkpoint = as_in_models(dequantized(checkpoint, weights))
    members = [Member(rank, node.name, node.name, 0, 1) for rank, node in enumerate(nodes)]

    def planned(groups: Sequence[Node]) -> Plan:
        return split_under(checkpoint, groups, read)

    mesh = replace(mesh, styles=styles_of(checkpoint.config))
    return make_shares(0, members, [n.budget for n in nodes], mesh, planned, checkpoint)
