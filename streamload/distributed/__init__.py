"""Loads across nodes: each rank (process) computes the same plan and loads its own part.

The same line runs on every rank, under torchrun, mpirun, srun or bare environment variables:

    report = streamload.distributed.load_state_dict(model, path, budget="3GB")

1. HELLO: the ranks meet, and exchange node ids and hosts.
2. INDEX: rank 0 reads the headers and broadcasts them; each rank compares its files.
3. OFFER: each sends its budget, and whether its device computes in bfloat16.
4. PLAN: each computes the plan of all ranks; digests are compared. Then each plans its own load.
5. LOAD: each streams its part, without collectives. Replicated bytes are read once by all together.
6. VERIFY: after the load, names, bytes and checksums of replicas are compared: each tensor is on
   its planned rank, exactly once, and replicas agree.

`offload` has the same stages, for budgets that are too small: 4 also plans which part of each share
stays, 5 loads that, and passes of a rank stream the rest from its own files, without the others.

All ranks raise an error of one rank before LOAD, naming it. `streamload.errors.PeerFailedError`
names a rank that is lost at any time, on all others and within the timeout. With
``on_loss="replan"`` the others go on instead: see `streamload.distributed.replan`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported at first use: every command imports `launch` alone
    from streamload.distributed.group import ProcessGroup as Group
    from streamload.distributed.load import load_state_dict, offload, plan
    from streamload.distributed.replan import Recovery
    from streamload.planning.shares import ClusterPlan, Share


def __getattr__(name: str) -> Any:
    """Return a public name of this module, imported when first used; else raise AttributeError."""
    if name in ("load_state_dict", "offload", "plan"):
        from streamload.distributed import load

        return getattr(load, name)
    if name in ("ClusterPlan", "Share"):
        from streamload.planning import shares

        return getattr(shares, name)
    if name == "Recovery":
        from streamload.distributed.replan import Recovery

        return Recovery
    if name == "Group":
        from streamload.distributed.group import ProcessGroup

        return ProcessGroup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["ClusterPlan", "Group", "Recovery", "Share", "load_state_dict", "offload", "plan"]
