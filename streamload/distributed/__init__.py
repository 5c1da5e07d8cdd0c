"""Loading across nodes: each rank plans the same split and loads its own part, and all know it.

The same line runs on every rank, under torchrun, mpirun, srun or bare environment variables:

    report = streamload.distributed.load_state_dict(model, path, budget="3GB")

1. HELLO: the ranks meet, and learn each other's node ids and hosts.
2. INDEX: rank 0 reads the headers and sends them round; each rank checks that its files are those.
3. OFFER: each says what its device may hold, and whether it computes in bfloat16.
4. PLAN: each computes who loads what; the digests are compared. Then each plans its own load.
5. LOAD: each streams its part, with no collective. Replicated bytes are read once by all together.
6. VERIFY: when all are done, names, bytes and checksums of replicas are compared: each tensor is
   where it was planned, exactly once, and replicas agree.

`offload` goes through the same stages where budgets are too small: 4 says what of each share stays,
5 loads that, and a rank's passes stream the rest, from its own files and without the others.

An error of one rank before LOAD is raised by all, naming it; a rank that is lost at any time is
named by `streamload.errors.PeerFailedError` on all others within the timeout.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported when they are first used: a launcher is looked for by every command
    from streamload.distributed.group import Group
    from streamload.distributed.load import load_state_dict, offload, plan
    from streamload.planning.shares import ClusterPlan, Share


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in ("load_state_dict", "offload", "plan"):
        from streamload.distributed import load

        return getattr(load, name)
    if name in ("ClusterPlan", "Share"):
        from streamload.planning import shares

        return getattr(shares, name)
    if name == "Group":
        from streamload.distributed.group import Group

        return Group
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["ClusterPlan", "Group", "Share", "load_state_dict", "offload", "plan"]
