"""CUDA kernels: a writer of their IR, and PTX that LLVM compiles from it.

The PTX is for an old architecture; every current driver compiles it for its device. It neither
flushes subnormals nor fuses two operations.

Names and numbers: PTX ISA reference; LLVM, "User Guide for NVPTX Back-end"; CUDA driver API
reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from streamload.codecs.ir import Vector
from streamload.codecs.llvm import binding
from streamload.core.disk_cache import kept
from streamload.errors import UnsupportedCastError

#: Threads of every block: whole warps.
BLOCK_THREADS = 256
WARP = 32
#: LLVM's name of the target.
TRIPLE = "nvptx64-nvidia-cuda"
_CPU, _FEATURES = "sm_50", "+ptx60"  # PTX 6.0 has the shuffles, and every driver since 2017
#: Counts of a kernel: elements that overflowed, became zero, and changed.
COUNTS = 3

_KERNEL = """
target triple = "{triple}"

{shared}

declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.nctaid.x()
declare i32 @llvm.nvvm.shfl.sync.bfly.i32(i32, i32, i32, i32) convergent
declare i32 @llvm.nvvm.shfl.sync.idx.i32(i32, i32, i32, i32) convergent
declare i32 @llvm.nvvm.prmt(i32, i32, i32)
declare i32 @llvm.nvvm.vote.ballot.sync(i32, i1) convergent
declare void @llvm.nvvm.barrier0() convergent
declare float @llvm.nvvm.rcp.approx.ftz.f(float)

define ptx_kernel void @{symbol}({parameters}) nounwind {{
entry:
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %ntid = call i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
  %ctaid = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %nctaid = call i32 @llvm.nvvm.read.ptx.sreg.nctaid.x()
  %lane = and i32 %tid, 31
  %leads = icmp eq i32 %lane, 0
  %thread = zext i32 %tid to i64
  %threads = zext i32 %ntid to i64
  %block = zext i32 %ctaid to i64
  %blocks = zext i32 %nctaid to i64
  {body}
  ret void
}}
"""


class ThreadWriter(Vector):
    """Collects the IR of one CUDA thread; addresses are i64."""

    def __init__(self) -> None:
        super().__init__(1, native_half=True)

    def place(self, base: str, index: str = "0", nbytes: int = 1) -> str:
        """Write IR of a global pointer to item ``index`` of an array at ``base``."""
        at = self.op("add", "i64", base, self.op("mul", "i64", index, nbytes))
        return self.emit(f"inttoptr i64 {at} to ptr addrspace(1)")

    def load(self, of: str, nbytes: int, base: str, index: str = "0") -> str:
        """Write IR that loads an item of IR type ``of`` at an aligned address; see `place`."""
        place = self.place(base, index, nbytes)
        return self.emit(f"load {of}, ptr addrspace(1) {place}, align {nbytes}")

    def store(self, of: str, nbytes: int, value: str, base: str, index: str = "0") -> None:
        """Write IR that stores ``value``, of IR type ``of``, at an aligned address; see `place`."""
        place = self.place(base, index, nbytes)
        self.lines.append(f"store {of} {value}, ptr addrspace(1) {place}, align {nbytes}")

    def shuffled(self, x: str, distance: int) -> str:
        """Write IR that reads i32 ``x`` of the warp's thread in lane (own XOR ``distance``)."""
        return self.emit(
            f"call i32 @llvm.nvvm.shfl.sync.bfly.i32(i32 -1, i32 {x}, i32 {distance}, i32 31)"
        )

    def over_warp(self, x: str, join: Callable[[str, str], str]) -> str:
        """Write IR that reduces an i32 over a warp's threads; ``join`` writes IR to combine two."""
        for distance in (16, 8, 4, 2, 1):
            x = join(x, self.shuffled(x, distance))
        return x

    def sum(self, a: str, b: str) -> str:
        """Write LLVM IR of the sum of two i32; return the result's name."""
        return self.op("add", "i32", a, b)

    def when(self, mask: str, body: Callable[[], None]) -> None:
        """Write ``body`` for the threads alone whose i1 ``mask`` is set."""
        label = f"w{len(self.lines)}"
        self.lines += [f"br i1 {mask}, label %{label}.yes, label %{label}.no", f"{label}.yes:"]
        body()
        self.lines += [f"br label %{label}.no", f"{label}.no:"]

    def by_threads(self) -> None:
        """Write IR of ``%first``, a thread's first element, and ``%stride`` to its next element."""
        self.lines += [
            "%before = mul i64 %block, %threads",
            "%first = add i64 %before, %thread",
            "%stride = mul i64 %blocks, %threads",
        ]

    def barrier(self) -> None:
        """Write LLVM IR that waits for all threads of the block."""
        self.lines.append("call void @llvm.nvvm.barrier0()")

    def clear_shared(self, of: str, count: int) -> None:
        """Write IR that zeroes ``count`` items of shared memory ``@sums``; call `barrier` next."""

        def clear() -> None:
            place = self.emit(f"getelementptr {of}, ptr addrspace(3) @sums, i32 %tid")
            self.lines.append(f"store {of} 0, ptr addrspace(3) {place}")

        self.when(self.op("icmp ult", "i32", "%tid", count), clear)

    def add_counts(self, sums: Mapping[int, str]) -> None:
        """Write IR that adds each thread's i32 sums, by slot, to the i64 counts at ``%tally``."""
        self.barrier()  # after the clearing, and the threads of each warp together
        totals = {slot: self.over_warp(total, self.sum) for slot, total in sums.items()}

        def lead() -> None:
            for slot, total in totals.items():
                place = self.emit(f"getelementptr i32, ptr addrspace(3) @sums, i32 {slot}")
                self.emit(f"atomicrmw add ptr addrspace(3) {place}, i32 {total} monotonic")

        def add() -> None:
            place = self.emit("getelementptr i32, ptr addrspace(3) @sums, i32 %tid")
            total = self.emit(f"load i32, ptr addrspace(3) {place}")

            def add_one() -> None:
                more = self.convert("zext", "i32", total, "i64")
                at = self.place("%tally", "%thread", 8)
                atomic = f"atomicrmw add ptr addrspace(1) {at}, i64 {more}"
                self.emit(f'{atomic} syncscope("device") monotonic')

            self.when(self.op("icmp ne", "i32", total, 0), add_one)

        self.when("%leads", lead)
        self.barrier()
        self.when(self.op("icmp ult", "i32", "%tid", COUNTS), add)

    def kernel(self, symbol: str, parameters: str, shared: str = "") -> str:
        """Return the IR of a kernel with the instructions so far.

        ``parameters`` are names of i64, separated by spaces; ``shared`` defines shared memory.
        """
        return _KERNEL.format(
            triple=TRIPLE,
            symbol=symbol,
            parameters=", ".join(f"i64 %{name}" for name in parameters.split()),
            shared=shared,
            body="\n  ".join(self.lines),
        )


def kept_ptx(ir: str, names: tuple[str, str], cpu: str = _CPU) -> str:
    """Return PTX of IR for ``cpu`` and later, cached on disk; CUDA is not needed."""
    try:
        found = kept(lambda: compile_ptx(ir, cpu=cpu).encode(), "ptx", cpu, _FEATURES, ir)
    except (ImportError, OSError, RuntimeError) as error:
        reason = f"no CUDA kernel without llvmlite and its NVPTX: {error}"
        raise UnsupportedCastError(*names, reason=reason) from error
    return found.decode()


def compile_ptx(ir: str, *, triple: str = TRIPLE, cpu: str = _CPU) -> str:
    """Compile LLVM IR to PTX for ``cpu``, the oldest architecture.

    Raises ImportError or OSError without llvmlite, RuntimeError if LLVM rejects IR or target.
    """
    llvm = binding()

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(triple)
    module = llvm.parse_assembly(ir)
    module.verify()
    machine = target.create_target_machine(cpu=cpu, features=_FEATURES, opt=3)
    text: str = machine.emit_assembly(module)
    return text
