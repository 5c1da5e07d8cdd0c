"""Host kernels from LLVM IR: compiled for a CPU, checked, linked, cached for later processes.

Sources: llvmlite's documentation; System V Application Binary Interface, "Object Files".
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from ctypes import CFUNCTYPE
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar

import numpy as np

from streamload.core.disk_cache import kept
from streamload.core.system import libc, place_code
from streamload.errors import UnsupportedCastError

#: "llvm" compiles a kernel for this CPU, "numpy" uses none, "auto" is "llvm" if that works.
Engine = Literal["auto", "llvm", "numpy"]
#: A C function that takes addresses and numbers, and returns nothing.
Kernel = Callable[..., None]
ELF = b"\x7fELF"
_K = TypeVar("_K")


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that LLVM compiles for.

    `cpu`: LLVM's name of the CPU, or "" for the oldest one of the triple.
    """

    triple: str
    cpu: str = ""
    features: str = ""

    @property
    def architecture(self) -> str:
        """The first component of the triple, in LLVM's spelling: "x86_64", "aarch64"."""
        name = self.triple.partition("-")[0]
        return {"arm64": "aarch64", "amd64": "x86_64"}.get(name, name)

    @property
    def native_half(self) -> bool:
        """Whether the CPU is known to convert between float16 and float32."""
        return self.architecture == "aarch64" or "+f16c" in self.features.split(",")

    @property
    def native_bf16(self) -> bool:
        """Whether the CPU converts float32 to bfloat16; its instruction flushes subnormals."""
        return "+avx512bf16" in self.features.split(",")

    @property
    def lanes(self) -> int:
        """Float32 lanes of registers in which the CPU permutes: 16, 8, or 0 for none."""
        features = self.features.split(",")
        found = {"+avx512f": 16, "+avx2": 8}
        known = (lanes for name, lanes in found.items() if name in features)
        return next(known, 0) if self.architecture == "x86_64" else 0


#: The command that installs llvmlite.
INSTALL = "pip install llvmlite"
# docs/measurements.md, "Without llvmlite"; empty once it was logged
_UNTOLD = [
    "llvmlite is not installed: casts, decoding and quantizing run in numpy, up to 20 times as "
    "slowly; a product of a quantized weight with one token takes 15 to 130 times as long; copies "
    f"to CUDA start in a Python loop. Install it: {INSTALL}"
]
_log = logging.getLogger("streamload")


def binding() -> Any:
    """Import llvmlite's binding, or raise ImportError or OSError; the first time log the cost."""
    try:
        return importlib.import_module("llvmlite.binding")
    except ModuleNotFoundError as error:
        with suppress(IndexError):  # another thread has logged it
            _log.warning("%s", _UNTOLD.pop())
        raise ImportError(lack() or str(error)) from error


@cache
def lack() -> str:
    """Return that llvmlite is not installed, or "" if it is; imports nothing."""
    found = importlib.util.find_spec("llvmlite")
    return "" if found else f"llvmlite is not installed ({INSTALL})"


def host_target() -> Target:
    """Return this CPU with its enabled features; raises ImportError or OSError, as `binding`."""
    llvm = binding()

    triple = llvm.get_process_triple()
    try:
        return Target(triple, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    except RuntimeError:  # unknown on this architecture: the oldest CPU is safe
        return Target(triple)


def compile_object(ir: str, target: Target) -> bytes:
    """Compile IR to an object file.

    Raises RuntimeError: LLVM rejects the IR, or does not know the target (other architectures have
    to be initialised in llvmlite first).
    """
    llvm = binding()

    module = llvm.parse_assembly(ir)
    module.verify()
    image: bytes = _machine(target).emit_object(module)
    return image


def _machine(target: Target) -> Any:
    llvm = binding()

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # jit: code and constants may end up further apart than 32-bit offsets reach
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, jit=True
    )


#: An entry of an ELF symbol table.
_SYMBOLS = np.dtype(
    [("name", "<u4"), ("info", "<u2"), ("section", "<u2"), ("value", "<u8"), ("nbytes", "<u8")]
)
_CODE = (b".text", b".ltext")  # the second in the large code model
_READ = (*_CODE, b".symtab", b".strtab")


def _sections(image: bytes) -> dict[bytes, bytes]:
    """Return the nonempty sections of a 64-bit little-endian ELF object by name, else ValueError.

    Sections other than code and symbols have b"" instead of their bytes.
    """
    if image[:6] != ELF + b"\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF object")
    llvm = binding()

    sections = llvm.ObjectFileRef.from_data(image).sections()
    filled = ((section.name(), section) for section in sections if section.size())
    return {name: section.data() if name in _READ else b"" for name, section in filled}


def undefined_symbols(image: bytes) -> tuple[str, ...]:
    """Return the names that an ELF object imports; a kernel must import none.

    Raises ValueError: the bytes are not a 64-bit little-endian ELF object.
    """
    sections = _sections(image)
    symbols = np.frombuffer(sections[b".symtab"], _SYMBOLS)[1:]  # the first is empty
    names = sections[b".strtab"]
    starts = symbols["name"][symbols["section"] == 0].tolist()
    return tuple(names[start : names.index(0, start)].decode() for start in starts)


def movable_code(image: bytes) -> bytes | None:
    """Return the machine code of an ELF object of one function, if it runs at any address.

    None if the object has to be linked first: its code refers to other sections (constants, a jump
    table) or to other objects, or is in several. Raises ValueError if it is no such object.
    """
    sections = _sections(image)
    code = [name for name in sections if name in _CODE]
    # the unwind table has relocations too, but nothing unwinds this code
    relocations = [name for name in sections if name.endswith(_CODE) and name not in _CODE]
    return None if len(code) != 1 or relocations else sections[code[0]]


def link_object(image: bytes, target: Target, symbol: str, prototype: Any) -> Any:
    """Load an object file of `compile_object` for ``target``; return its function.

    An object with undefined symbols kills the process when called. The code is freed with the
    function. Raises OSError if the system refuses executable memory, RuntimeError if the object
    does not hold ``symbol``.
    """
    llvm = binding()

    if sys.platform == "linux":  # LLVM does not check for it, and the first call would die
        libc().munmap(place_code(bytes(1)), 1)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(target))
    engine.add_object_file(llvm.ObjectFileRef.from_data(image))
    engine.finalize_object()
    address = engine.get_function_address(symbol)
    if not address:
        raise RuntimeError(f"the object holds no function {symbol!r}")
    function = prototype(address)
    function.engine = engine  # owns the code
    return function


_compiling = threading.Lock()
#: By (symbol, key of `HostFunction.kernel`), this process's kernel, or why there is none.
compiled: dict[Hashable, Any] = {}


@dataclass(frozen=True)
class HostFunction:
    """The C signature of compiled kernels; any thread may call them, without the GIL."""

    symbol: str
    arguments: tuple[Any, ...]
    is_kept: bool = True

    @property
    def prototype(self) -> Any:
        """The ctypes type of the C function."""
        return CFUNCTYPE(None, *self.arguments)

    def kernel(self, key: Hashable, names: tuple[str, str], ir: Callable[..., str]) -> Kernel:
        """Return the kernel for this CPU, compiled once per process; any thread may call it.

        ``key`` identifies the IR among those of this function, ``names`` are source and target, for
        the error. ``ir`` gets ``native_half`` (whether the CPU converts between float16 and
        float32) and ``architecture`` (the first part of the target triple).
        """
        with _compiling:
            found: Kernel | str | None = compiled.get((self.symbol, key))
            if found is None:
                found = compiled[self.symbol, key] = self._linked(ir)
        if isinstance(found, str):
            raise UnsupportedCastError(*names, reason=found)
        return found

    def found(self, key: Hashable) -> Any:
        """Return the kernel of ``key`` if this process has compiled it, else None."""
        found = compiled.get((self.symbol, key))
        return None if isinstance(found, str) else found

    def _linked(self, ir: Callable[..., str]) -> Any:
        """Compile, check and link the function; return it, or the reason that this failed."""
        try:
            target = host_target()
            for native_half in (True, False) if target.native_half else (False,):
                text = ir(native_half=native_half, architecture=target.architecture)
                image = self._object(text, target)
                scanned = image
                if not image.startswith(ELF):  # macOS: scan the same code in a known format
                    scanned = self._object(text, replace(target, triple=f"{target.triple}-elf"))
                needed = undefined_symbols(scanned)
                if not needed:
                    return link_object(image, target, self.symbol, self.prototype)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            return f"no LLVM kernel for this machine: {error}"
        return f"the compiled kernel would call {', '.join(needed)}"

    def _object(self, ir: str, target: Target) -> bytes:
        if not self.is_kept:
            return compile_object(ir, target)
        depends_on = ("quant", target.triple, target.cpu, target.features, ir)
        return kept(lambda: compile_object(ir, target), *depends_on)


def kernel_for(engine: Engine, compile: Callable[[], _K]) -> _K | None:
    """Return the kernel that ``compile`` returns; None for "numpy", or if "auto" cannot compile."""
    if engine == "numpy":
        return None
    try:
        return compile()
    except UnsupportedCastError:
        if engine == "llvm":
            raise
    return None
