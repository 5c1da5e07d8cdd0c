"""Loads over the nodes of a Ray cluster: one actor on each loads and keeps its part of a model.

    import ray
    import streamload.distributed.ray

    ray.init("auto")
    budget = {node["NodeName"]: "3GB" for node in ray.nodes()}
    with streamload.distributed.ray.load(model_fn, path, budget=budget) as loaded:
        hidden = tokens
        for actor in loaded.actors.values():
            hidden = actor.call.remote("forward", hidden)
        print(loaded.get(hidden))

Each actor calls `streamload.distributed.load_state_dict` as a process under torchrun does. They
meet in a TCPStore, which the driver serves, for a gloo group. Their RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT are set, so that models may call ``torch.distributed.init_process_group``, too.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from streamload.core.memory import BudgetLike
from streamload.core.system import install
from streamload.distributed import load as over_nodes
from streamload.distributed.launch import engine_module
from streamload.errors import NodeError, PeerFailedError, PlanInfeasibleError
from streamload.loading.report import LoadReport
from streamload.planning.partition import natural_key
from streamload.planning.shares import Share

try:
    import ray
except ImportError as error:
    raise ImportError(
        f"cannot import Ray, the extra ray: it is not installed; write {install('ray')}", name="ray"
    ) from error

_START_S = 120.0  # for actors to start: they import torch
_GRACE_S = 2.0  # after the first error, for those of other actors
#: The arguments of `load` that its plan takes, too.
_PLANNED = inspect.signature(over_nodes.plan).parameters


@dataclass(frozen=True)
class Loaded:
    """A model over the nodes of a Ray cluster; a context that ends its actors.

    Attributes:
        actors: the handle of each node's actor, by node, in the order of the layers.
            ``actor.call.remote(name, *args, **kwargs)`` calls a method of its model.
        reports: the report of each node's load, by node: ``plan.placements`` lists its parameters,
            ``nodes`` the bytes of all nodes, ``lost`` the lost ones. Tensors stay in the actors.
    """

    actors: Mapping[str, Any]
    reports: Mapping[str, LoadReport]
    _placed: Any = field(repr=False)  # the placement group
    _store: Any = field(repr=False)  # in which the ranks meet

    def get(self, answers: Any, timeout: float | None = None) -> Any:
        """Return ``ray.get(answers, timeout=timeout)``; PeerFailedError names a node that died."""
        try:
            return ray.get(answers, timeout=timeout)
        except ray.exceptions.RayActorError as error:
            dead = [name for name, a in self.actors.items() if a._actor_id.hex() == error.actor_id]
            if not dead:
                raise
            raise _named(dead[0], error) from error

    def recover(self) -> Loaded:
        """Load again without nodes that died, after a load with ``on_loss="replan"``.

        See `streamload.distributed.Recovery.recover`; the actors that are left stay.
        """
        calls = {actor.recover.remote(): name for name, actor in self.actors.items()}
        reports = _answers(calls, replan=True)
        left = {name: reports[name] for name in self.actors if name in reports}
        return replace(self, actors={name: self.actors[name] for name in left}, reports=left)

    def close(self) -> None:
        """End the actors, and release what Ray reserved for them."""
        ray.util.remove_placement_group(self._placed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Rank:
    """The actor of one rank."""

    model: Any = None

    def __init__(self) -> None:
        engine_module("torch")  # imported before the others wait

    def load(
        self,
        environment: Mapping[str, str],
        model_fn: Callable[[Share], Any],
        path: str | os.PathLike[str],
        options: Mapping[str, Any],
    ) -> LoadReport:
        """Plan, build the model of this rank and load it; return the report without tensors."""
        os.environ.update(environment)
        planned = {name: value for name, value in options.items() if name in _PLANNED}
        self.model = model_fn(over_nodes.plan(path, **planned).mine)
        return self._loaded(over_nodes.load_state_dict(self.model, path, **options))

    def recover(self) -> LoadReport:
        """Load again without lost ranks; return the new report without tensors."""
        return self._loaded(self._recovery.recover())

    def _loaded(self, report: LoadReport) -> LoadReport:
        self._recovery = report.recovery
        if self.model is None:
            self.model = report.state_dict
        return replace(report, state_dict={}, recovery=None)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of this rank's model; of the dictionary of its tensors if it has none."""
        return getattr(self.model, method)(*args, **kwargs)


def load(
    model_fn: Callable[[Share], Any],
    path: str | os.PathLike[str],
    *,
    budget: Mapping[str, BudgetLike],
    num_cpus: float = 1,
    num_gpus: float = 0,
    timeout: float = 60.0,
    **options: Any,
) -> Loaded:
    """Load a checkpoint over nodes of a Ray cluster, by one actor on each.

    The driver calls this after ``ray.init``, on a node of the cluster. streamload and the
    checkpoint must be on every node of ``budget``.

    Args:
        model_fn: called in each actor with the rank's `Share`; returns the ``model`` of
            `streamload.distributed.load_state_dict`: the rank's part, the whole with the parts of
            others on the meta device, or None for a dictionary of the part's tensors.
        path: as in `streamload.distributed.load_state_dict`, on every node.
        budget: the nodes, by ``ray start --node-name`` or else by address, and the budget of each.
        num_cpus: CPUs that Ray reserves for each actor; it limits torch to as many threads.
        num_gpus: GPUs that Ray reserves for each actor and lets it see.
        timeout: seconds for Ray to find room for the actors; and as in
            `streamload.distributed.load_state_dict`.
        **options: others of `streamload.distributed.load_state_dict`.

    Returns:
        The actors and their reports; its ``close``, or the driver's exit, ends the actors.

    Raises:
        PlanInfeasibleError: it does not fit.
        PeerFailedError: a node or its actor died or hangs; names the node.
        NodeError: the cluster lacks a node or free CPUs, or an actor could not load; names the
            node. The cause is the actor's error, with its traceback there.

    After an error no actor runs on. If a node dies later, calls of its actor raise Ray's
    ActorDiedError or ActorUnavailableError; `Loaded.get` names the node.
    """
    found = {node["NodeName"]: node for node in ray.nodes() if node["Alive"]}
    if missing := [name for name in budget if name not in found]:
        raise NodeError(
            ", ".join(missing),
            f"not in the Ray cluster, which has {', '.join(sorted(found, key=natural_key))}; "
            "write ray start there, or leave it out of budget=",
        )
    nodes = sorted(budget, key=natural_key)  # the order of the layers
    reserved = {"CPU": num_cpus, "GPU": num_gpus}
    placed = ray.util.placement_group(
        [
            {f"node:{found[name]['NodeManagerAddress']}": 0.001}
            | {kind: count for kind, count in reserved.items() if count}
            for name in nodes
        ],
        strategy="STRICT_SPREAD",
    )
    try:
        if not placed.wait(timeout):
            raise NodeError(
                ", ".join(nodes),
                f"Ray found no room for an actor with {num_cpus:g} CPUs and {num_gpus:g} GPUs on "
                f"each within {timeout:g} s; write num_cpus= or num_gpus=, or end what uses them",
            )
        actors = {}
        for rank, name in enumerate(nodes):
            at = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(placed, rank)
            kind = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, scheduling_strategy=at)(_Rank)
            actors[name] = kind.remote()
        _answers({actor.__ray_ready__.remote(): name for name, actor in actors.items()}, _START_S)
        address = ray.util.get_node_ip_address()
        store = engine_module("torch").serve(address)
        calls = {}
        for rank, (name, actor) in enumerate(actors.items()):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(nodes)),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank serves the store
                "STREAMLOAD_NODE_ID": name,
            }
            asked = {"budget": budget[name], "timeout": timeout, **options}
            calls[actor.load.remote(environment, model_fn, path, asked)] = name
        reports = _answers(calls, replan=options.get("on_loss") == "replan")
        left = {name: reports[name] for name in nodes if name in reports}
        return Loaded({name: actors[name] for name in left}, left, placed, store)
    except BaseException:
        ray.util.remove_placement_group(placed)
        raise


def _answers(
    calls: Mapping[Any, str], timeout: float | None = None, *, replan: bool = False
) -> dict[str, Any]:
    """Return the results of calls of all nodes, by node; raise an error that names one.

    Args:
        calls: the nodes, by Ray's references.
        timeout: seconds between two results; None: no limit.
        replan: the results are reports; leave out nodes that they list as lost.
    """
    pending, found, lost = list(calls), {}, set()
    errors: dict[str, Exception] = {}
    while pending:
        known = [e for e in errors.values() if not (replan and isinstance(e, PeerFailedError))]
        done, pending = ray.wait(pending, timeout=_GRACE_S if known else timeout)
        if not done:
            break
        for call in done:
            try:
                found[calls[call]] = ray.get(call)
            except ray.exceptions.RayError as error:
                errors[calls[call]] = _named(calls[call], error)
        if replan:
            lost = {name for report in found.values() for name in report.lost}
            pending = [call for call in pending if calls[call] not in lost]
    serious = [error for name, error in errors.items() if name not in lost]
    if pending and not serious:
        late = ", ".join(calls[call] for call in pending)
        raise PeerFailedError(late, f"its actor did not answer within {timeout:g} s")
    if serious:
        # of one node: the others know of it as a NodeError
        raise next((e for e in serious if isinstance(e, PlanInfeasibleError)), serious[0])
    return found


def _named(node: str, error: Any) -> Exception:
    """Return an error that names a node, for Ray's error of a call there."""
    if not isinstance(error, ray.exceptions.RayTaskError):
        # the last line of several has the reason
        named: NodeError = PeerFailedError(node, f"Ray: {str(error).splitlines()[-1].strip()}")
    elif isinstance(error.cause, PlanInfeasibleError):
        return error.cause.without("streamload.distributed.offload")  # not here
    elif isinstance(error.cause, NodeError):
        return error.cause
    else:
        named = NodeError(node, f"{type(error.cause).__name__}: {error.cause}")
    named.__cause__ = error
    return named
