from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
import needs
import numpy as np
import pytest
from cast_kernels_helpers import AARCH64, BASELINE, SCANNED, on_x86
from cast_reference_helpers import as_bits, by_reference, pair_id, samples

from streamload.codecs.cast import FUNCTION, compile_kernel, kernel_ir
from streamload.codecs.cast_reference import cast_bytes
from streamload.codecs.floats import PAIRS, lossless, plain_range
from streamload.codecs.llvm import (
    Kernel,
    Target,
    compile_object,
    host_target,
    link_object,
    undefined_symbols,
)
from streamload.core.dtypes import BF16, F16, F32, F64, DType

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()

Tally = ctypes.c_uint64 * 3


def object_of(src: DType, dst: DType, target: Target, *, clamp: bool, native_half: bool) -> bytes:
    ir = kernel_ir(src, dst, clamp=clamp, native_half=native_half, architecture=target.architecture)
    return compile_object(ir, target)


def link(image: bytes, target: Target) -> Kernel:
    kernel: Kernel = link_object(image, target, "cast", FUNCTION.prototype)
    return kernel


def call(kernel: Kernel, src: DType, dst: DType, data: bytes) -> tuple[bytearray, list[int]]:
    """What a kernel makes of elements, and its tally."""
    out, tally = bytearray(len(data) // src.itemsize * dst.itemsize), Tally()
    source = ctypes.c_char_p(data)
    address = ctypes.cast(source, ctypes.c_void_p).value
    assert address is not None
    target = (ctypes.c_char * len(out)).from_buffer(out)
    kernel(address, ctypes.addressof(target), len(data) // src.itemsize, tally)
    return out, list(tally)


FORMS: dict[str, Callable[[], tuple[Target, bool]]] = {
    "host": lambda: (host_target(), host_target().native_half),
    "host-integers": lambda: (host_target(), False),
    "x86-64-baseline": lambda: (BASELINE, False),
}


@pytest.mark.parametrize("clamp", [False, True], ids=["inf", "clamp"])
@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=on_x86 if "x86" in form else ()) for form in FORMS]
)
def test_kernels_equal_the_reference(form: str, pair: tuple[DType, DType], clamp: bool) -> None:
    src, dst = pair
    target, native_half = FORMS[form]()
    image = object_of(src, dst, target, clamp=clamp, native_half=native_half)
    kernel = link(image, target)
    x = samples(src)
    # in order, many vectors are plain; shuffled, a special value is in nearly every one
    for order in (np.arange(x.size), np.random.default_rng(0).permutation(x.size)):
        out, (overflowed, flushed, changed) = call(kernel, src, dst, x[order].tobytes())
        bits, counts = by_reference(src, dst, clamp)
        assert np.array_equal(as_bits(out, dst), bits[order])
        assert (overflowed, flushed, changed - overflowed - flushed) == counts


@pytest.mark.parametrize("native_half", [True, False])
@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_zeros_among_ordinary_values(pair: tuple[DType, DType], native_half: bool) -> None:
    """Zeros of both signs stay what they are beside values that need no care, uncounted."""
    src, dst = pair
    target = host_target()
    if native_half and not target.native_half:
        pytest.skip("this CPU cannot convert half precision")
    image = object_of(src, dst, target, clamp=True, native_half=native_half)
    x = samples(src)
    start, stop = plain_range(src, dst, direct=native_half)
    sign = x.dtype.type(1 << (src.bits - 1))
    magnitude = x & ~sign
    x = x[(magnitude >= start) & (magnitude < stop)]
    zeros = np.where(np.arange(x.size) % 2 == 0, sign, x.dtype.type(0))
    data = np.stack([x, zeros], axis=1).tobytes()

    expected = bytearray(2 * x.size * dst.itemsize)
    counts = cast_bytes(src, dst, memoryview(data), memoryview(expected), clamp=True)
    out, tally = call(link(image, target), src, dst, data)
    assert out == expected
    assert counts == (0, 0, tally[2])
    assert tally[:2] == [0, 0]


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_every_length_and_alignment(pair: tuple[DType, DType]) -> None:
    src, dst = pair
    kernel = compile_kernel(src, dst)
    x = np.random.default_rng(0).permutation(samples(src))[:200]
    whole = as_bits(call(kernel, src, dst, x.tobytes())[0], dst)
    for numel in range(101):
        shift = numel % 8 + 1
        data = np.frombuffer(b"\0" * shift + x[:numel].tobytes(), np.uint8)
        out = np.full(numel * dst.itemsize + 24, 0xAA, np.uint8)
        kernel(data.ctypes.data + shift, out.ctypes.data + 9 - shift, numel, Tally())
        start, stop = 9 - shift, 9 - shift + numel * dst.itemsize
        assert np.array_equal(as_bits(bytearray(out[start:stop].tobytes()), dst), whole[:numel])
        assert (out[:start] == 0xAA).all()
        assert (out[stop:] == 0xAA).all()


@pytest.mark.parametrize("bits", [0x4780, 0x0001, 0x3301])
def test_counts_do_not_wrap(bits: int) -> None:
    numel = 5_000_003
    _, tally = call(compile_kernel(BF16, F16), BF16, F16, np.full(numel, bits, "u2").tobytes())
    assert tally == [numel * (bits == 0x4780), numel * (bits == 0x0001), numel]


def test_a_tally_is_added_to() -> None:
    kernel, tally = compile_kernel(BF16, F16), Tally(10, 20, 30)
    data, out = np.array([0x4780, 0x0001, 0x3F80], "u2"), np.zeros(3, "u2")
    kernel(data.ctypes.data, out.ctypes.data, 3, tally)
    assert list(tally) == [11, 21, 32]


def test_kernels_are_compiled_once() -> None:
    """Threads that ask at once get the same kernel, and so do options that make no difference."""
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: compile_kernel(F64, F16, clamp=True), range(8)))
    assert len({id(kernel) for kernel in found}) == 1
    assert compile_kernel(BF16, F32, clamp=True) is compile_kernel(BF16, F32, clamp=False)


def test_threads_share_a_kernel() -> None:
    kernel = compile_kernel(F32, F16)
    x = np.random.default_rng(0).permutation(samples(F32))
    parts = [part.tobytes() for part in np.array_split(x, 8)]
    alone = [call(kernel, F32, F16, part) for part in parts]
    start = threading.Barrier(len(parts))

    def work(part: bytes) -> list[tuple[bytearray, list[int]]]:
        start.wait()
        return [call(kernel, F32, F16, part) for _ in range(5)]

    with ThreadPoolExecutor(len(parts)) as pool:
        assert list(pool.map(work, parts)) == [[result] * 5 for result in alone]


def test_a_call_drops_the_gil() -> None:
    kernel, data, out = compile_kernel(BF16, F16), np.ones(1 << 20, "u2"), np.empty(1 << 20, "u2")
    arguments = (data.ctypes.data, out.ctypes.data, data.size, Tally())
    entered, others_ran, seen = threading.Event(), threading.Event(), []

    def work() -> None:
        entered.set()
        for _ in range(3000):
            kernel(*arguments)
            if others_ran.is_set():
                seen.append(True)
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        entered.wait()
        others_ran.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen


MXCSR_IR = """
declare void @llvm.x86.sse.ldmxcsr(ptr)
declare void @llvm.x86.sse.stmxcsr(ptr)
define void @cast(ptr %kernel, ptr %registers, i64 %numel, ptr %arguments) {
  %saved = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %saved)
  call void @llvm.x86.sse.ldmxcsr(ptr %registers)
  %src = load ptr, ptr %arguments
  %second = getelementptr ptr, ptr %arguments, i64 1
  %out = load ptr, ptr %second
  %third = getelementptr ptr, ptr %arguments, i64 2
  %tally = load ptr, ptr %third
  call void %kernel(ptr %src, ptr %out, i64 %numel, ptr %tally)
  %after = getelementptr i32, ptr %registers, i64 1
  call void @llvm.x86.sse.stmxcsr(ptr %after)
  call void @llvm.x86.sse.ldmxcsr(ptr %saved)
  ret void
}
"""


@cache
def with_mxcsr() -> Kernel:
    """Calls a kernel under another MXCSR and stores the one found after it."""
    target = host_target()
    return link(compile_object(MXCSR_IR, target), target)


@on_x86
@pytest.mark.parametrize("native_half", [True, False])
@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_the_threads_floating_point_state_does_not_matter(
    pair: tuple[DType, DType], native_half: bool
) -> None:
    src, dst = pair
    target = host_target()
    if native_half and not target.native_half:
        pytest.skip("this CPU cannot convert half precision")
    image = object_of(src, dst, target, clamp=False, native_half=native_half)
    kernel = link(image, target)
    address = ctypes.cast(kernel, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    x = samples(src)
    bits, counts = by_reference(src, dst, False)
    flush = 1 << 15 | 1 << 6  # FTZ, DAZ
    masked, trapping, upward = 0x1F80, 0, 2 << 13
    for mxcsr in (masked | flush, masked | flush | upward, trapping | flush):
        out, tally = np.zeros(x.size, f"u{dst.itemsize}"), Tally()
        registers = (ctypes.c_uint32 * 2)(mxcsr)
        arguments = (ctypes.c_void_p * 3)(x.ctypes.data, out.ctypes.data, ctypes.addressof(tally))
        with_mxcsr()(address, ctypes.addressof(registers), x.size, arguments)
        overflowed, flushed, changed = tally
        assert np.array_equal(as_bits(bytearray(out.tobytes()), dst), bits)
        assert (overflowed, flushed, changed - overflowed - flushed) == counts
        assert list(registers) == [mxcsr, mxcsr]


# compilers call functions for halves where the target has no instructions: quickly seen there
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "x86-64 without F16C")) for n in SCANNED],
)
def test_no_kernel_needs_an_external_symbol(name: str) -> None:
    """Every pair, clamped or not, in each form that the target may get."""
    target = SCANNED[name]()
    for src, dst in PAIRS:
        for native_half in {target.native_half, False}:
            for clamp in (False,) if lossless(src, dst) else (False, True):
                image = object_of(src, dst, target, clamp=clamp, native_half=native_half)
                assert undefined_symbols(image) == (), (src, dst, native_half, clamp)


def test_the_scan_finds_helper_calls() -> None:
    assert not BASELINE.native_half
    image = object_of(F32, F16, BASELINE, clamp=False, native_half=True)
    assert set(undefined_symbols(image)) == {"__extendhfsf2", "__truncsfhf2"}

    ir = """
define void @cast(ptr %src, ptr %out) {
  %x = load double, ptr %src
  %y = fptrunc double %x to half
  store half %y, ptr %out
  ret void
}
"""
    target = host_target()
    if target.architecture == "x86_64" and "+avx512fp16" not in target.features:
        assert undefined_symbols(compile_object(ir, target)) == ("__truncdfhf2",)


@pytest.mark.parametrize("image", [b"", b"\xcf\xfa\xed\xfe" * 20, b"\x7fELF\x01\x01" + bytes(60)])
def test_the_scan_refuses_other_formats(image: bytes) -> None:
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF object"):
        undefined_symbols(image)


DRIVER = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef void cast(const void *, void *, uint64_t, uint64_t *);
#define X(name) extern cast name;
#include "kernels.h"
#undef X
#define X(name) name,
static cast *const kernels[] = {
#include "kernels.h"
};

/* index, numel, source bytes, target bytes, FPCR; elements in, elements and tally out */
int main(int argc, char **argv)
{
    uint64_t numel = strtoull(argv[2], 0, 10), tally[3] = {0, 0, 0}, after;
    uint64_t src_nbytes = numel * atoi(argv[3]), out_nbytes = numel * atoi(argv[4]);
    uint64_t fpcr = strtoull(argv[5], 0, 10), before;
    char *src = malloc(src_nbytes + 1), *out = malloc(out_nbytes + 1);
    if (argc != 6 || fread(src + 1, 1, src_nbytes, stdin) != src_nbytes)
        return 1;
    __asm__ volatile("mrs %0, fpcr\\n msr fpcr, %1" : "=&r"(before) : "r"(fpcr) : "memory");
    kernels[atoi(argv[1])](src + 1, out + 1, numel, tally);
    __asm__ volatile("mrs %0, fpcr\\n msr fpcr, %1" : "=&r"(after) : "r"(before) : "memory");
    fwrite(tally, 8, 3, stdout);
    fwrite(out + 1, 1, out_nbytes, stdout);
    return after == fpcr ? 0 : 2;
}
"""


@pytest.mark.slow
def test_aarch64_kernels_equal_the_reference(tmp_path: Path) -> None:
    gcc, qemu = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if gcc is None or qemu is None:
        needs.lacking("gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user")
    cases = [
        (src, dst, clamp, native_half)
        for src, dst in PAIRS
        for clamp in ((False,) if lossless(src, dst) else (False, True))
        for native_half in (True, False)
    ]
    objects = []
    for index, (src, dst, clamp, native_half) in enumerate(cases):
        ir = kernel_ir(
            src, dst, clamp=clamp, native_half=native_half, architecture="aarch64"
        ).replace("@cast(", f"@cast_{index}(")
        objects.append(tmp_path / f"{index}.o")
        objects[-1].write_bytes(compile_object(ir, AARCH64))
    (tmp_path / "kernels.h").write_text("".join(f"X(cast_{i})\n" for i in range(len(cases))))
    (tmp_path / "driver.c").write_text(DRIVER)
    driver = tmp_path / "driver"
    subprocess.run(
        [gcc, "-O1", "-static", "-o", driver, tmp_path / "driver.c", *objects], check=True
    )

    hostile = 1 << 24 | 1 << 25 | 2 << 22 | 1 << 19 | 1 << 26  # FZ, DN, RMode, FZ16, AHP
    for index, (src, dst, clamp, _) in enumerate(cases):
        x = samples(src)
        sizes = (index, x.size, src.itemsize, dst.itemsize, hostile)
        done = subprocess.run(
            [qemu, driver, *map(str, sizes)], input=x.tobytes(), capture_output=True, check=True
        )
        overflowed, flushed, changed = np.frombuffer(done.stdout[:24], np.uint64).tolist()
        bits, counts = by_reference(src, dst, clamp)
        assert np.array_equal(as_bits(bytearray(done.stdout[24:]), dst), bits), cases[index]
        assert (overflowed, flushed, changed - overflowed - flushed) == counts, cases[index]
