"""Models that are offloaded over nodes, of which one is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import needs
import pytest
from thread_group import ThreadGroup, World, run

import streamload
from streamload import distributed
from streamload.errors import PeerFailedError, PlanInfeasibleError
from streamload.offloading.offload import Offloaded

torch = needs.module("torch")
needs.module("transformers")
import offloading_models as models  # noqa: E402
from torch_module import on_meta  # noqa: E402

LOSS_S = 1.0  # the timeout


def offloading(path: Path, budget: int, world: World, *, after: bool, **more: Any) -> list[Any]:
    """What two ranks get of which one is lost, while they load or ``after`` it."""

    def body(group: ThreadGroup) -> Any:
        model = on_meta(path)
        options = {"budget": budget, "device": "cpu", "progress": False, "timeout": LOSS_S, **more}
        offloaded = distributed.offload(model, path, group=group, on_loss="replan", **options)
        if after:
            group.allgather(b"")
            if group.rank == 1:
                world.kill(1)
            with pytest.raises(PeerFailedError):
                while True:
                    offloaded.load.recovery.check()
                    time.sleep(0.01)
            try:
                offloaded = offloaded.load.recovery.recover()
            except PlanInfeasibleError as error:
                return error, offloaded
        offloaded.load.recovery.close()
        return model, offloaded

    return run(world, body)


@pytest.mark.parametrize("after", [False, True])
def test_the_rank_that_is_left_offloads_the_whole_model(after: bool, llama: Path) -> None:
    """Its logits are those of the model; more streams than before, within its budget."""
    whole = on_meta(llama)
    streamload.load_state_dict(whole, llama, device="cpu", progress=False)
    world = World(2, timeout_s=LOSS_S)
    counts = 0

    def watch(rank: int, operation: str) -> None:
        nonlocal counts
        if not after and rank == 1 and operation == "allgather":
            counts += 1
            if counts == 9:
                world.kill(1)

    world.watch = watch
    found = offloading(llama, 250_000, world, after=after)[0]
    if isinstance(found, BaseException):
        raise found
    model, offloaded = found
    assert isinstance(offloaded, Offloaded)
    with offloaded, torch.no_grad():
        assert torch.equal(model(models.IDS), whole(models.IDS))
        assert [name[-1] for name in offloaded.load.lost] == ["1"]
        assert offloaded.plan.residency.streams
        assert offloaded.plan.needed_nbytes <= 250_000


def test_too_little_for_one_rank_is_refused_with_the_numbers(llama: Path) -> None:
    world = World(2, timeout_s=LOSS_S)
    ((error, offloaded), _) = offloading(llama, 700_000, world, after=True, stay="*")
    assert isinstance(error, PlanInfeasibleError)
    assert error.needed_nbytes > error.budget_nbytes
    offloaded.close()  # again
