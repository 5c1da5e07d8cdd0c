"""Find the devices of a load, open them, and describe them to the planner."""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from streamload.codecs.cast_table import cast_engine, supported
from streamload.codecs.decode import TARGETS, check_target, layout_of, there_nbytes
from streamload.codecs.decode_cuda import SYMBOL, dequant_ptx
from streamload.codecs.llvm import binding, lack
from streamload.codecs.permute import compile_transpose
from streamload.codecs.weights import Packed
from streamload.core.dtypes import BF16, F16, DType
from streamload.core.memory import (
    OVERHEAD_NBYTES,
    Budget,
    available_host_nbytes,
    available_system_nbytes,
    overhead_nbytes,
)
from streamload.core.memory import reserve_nbytes as guessed_reserve_nbytes
from streamload.core.units import format_bytes
from streamload.devices.base import Device, DeviceInfo, Framework
from streamload.devices.names import (
    FRAMEWORKS,
    INSTALLS,
    default_framework,
    environment_device,
    framework,
    installed,
    spelled_as,
    split_name,
)
from streamload.devices.probing import probe
from streamload.errors import (
    DeviceError,
    DeviceNotFoundError,
    PlanInfeasibleError,
    UnsupportedCastError,
)
from streamload.files.page_cache import free_host_nbytes
from streamload.loading.options import CastArgument
from streamload.planning.moves import DeviceSpec, DTypePolicy, TensorRequests
from streamload.planning.plan import Plan
from streamload.planning.planner import CastChoice
from streamload.planning.quant_policy import encoder_of
from streamload.streaming.memory_watch import needed_by_loads

if TYPE_CHECKING:
    from streamload.devices.cuda_copies import BulkCopier

# Bytes that the allocators of devices that are not opened round up to, by name.
_GRANULARITY_NBYTES = {"host": 16, "CPU": mmap.PAGESIZE, "CL": 512, "CUDA": 512}
#: The same for other names and for nodes: torch's CPU, which is enough for most devices.
UNSEEN_GRANULARITY_NBYTES = 64

#: Host bytes to match and plan one parameter: measured 1,000 to 1,170 for models of 20,000 and
#: 60,000 in all four frameworks.
PLANNING_NBYTES = 1100

_log = logging.getLogger("streamload")


@dataclass(slots=True)
class Devices:
    """The devices of a load, opened and probed, by canonical name, with notes for the report."""

    framework: Framework
    opened: dict[str, Device]
    notes: list[str] = field(default_factory=list)

    def native_bf16(self) -> bool:
        """Return whether all of the devices compute in bfloat16; see `_native_bf16`."""
        return all(map(self._native_bf16, self.opened))

    def _native_bf16(self, name: str) -> bool:
        """Return whether a device reports, and a probe confirms, that it computes in bfloat16."""
        if not self.opened[name].info.native_bf16:
            return False
        seen = probe(self.framework.name, name).dtypes.get("bfloat16")
        if seen is None and self.framework.trusted(name):
            seen = self.framework.dtype_status(name, BF16)
        elif seen is None:
            seen = probe(self.framework.name, name, full=True).dtypes.get("bfloat16")
        return seen in ("native", "emulated")

    def specs(
        self,
        budget: Budget,
        policy: DTypePolicy,
        cast: CastArgument,
        held: Mapping[str, int],
        *,
        bf16_undecided: bool,
        of_model: bool = False,
    ) -> list[DeviceSpec]:
        """Describe the devices to the planner; `held` is the bytes of old weights on each."""
        for device in self.opened.values():
            device.trim()  # what the allocator keeps of freed memory is free
        infos = {name: device.info for name, device in self.opened.items()}
        self.notes += [
            info.caveat for info in infos.values() if info.caveat and info.caveat not in self.notes
        ]
        pools = _pools(infos, budget)
        out = []
        for name, info in infos.items():
            free = info.free_nbytes
            if name in pools:
                given = (pools[name].given_nbytes, free)
                free = min((n for n in given if n is not None), default=None)
            casts: frozenset[tuple[str, str]] = frozenset()
            if "device" in (cast, policy.fp16_cast) and not info.casts:
                casts = frozenset(probe(self.framework.name, name, full=True).device_casts)
            limit = "budget"
            if budget.for_device(name) is None:
                left_alone = format_bytes(guessed_reserve_nbytes(free or 0))
                limit = f"free memory less a reserve of {left_alone}"
            out.append(
                DeviceSpec(
                    info,
                    budget.resolve(name, free, held.get(name, 0)),
                    limit,
                    free_nbytes=free,
                    host_free_nbytes=pools[name].free_nbytes if name in pools else None,
                    native_bf16=bf16_undecided and self._native_bf16(name),
                    device_casts=casts,
                    casts=info.casts,
                    objects=info.costs.parameters if of_model else info.costs.objects,
                )
            )
        return out

    def compile_casts(
        self,
        specs: Sequence[DeviceSpec],
        wants: TensorRequests,
        policy: DTypePolicy,
        *,
        clamp: bool,
        required: bool,
    ) -> tuple[list[DeviceSpec], list[str]]:
        """Compile and load the kernels with which devices cast and dequantize parameters.

        Returns the specs, without casts if kernels fail (`required`: raises), and notes on that.
        """
        out, notes = [], []
        for spec in specs:
            bulk = self.opened[spec.name].bulk if spec.casts else None
            try:
                if bulk is not None:
                    _load_kernels(bulk, spec, wants, policy, clamp)
            except (UnsupportedCastError, DeviceError) as error:
                if required:
                    raise
                notes.append(f"{spec.name} casts nothing, the host does: {error}")
                spec = replace(spec, casts=False)
            out.append(spec)
        return out, notes

    def widened(self) -> Iterator[Devices]:
        """Yield these devices with one more of this machine each time, to find a load that fits.

        Only devices whose probe runs in this process are added: a child process takes seconds.
        """
        opened = dict(self.opened)
        for name in self.framework.candidates():
            if name not in opened and self.framework.trusted(name):
                with suppress(DeviceError):
                    opened[name] = self.framework.device(name)
                    yield Devices(self.framework, dict(opened))

    def check_buffers(self, plan: Plan) -> None:
        """Raise DeviceError if a device cannot hold as many buffers as a plan allocates."""
        for name, device in self.opened.items():
            most = device.info.max_buffers
            count = sum(
                n for p, n in plan.placements.counted if p.device == name and p.action != "in_place"
            )
            if most is not None and count > most:
                raise DeviceError(
                    name,
                    f"the load needs {count} buffers there, and the system allows {most} more "
                    "(each is a memory map: see vm.max_map_count in proc(5))",
                )


class _Pool(NamedTuple):
    """Free host memory: all of it that a device can draw on, and the device's part of it."""

    free_nbytes: int | None
    given_nbytes: int | None


def _pools(infos: Mapping[str, DeviceInfo], budget: Budget) -> dict[str, _Pool]:
    """Return the pool of each device that shares the host's memory, by name.

    Bytes promised to others are gone, and devices without a stated budget get equal parts. A cgroup
    limits only memory that it is charged.
    """
    sharing = [name for name, info in infos.items() if info.shared_memory]
    charged = [name for name in sharing if infos[name].charged]
    promised = {name: budget.resolve(name, None) for name in sharing if budget.is_stated(name)}
    needed = len(promised) < len(sharing)
    host = _host_free_nbytes(needed=needed) if charged else None
    system = host if charged == sharing else _system_free_nbytes(needed=needed)
    out = {}
    for name in sharing:
        own = [(host, charged), (system, sharing)] if infos[name].charged else [(system, sharing)]
        free = own[0][0]
        rest = [
            max(pool - sum(promised.get(other, 0) for other in some), 0)
            // max(len(some) - len(promised.keys() & set(some)), 1)
            for pool, some in own
            if pool is not None
        ]
        out[name] = _Pool(free, free if name in promised else min(rest, default=0))
    return out


def _load_kernels(
    bulk: BulkCopier, spec: DeviceSpec, wants: TensorRequests, policy: DTypePolicy, clamp: bool
) -> None:
    """Compile and load on a CUDA device the kernels that cast and dequantize parameters."""
    for src, dst in wants.casts(policy, spec.native_bf16, spec.name):
        by_host = policy.fp16_cast == "llvm" and (src, dst) == (BF16, F16)
        if not by_host and supported(src, dst):  # the planner refuses unsupported casts
            bulk.kernel(src, dst, clamp)
    if not wants.any_packed:
        return
    dsts = wants.dsts(policy, spec.native_bf16)
    for want, info, dst in zip(wants, wants.infos, dsts, strict=True):
        if isinstance(info, Packed) and dst in TARGETS and there_nbytes(info.group):
            ptx = dequant_ptx(
                layout_of(info).values(info.group),
                dst,
                clamp=clamp,
                turned=want.transpose is not None,
            )
            bulk.function(ptx, SYMBOL)


def unseen_spec(name: str, budget_nbytes: int) -> DeviceSpec:
    """Describe a device to the planner for a plan that opens none, by its name and budget."""
    owner, rest = split_name(name)
    owner = owner or spelled_as(rest)
    allocator = FRAMEWORKS[owner].cuda_allocator
    if allocator is not None and rest.lower().partition(":")[0] == "cuda":
        info = DeviceInfo(
            name,
            owner,
            host_visible=False,
            shared_memory=False,
            granularity_nbytes=512,
            allocator=allocator,
            casts=True,
        )
    else:
        rounds = _GRANULARITY_NBYTES.get(rest.partition(":")[0], UNSEEN_GRANULARITY_NBYTES)
        maps = rest in ("cpu", "host")
        info = DeviceInfo(name, owner, granularity_nbytes=rounds, threads=2, maps=maps)
    return DeviceSpec(info, budget_nbytes, casts=info.casts)


def host_room_nbytes(parameters: int = 0) -> int | None:
    """Return free host bytes, or None; PlanInfeasibleError if too few to plan so many."""
    free = _host_free_nbytes(needed=False)
    needed = parameters * PLANNING_NBYTES
    if free is not None and free <= needed:
        raise PlanInfeasibleError(
            "host",
            OVERHEAD_NBYTES + needed,
            available_host_nbytes(),
            limit="free memory",
            largest=[(f"planning {parameters} parameters", needed)] if needed else (),
        )
    return free


def _host_free_nbytes(*, needed: bool) -> int | None:
    """Return the free host bytes for a load; if unknown, None, or DeviceError if `needed`."""
    free = available_host_nbytes() if needed else free_host_nbytes()
    return None if free is None else free - needed_by_loads() - overhead_nbytes(free)


def _system_free_nbytes(*, needed: bool) -> int | None:
    """Return `_host_free_nbytes` without cgroups."""
    try:
        free = available_system_nbytes()
    except DeviceError:
        if needed:
            raise
        return None
    return free - needed_by_loads() - overhead_nbytes(free)


def open_devices(
    device: str | Sequence[str] | None,
    owner: Framework | None,
    held: Iterable[str],
) -> Devices:
    """Open and probe the devices that `device` names, or a model's (`held`, framework `owner`)."""
    if type(device).__module__ == "torch":  # a torch.device, which is not imported for this
        device = str(device)
    if isinstance(device, str) or device is None:
        wanted = [device] if device else sorted(held) or [environment_device() or ""]
    else:
        wanted = list(device) if isinstance(device, Sequence) else [device]
        if not wanted or not all(isinstance(name, str) and name for name in wanted):
            raise ValueError(f"device is a name or a list of names, not {device!r}")
    if "auto" in wanted:
        if len(wanted) > 1:
            raise ValueError('device="auto" is one device')
        return _first_that_works(owner)
    split = [split_name(name) for name in wanted]
    named = {part for part, _ in split if part is not None}
    if owner is not None:
        named.add(owner.name)
    if not named:  # a model decides; without one, the names do
        named.update(spelled_as(name) if name else default_framework() for name in wanted)
        for lacking in (name for name in named if not installed(name)):
            problem = f"the name is {lacking}'s, which is not installed ({INSTALLS[lacking]})"
            problem += f"; {FRAMEWORKS[lacking].hint}"
            raise DeviceNotFoundError(", ".join(wanted), problem)
    if len(named) > 1:
        raise DeviceNotFoundError(
            ", ".join(wanted), f"a load has one framework, not {' and '.join(sorted(named))}"
        )
    chosen, owner = owner, framework(named.pop())
    names: dict[str, None] = {}
    for _, name in split:
        try:
            names[owner.canonical(name or owner.default_device())] = None
        except DeviceNotFoundError as error:
            working = error.working or _working(owner, chosen)
            raise DeviceNotFoundError(error.device, error.problem, working=working) from error
    if len(names) < len(wanted):
        raise ValueError(f"a device is named twice: {', '.join(wanted)}")
    found = Devices(owner, {})
    for name in names:
        result = probe(owner.name, name)
        if not result.works:
            raise DeviceNotFoundError(name, result.problem, working=_working(owner, chosen))
        found.opened[name] = owner.device(name)
    return found


def _working(owner: Framework, chosen: Framework | None) -> list[str]:
    """Return the devices that work here, and "host" without a `chosen` framework, for errors."""
    names = [name for name in owner.candidates() if probe(owner.name, name).works]
    return names if chosen is not None or owner.name == "host" else [*names, "host"]


def _first_that_works(owner: Framework | None) -> Devices:
    """Open the first device that works, for ``device="auto"``; the notes name it."""
    notes: list[str] = []
    names = (default_framework(), "host")
    owners = [owner] if owner is not None else [*map(framework, dict.fromkeys(names))]
    for one in owners:
        for name in list(one.candidates()):
            result = probe(one.name, name)
            if result.works:
                note = f'device="auto" took {name}'
                if notes:
                    note += f" (these do not work: {'; '.join(notes)})"
                _log.warning("%s", note)
                return Devices(one, {name: one.device(name)}, [note])
            notes.append(f"{name}: {result.problem}")
    raise DeviceNotFoundError("auto", "none works: " + "; ".join(notes))


def engine_of(asked: CastArgument) -> CastChoice:
    """Return the host's engine for a plan that compiles no kernel; ``asked``: ``cast=``."""
    if asked != "auto":
        return asked
    return "numpy" if lack() else "llvm"


def host_engine(
    wants: TensorRequests,
    policy: DTypePolicy,
    specs: Sequence[DeviceSpec],
    asked: CastArgument,
    *,
    clamp: bool,
) -> tuple[CastChoice, list[str]]:
    """Choose LLVM for host casts, or numpy if kernels do not compile, and compile the kernels.

    ``asked``: the option ``cast=``. Also returns notes if it is not LLVM.
    """
    engine, notes = _engine(wants, policy, specs, asked)
    codings = {
        (want.coding.format, want.coding.of_rows, src.name): (want.coding, src)
        for want, src in zip(wants, wants.srcs, strict=True)
        if want.coding is not None
    }
    for coding in codings.values():
        encoder_of(*coding)  # compiles its kernel
    if engine == "numpy":
        return engine, notes
    for native_bf16 in {spec.native_bf16 for spec in specs}:
        dsts = wants.dsts(policy, native_bf16)
        for info, dst in zip(wants.infos, dsts, strict=True) if wants.any_packed else ():
            if isinstance(info, Packed):
                with suppress(UnsupportedCastError):
                    check_target(info, dst).compile(info.group, dst, clamp=clamp)
        compile_transpose(_transposed(wants, dsts))
    return engine, notes


def _transposed(wants: TensorRequests, dsts: Iterable[DType]) -> Iterator[int]:
    """Yield the bytes per row of transposed parameters, as read and as cast, to compile kernels."""
    for want, src, dst in zip(wants, wants.srcs, dsts, strict=True):
        order, coding = want.transpose, want.coding
        of = want.shape if coding is None else coding.shape
        if order is not None and order.rows != (of or (1,))[0]:
            numel = math.prod(of) // order.rows
            yield from (
                numel * dtype.itemsize for dtype in ((src, dst) if coding is None else (src,))
            )


def _engine(
    wants: TensorRequests, policy: DTypePolicy, specs: Sequence[DeviceSpec], asked: CastArgument
) -> tuple[CastChoice, list[str]]:
    if asked in ("numpy", "device"):
        return asked, []
    on_host = policy.fp16_cast == "llvm"  # some of it, in any case
    # kernels that no device needs are not compiled
    for native in sorted({spec.native_bf16 for spec in specs if on_host or not spec.casts}):
        for src, dst in wants.casts(policy, native):
            if not supported(src, dst):
                continue  # the planner names the tensor
            if cast_engine(src, dst, "llvm" if asked == "llvm" else "auto") == "numpy":
                why = lack() or "LLVM kernels do not work here"
                return "numpy", [f"{why}: casts run in numpy"]
    if wants.any_packed and (why := lack()):
        if asked == "llvm":
            at = next(info for info in wants.infos if isinstance(info, Packed))
            raise UnsupportedCastError(
                at.dtype.name, "floats", reason=why, tensor=at.name, path=at.shard
            )
        with suppress(ImportError):
            binding()  # logs what that costs
        return "numpy", [f"{why}: weights are dequantized in numpy"]
    return "llvm", []


def on_unstored(unstored: Mapping[str, str], made: Plan) -> list[str]:
    """Return notes on tensors that the load leaves on the meta device or on another device."""
    fates = dict.fromkeys((d.device for d in made.devices), "")
    fates["meta"] = "are on the meta device still, without values"
    notes = []
    for fate in (fates["meta"], "stay on another device"):
        names = [n for n, at in unstored.items() if fates.get(at, "stay on another device") == fate]
        listed = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
        if names:
            notes.append(f"{len(names)} buffers that checkpoints do not hold {fate}: {listed}")
    return notes
