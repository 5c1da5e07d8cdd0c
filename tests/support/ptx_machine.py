"""A machine for the part of PTX that kernels here use: all threads in step, memory checked.

Instructions are as the PTX ISA reference has them. One that is not known here, an address outside
of what was given, and an access that is not aligned raise, as a device would refuse them. Threads
that have come apart run the earliest instruction first, so those of a warp meet again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Ahead = Literal["first", "last"] | None

WARP = 32
_SHARED = 0x5000_0000  # where variables in shared memory begin

_TYPES = {
    "pred": np.dtype("?"),
    **{f"{k}{n}": np.dtype(f"u{n // 8}") for k in "bu" for n in (8, 16, 32, 64)},
    **{f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    **{f"f{n}": np.dtype(f"f{n // 8}") for n in (16, 32, 64)},
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "add.rn": np.add,
    "sub.rn": np.subtract,
    "mul.rn": np.multiply,
    "div.rn": np.divide,
    "div": np.floor_divide,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": np.negative,
    "abs": np.abs,
    "not": np.invert,
    "mov": lambda x: x,
    "rcp.rn": np.reciprocal,
    # a device's may differ in the last place
    "rcp.approx.ftz": lambda x: _flushed(np.reciprocal(_flushed(x))),
}
_TERNARY: dict[str, Callable[[Any, Any, Any], Any]] = {
    "mad.lo": lambda x, y, z: x * y + z,
    # a device rounds once
    "fma.rn": lambda x, y, z: x * y + z,
}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.]*)\s*(.*)")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,{}\[\]]+")


@dataclass(frozen=True, slots=True)
class _Instruction:
    guard: str
    negated: bool
    name: str
    operands: tuple[str, ...]


class Machine:
    """One kernel, and the memory that it may touch, which begins at ``base``; changed in place."""

    def __init__(self, ptx: str, memory: Array, base: int) -> None:
        self._memory, self._base = memory, base
        self._code: list[_Instruction] = []
        self._labels: dict[str, int] = {}
        self._shared: dict[str, int] = {}
        self._shared_nbytes = 0
        body = ptx[ptx.index("\n{") + 2 : ptx.rindex("}")]
        self._parameters = re.findall(r"\.param \.u64 (\w+)", ptx)
        for line in body.splitlines():
            text = line.partition("//")[0].strip()
            scope = re.fullmatch(r"\{(.*;)\s*\}", text)
            for statement in scope[1].split(";") if scope else [text.rstrip(";")]:
                self._parse(statement.strip())

    def _parse(self, line: str) -> None:
        if line.endswith(":"):
            self._labels[line[:-1]] = len(self._code)
        elif shared := re.match(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]", line):
            align, name, nbytes = int(shared[1]), shared[2], int(shared[3])
            start = -(-self._shared_nbytes // align) * align
            self._shared[name], self._shared_nbytes = _SHARED + start, start + nbytes
        elif line and not line.startswith(".reg"):
            found = _INSTRUCTION.fullmatch(line)
            assert found, f"not an instruction: {line}"
            operands = tuple(_OPERAND.findall(found[4]))
            self._code.append(_Instruction(found[2] or "", found[1] == "!", found[3], operands))

    def launch(
        self, blocks: int, threads: int, arguments: Sequence[int], *, ahead: Ahead = None
    ) -> None:
        """Run the kernel to its end, with 64 bits of each argument.

        ``ahead`` says which warp runs as far as it can before another does; else all are in step.
        """
        total = blocks * threads
        self._arguments = dict(zip(self._parameters, arguments, strict=True))
        index = np.arange(total, dtype=np.uint64)
        self._registers: dict[str, Array] = {
            "%tid.x": index % threads,
            "%ctaid.x": index // threads,
            "%ntid.x": np.full(total, threads, np.uint64),
            "%nctaid.x": np.full(total, blocks, np.uint64),
        }
        self._total, self._threads = total, threads
        # what is in shared memory at first is not known
        self._blocks = np.full((blocks, self._shared_nbytes), 0xA5, np.uint8)
        at = np.zeros(total, np.int64)  # the next instruction of each thread
        waits = np.zeros(total, bool)
        end = len(self._code)
        while True:
            ready = np.where(waits, end, at)
            if ahead and (ready < end).any():
                warps = np.arange(total) // WARP
                running = warps[ready < end]
                ready[warps != (running[0] if ahead == "first" else running[-1])] = end
            here = int(ready.min())
            if here == end:
                if not waits.any():
                    return
                # threads that have ended count as having come to the barrier
                waits[:] = False
                continue
            self._step(here, np.flatnonzero(ready == here), at, waits, end)

    def _step(self, here: int, who: Array, at: Array, waits: Array, end: int) -> None:
        code = self._code[here]
        at[who] = here + 1
        if code.guard:
            who = who[self._get(code.guard, "pred", who) != code.negated]
        if code.name in ("bra", "bra.uni"):
            at[who] = self._labels[code.operands[0]]
        elif code.name == "ret":
            at[who] = end
        elif code.name == "bar.sync":
            waits[who] = True
        elif who.size:
            with np.errstate(all="ignore"):
                self._execute(code.name, code.operands, who)

    def _execute(self, name: str, operands: tuple[str, ...], who: Array) -> None:
        first, *rest = name.split(".")
        kind = name.rpartition(".")[2]
        stem = name.removesuffix(f".{kind}")
        if first in ("ld", "st", "atom"):
            self._access(first, rest, operands, who)
        elif first == "mov" and "{" in "".join(operands):
            self._pack(operands, kind, who)
        elif stem in _BINARY:
            x, y = (self._get(text, kind, who) for text in operands[1:])
            self._set(operands[0], _BINARY[stem](x, y), who)
        elif stem in _UNARY:
            self._set(operands[0], _UNARY[stem](self._get(operands[1], kind, who)), who)
        elif stem in _TERNARY:
            x, y, z = (self._get(text, kind, who) for text in operands[1:])
            self._set(operands[0], _TERNARY[stem](x, y, z), who)
        elif stem in ("shl", "shr"):
            x, by = self._get(operands[1], kind, who), self._get(operands[2], "u32", who)
            most = x.itemsize * 8
            by = np.minimum(by, most - 1 if kind[0] == "s" else most)
            moved = (np.left_shift if stem == "shl" else np.right_shift)(
                x, np.minimum(by, most - 1).astype(x.dtype)
            )
            self._set(operands[0], np.where(by < most, moved, x.dtype.type(0)), who)
        elif stem == "mul.wide":
            wide = _TYPES[f"{kind[0]}{int(kind[1:]) * 2}"]
            x, y = (self._get(text, kind, who).astype(wide) for text in operands[1:])
            self._set(operands[0], x * y, who)
        elif name == "mul.hi.u32":
            x, y = (self._get(text, "u32", who).astype(np.uint64) for text in operands[1:])
            self._set(operands[0], (x * y >> np.uint64(32)).astype(np.uint32), who)
        elif stem == "selp":
            x, y = (self._get(text, kind, who) for text in operands[1:3])
            self._set(operands[0], np.where(self._get(operands[3], "pred", who), x, y), who)
        elif first == "setp" and len(rest) == 2:
            x, y = (self._get(text, kind, who) for text in operands[1:])
            self._set(operands[0], _compare(rest[0], x, y), who)
        elif first == "cvt":
            x = self._get(operands[1], kind, who)
            target = _TYPES[rest[-2]]
            # rounding is numpy's: to nearest even, or to zero for integers; what is exact has none
            to_zero = rest[0] == "rzi" and x.dtype.kind == "f" and target.kind == "i"
            exact = len(rest) == 2 and _exact(x.dtype, target)
            assert rest[0] == "rn" or to_zero or exact, name
            made = x.astype(target)
            if made.dtype.kind == "i" and made.itemsize == 1:  # a register has 16 bits at least
                made = made.astype(np.int16)
            self._set(operands[0], made, who)
        elif name == "bfe.u32":
            x, start, length = (self._get(text, "u32", who) for text in operands[1:])
            self._set(operands[0], x >> start & ((np.uint32(1) << length) - np.uint32(1)), who)
        elif name == "bfe.s32":
            x, start, length = (self._get(text, "s32", who) for text in operands[1:])
            self._set(operands[0], x << (32 - start - length) >> (32 - length), who)
        elif name == "prmt.b32":
            x, y, chosen = (self._get(text, "u32", who) for text in operands[1:])
            self._set(operands[0], _permute(x, y, chosen), who)
        elif name in ("shfl.sync.down.b32", "shfl.sync.bfly.b32", "shfl.sync.idx.b32"):
            self._shuffle(name.split(".")[2], operands, who)
        elif name == "vote.sync.ballot.b32":
            self._vote(operands, who)
        else:
            raise NotImplementedError(name)

    def _shuffle(self, kind: str, operands: tuple[str, ...], who: Array) -> None:
        target, source, by, clamp, members = operands
        if kind == "idx":  # of a lane of the same segment
            segment = int(clamp) >> 8 & 31
            assert (int(clamp) & 31, members) == (31, "-1"), operands
            values = self._get(source, "u32", who).reshape(_whole_warps(who), WARP)
            chosen = self._get(by, "u32", who).reshape(values.shape).astype(np.int64)
            there = np.arange(WARP) & segment | chosen & (31 & ~segment)
            self._set(target, np.take_along_axis(values, there, axis=1).reshape(-1), who)
            return
        assert (clamp, members) == ("31", "-1"), operands
        values = self._get(source, "u32", who).reshape(_whole_warps(who), WARP)
        lanes = np.arange(WARP)
        there = lanes ^ int(by) if kind == "bfly" else lanes + int(by)
        there = np.where(there < WARP, there, lanes)
        self._set(target, values[:, there].reshape(-1), who)

    def _vote(self, operands: tuple[str, ...], who: Array) -> None:
        target, source, members = operands
        assert members == "-1", operands
        masks = self._get(source, "pred", who).reshape(_whole_warps(who), WARP)
        votes = (masks.astype(np.uint32) << np.arange(WARP, dtype=np.uint32)).sum(axis=1)
        self._set(target, np.repeat(votes.astype(np.uint32), WARP), who)

    def _pack(self, operands: tuple[str, ...], kind: str, who: Array) -> None:
        parts = next(_OPERAND.findall(text[1:-1]) for text in operands if text[0] == "{")
        part = f"b{int(kind[1:]) // len(parts)}"
        if operands[0][0] == "{":
            whole = self._get(operands[1], kind, who)
            pieces = whole.view(_TYPES[part]).reshape(-1, len(parts))
            for index, name in enumerate(parts):
                self._set(name, pieces[:, index], who)
        else:
            pieces = np.stack([self._get(name, part, who) for name in parts], axis=1)
            self._set(operands[0], pieces.reshape(-1).view(_TYPES[kind]), who)

    def _access(self, first: str, rest: list[str], operands: tuple[str, ...], who: Array) -> None:
        space, dtype = rest[0], _TYPES[rest[-1]]
        place = operands[0] if first == "st" else operands[1]
        if space == "param":
            self._set(operands[0], np.uint64(self._arguments[place[1:-1]]), who)
            return
        symbol, _, offset = place[1:-1].partition("+")
        address = self._get(symbol, "u64", who) + np.uint64(
            int(offset or 0) % 2**64
        )  # it may be negative
        names = operands[1] if first == "st" else operands[0]
        parts = _OPERAND.findall(names.strip("{}"))
        assert len(parts) == int(next((p[1:] for p in rest if p in ("v2", "v4")), 1))
        nbytes = dtype.itemsize * len(parts)
        assert (address % nbytes == 0).all(), f"{'.'.join([first, *rest])} is not aligned"
        if space == "global":
            memory = self._memory
            at = (address - np.uint64(self._base)).astype(np.int64)
            assert ((at >= 0) & (at + nbytes <= memory.size)).all(), "outside of memory"
        else:
            assert space == "shared"
            memory = self._blocks.reshape(-1)
            at = (address - np.uint64(_SHARED)).astype(np.int64)
            assert ((at >= 0) & (at + nbytes <= self._shared_nbytes)).all(), "outside of memory"
            at += who // self._threads * self._shared_nbytes
        bytes_at = at[:, None] + np.arange(nbytes)
        if first == "ld":
            values = memory[bytes_at].view(dtype)
            if dtype.kind == "i":  # registers are wider
                values = values.astype(np.int64)
            for index, name in enumerate(parts):
                self._set(name, values[:, index], who)
        elif first == "st":
            values = np.stack([self._get(name, rest[-1], who) for name in parts], axis=1)
            memory[bytes_at] = values.view(np.uint8)
        else:
            assert rest[1:-1] in (["add"], ["max"]), rest
            joined = np.add if rest[1] == "add" else np.maximum
            added = self._get(operands[2], rest[-1], who)
            for index, value in zip(bytes_at, added, strict=True):  # one thread after the other
                cell = memory[index].view(dtype)
                self._set(operands[0], cell[0], who[:1])
                memory[index] = joined(cell, value).view(np.uint8)

    def _get(self, text: str, kind: str, who: Array) -> Array:
        """What an operand is for some threads, as an array of a type."""
        dtype = _TYPES[kind]
        if text in self._shared:
            value = np.full(who.size, self._shared[text], np.uint64)
        elif text[0] == "%":
            value = self._registers[text][who]
        elif text[:2] in ("0f", "0d"):
            value = np.full(who.size, int(text[2:], 16), np.uint64)
        else:
            value = np.full(who.size, int(text.rstrip("U"), 0) % 2**64, np.uint64)
        if kind == "pred":
            return value.astype(bool)
        return value.astype(f"u{dtype.itemsize}").view(dtype)

    def _set(self, name: str, values: Any, who: Array) -> None:
        values = np.broadcast_to(values, who.shape)
        bits = values.view(f"u{values.itemsize}") if values.dtype != bool else values
        if name not in self._registers:
            self._registers[name] = np.zeros(self._total, np.uint64)
        self._registers[name][who] = bits


def _whole_warps(who: Array) -> int:
    """How many warps some threads are; all of them have to be there."""
    whole, rest = divmod(who.size, WARP)
    assert not rest
    lanes = who.reshape(whole, WARP)
    assert (lanes == lanes[:, :1] // WARP * WARP + np.arange(WARP)).all()
    return whole


def _flushed(x: Array) -> Array:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _exact(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether a conversion needs no rounding: between integers, or to a wider float."""
    if source.kind == "f" and target.kind == "f":
        return bool(target.itemsize > source.itemsize)
    return source.kind in "iu" and target.kind in "iu"


def _compare(name: str, x: Array, y: Array) -> Array:
    """Comparisons of floats are false where one is NaN, and true if their name ends in "u"."""
    unordered = np.isnan(x) | np.isnan(y) if x.dtype.kind == "f" else np.zeros(x.shape, bool)
    if name not in _COMPARE:
        found: Array = _COMPARE[name.removesuffix("u")](x, y) | unordered
    else:
        found = _COMPARE[name](x, y) & ~unordered
    return found


def _permute(x: Array, y: Array, chosen: Array) -> Array:
    pool = np.stack([x, y], axis=1).view(np.uint8)  # eight bytes
    out = np.empty((x.size, 4), np.uint8)
    for index in range(4):
        which = chosen >> np.uint32(4 * index) & np.uint32(15)
        byte = np.take_along_axis(pool, (which & np.uint32(7))[:, None].astype(np.int64), 1)[:, 0]
        out[:, index] = np.where(which & np.uint32(8), np.where(byte >> 7, 0xFF, 0), byte)
    words: Array = out.view(np.uint32)
    return words[:, 0]
