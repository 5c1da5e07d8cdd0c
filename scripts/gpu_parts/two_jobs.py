"""Processes of ``scripts/gpu --two``: ranks of torch.distributed, and two models of one process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gpu_parts.jobs import (
    LOGITS_TIMES,
    PASSES,
    Devices,
    Lap,
    Steps,
    difference,
    ids_of,
    laps,
    logits_of,
    passes,
    unequal,
)

_IDLE_S = 8.0
#: Of logits, |found - expected| / |expected - mean| where ranks add parts of sums.
_NEAR = 0.1


def _meet(device: str) -> int:
    """Begin torch.distributed by the environment, as torchrun sets it; return this rank.

    Not while another row runs: contexts and NCCL take 0.6 GB of each device.
    """
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    if device != "cpu":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    dist.barrier()
    return rank


def _own(device: str, rank: int) -> str:
    return device if device == "cpu" else f"cuda:{rank}"


def _file_pages() -> int:
    """Return the bytes of files that this process maps; a page mapped twice counts once."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = dict(line.split(":") for line in lines[1:])
    return sum(1024 * int(found[key].split()[0]) for key in ("Pss_File", "Pss_Shmem"))


def rank_load(path: str, device: str, trace: str, split: str, budget: int) -> Lap:
    """Load this rank's share, twice, and compare its tensors with what safetensors reads."""

    def steps() -> Steps:
        import torch.distributed as dist

        from streamload import distributed

        yield {}
        rank = _meet(device)
        on = Devices(_own(device, rank))
        asked: dict[str, Any] = {"split": split, "budget": budget, "dtype": "checkpoint"}
        asked["device"] = device.partition(":")[0]
        plan = distributed.plan(path, **asked)
        state: dict[str, Any] = {}
        for name in ("load", "load again"):
            state.clear()

            def loaded() -> Any:
                return distributed.load_state_dict(None, path, progress=False, **asked)

            report, seconds = on.timed(loaded)
            state.update(report.state_dict)
            read_nbytes = report.read_nbytes
            del report
            yield {"step": name, "seconds": seconds, "read_nbytes": read_nbytes}
        said = {"step": "check", "device_nbytes": on.peak_nbytes()}
        slices = plan.slices(plan.mine)
        wrong = [on.over(budget), *unequal(path, state, slices)]
        if state.keys() != set(plan.mine.parameters):
            wrong.append(f"{len(state)} tensors, expected {len(plan.mine.parameters)}")
        yield said | {"wrong": ", ".join([each for each in wrong if each][:5])}
        dist.destroy_process_group()

    return laps(steps(), trace)


def rank_model(path: str, device: str, trace: str, expected: str, whose: str, budget: int) -> Lap:
    """Load shards of transformers' tensor parallelism; logits are near those of one GPU.

    Those of transformers' own load are kept beside ``expected``, and ours equal them.
    """

    def steps() -> Steps:
        import torch
        import torch.distributed as dist
        from transformers import AutoModelForCausalLM, DistributedConfig

        import streamload.transformers

        yield {}
        rank = _meet(device)
        on = Devices(_own(device, rank))
        wanted = torch.load(expected)
        ids = ids_of(wanted["vocabulary"], 128, on.names[0])
        given: dict[str, Any] = {
            "distributed_config": DistributedConfig(tp_size=dist.get_world_size())
        }
        load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
        if whose == "streamload":
            load = streamload.transformers.from_pretrained
            given |= {"budget": budget, "progress": False}
        else:
            given["dtype"] = torch.bfloat16
        opened, seconds = on.timed(lambda: [load(path, **given)])
        yield {"step": "open", "seconds": seconds}
        for logits, said in passes(on, lambda: logits_of(opened[0], ids)):
            wrong, error = difference(logits, wanted["logits 128"], _NEAR)
            yield said | {"wrong": wrong, "error": error}
        kept = Path(f"{expected}.tensor-parallel-{rank}.pt")
        if whose == "transformers":
            torch.save(logits.cpu(), kept)
        else:
            wrong = "not compared: the row of transformers has not run"
            if kept.exists():
                wrong, _ = difference(logits, torch.load(kept), 0.0)
            yield {"step": "as transformers", "wrong": wrong}
        yield {"step": "budget", "wrong": on.over(budget) if whose == "streamload" else ""}
        dist.destroy_process_group()

    return laps(steps(), trace)


def rank_offload(
    path: str, device: str, trace: str, expected: str, exact: bool, budget: int
) -> Lap:
    """Offload this rank's layers of a model; the last rank compares logits with those expected."""

    def steps() -> Steps:
        # its modules cannot be assembled where other ranks have the weights
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
        import torch
        import torch.distributed as dist
        import transformers.models.llama.modeling_llama  # noqa: F401

        import streamload.transformers.prepared  # noqa: F401
        from streamload import distributed

        yield {}
        rank = _meet(device)
        on = Devices(_own(device, rank))
        wanted = torch.load(expected)
        ids = ids_of(wanted["vocabulary"], 128, "cpu")
        most = 0.0 if exact else LOGITS_TIMES * wanted["error 128"]
        asked: dict[str, Any] = {"budget": budget, "device": device.partition(":")[0]}
        asked |= {"dtype": "checkpoint", "tokens": 128}
        share = distributed.plan(path, offload=True, **asked).mine
        made, seconds = on.timed(lambda: _part(path, share, on.names[0], asked))
        model, handle = made
        yield {"step": "open", "seconds": seconds}

        def computed() -> Any:
            given: dict[str, Any] = {"input_ids": ids.to(on.names[0])}
            if share.previous_rank is not None:
                hidden = torch.empty(1, 128, model.config.hidden_size, dtype=torch.bfloat16)
                dist.recv(hidden, share.previous_rank)
                given = {"inputs_embeds": hidden.to(on.names[0])}
            with torch.no_grad():
                out = model(**given, use_cache=False).logits.cpu()
            if share.next_rank is not None:
                dist.send(out, share.next_rank)
            return out

        for out, said in passes(on, computed):
            if share.next_rank is None:
                said["wrong"], said["error"] = difference(out, wanted["logits 128"], most)
            yield said
        streamed_nbytes, wrong = handle.report.read_nbytes, on.over(budget)
        if not streamed_nbytes and device != "cpu":  # a tiny model may fit
            wrong = wrong or "no weight streams: the budget holds all"
        yield {"step": "budget", "wrong": wrong, "driver_nbytes": on.driver_nbytes()}
        handle.close()
        dist.barrier()
        dist.destroy_process_group()

    return laps(steps(), trace)


def _part(path: str, share: Any, device: str, asked: dict[str, Any]) -> Any:
    """Return a model of transformers that computes a rank's layers alone, and its handle."""
    from torch import nn

    from streamload import distributed, open_checkpoint
    from streamload.devices.names import framework
    from streamload.loading.options import Options
    from streamload.loading.place import open_devices
    from streamload.transformers.configuration import Wanted
    from streamload.transformers.prepared import Prepared

    devices = open_devices(device, framework("torch"), {})
    checkpoint = open_checkpoint(path)
    made = Prepared.of(checkpoint, path, Wanted(), devices, "checkpoint", Options.parse({}))
    model, fill = made.model, made.fill
    given: dict[str, Any] = {"mapping": fill, "strict": False, "progress": False}
    given["rename"] = lambda name: name if name in fill else None
    handle = distributed.offload(model, path, **asked | given)
    made.quantized.assemble(model)
    made.quantized.finish(model)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    model.model.layers = nn.ModuleList([model.model.layers[at] for at in share.layers])
    if not share.has_head:
        model.model.norm = model.lm_head = nn.Identity()
    return model.eval(), handle


def both(path: str, device: str, trace: str, expected: str, budget: int, devices: list[str]) -> Lap:
    """Offload a model to each device in one process, and run passes of all at once."""

    def steps() -> Steps:
        import torch
        import transformers.generation  # noqa: F401

        from streamload.core.memory import LOCKED
        from streamload.transformers import from_pretrained

        yield {}
        on = Devices(devices)
        for name in devices:  # if two threads begin at once, one gets another kernel, of all torch
            heads = torch.zeros(1, 8, 128, 128, device=name, dtype=torch.bfloat16)
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        wanted = torch.load(expected)
        ids = [ids_of(wanted["vocabulary"], 128, name) for name in devices]
        given: dict[str, Any] = {"offload": True, "tokens": 128, "progress": False}

        def opened() -> Any:
            return [from_pretrained(path, device=n, budget=budget, **given) for n in devices]

        models, seconds = on.timed(opened)
        yield {"step": "open", "seconds": seconds}
        logits: dict[int, Any] = {}

        def computed(at: int) -> None:
            logits[at] = logits_of(models[at], ids[at])

        def together(which: Sequence[int]) -> None:
            threads = [threading.Thread(target=computed, args=(at,)) for at in which]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        everyone = range(len(devices))
        steps = ("first pass", everyone), ("pass", everyone), ("idle pass", everyone)
        for step, which in (*steps, ("pass of one", [0])):
            if step == "idle pass":  # files that stream again are locked meanwhile
                time.sleep(_IDLE_S)
            took, wrong = [], ""
            for _ in range(PASSES if step != "first pass" else 1):
                logits.clear()
                begun = time.perf_counter()
                together(which)
                on.finish()
                took.append(time.perf_counter() - begun)
                for at in which:
                    if at not in logits:
                        wrong = f"no pass on {devices[at]}"
                    else:
                        wrong = wrong or difference(logits[at], wanted["logits 128"], 0.0)[0]
            said = {"step": step, "seconds": median(took), "wrong": wrong, "error": 0.0}
            yield said | {"device_nbytes": on.peak_nbytes(), "locked_nbytes": LOCKED.nbytes}
        said = {"step": "budget", "wrong": on.over(budget)}
        yield said | {"driver_nbytes": on.driver_nbytes(), "file_pages_nbytes": _file_pages()}
        for model in models:
            model.streamload_offload.close()

    return laps(steps(), trace)
