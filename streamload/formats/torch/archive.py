"""Reads checkpoints that torch.save writes: a zip archive with a pickle and the tensors' bytes.

``data.pkl`` describes the tensors (see `streamload.formats.torch.unpickler`); each storage is an
entry of its own, ``data/0`` and so on. A tensor is a view of a storage. If its elements are
contiguous, it is a range of the file, which may overlap others; if not, it is a
`streamload.files.header.View`.

Source: ``torch/serialization.py`` of torch 2.13 and ``caffe2/serialize/inline_container.h`` of the
same, for the names and the alignment of entries.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from streamload.core.dtypes import BY_NAME, DType
from streamload.core.tensors import TensorInfo
from streamload.core.units import round_up
from streamload.errors import HeaderError
from streamload.files.header import Header, View, check_name, describe, some
from streamload.formats.reader import File, FormatReader, read_exactly
from streamload.formats.torch import legacy, script, zip_entries
from streamload.formats.torch.choosing import SAVE, chosen, versions_beside
from streamload.formats.torch.globals import Lookup, Tensor, named_or_foreign
from streamload.formats.torch.pickles import check_length, unpickle
from streamload.formats.torch.unpickler import Loaded

_AGAIN = 'torch.save(torch.load("{name}", weights_only=True), "model.pth")'

_TAR_AT, _TAR = 257, b"ustar"
_HEAD_NBYTES = 512
#: Files that Trainers write with the weights, by the beginnings of their names.
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "random_states")

_FIRST_ENTRY = re.compile(rb"[^/]+/data(\.pkl|/\d+)")
_MOST_SHOWN = 8  # lengths of a shape in an error
_ORDER_NBYTES = 8  # most that are shown of an entry byteorder
_ALIGNMENT = 64  # of the virtual ranges of views
_PAGE = 4096
_MOST_NBYTES = 2**62  # end of the last view: fits an int64


class TorchSave(FormatReader):
    """Reads the headers of torch.save's files; see `FormatReader`."""

    def looks(self, head: bytes) -> bool:
        name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        is_zip = head.startswith(zip_entries.MAGIC) and _FIRST_ENTRY.fullmatch(name) is not None
        return is_zip or legacy.is_legacy(head)

    def weights(self, names: Sequence[str]) -> Sequence[str]:
        found = [name for name in names if not name.startswith(_NO_WEIGHTS)]
        found = [name for name in found if "optim_states" not in name]  # DeepSpeed's
        return [name for name in found if not name.endswith(".bin") or "model" in name]

    def read_header(self, file: File) -> Header:
        archive = Archive.of(file)
        tensors = chosen(file, archive.root, self.key)
        _check_whole(file, archive.root, tensors)
        infos: list[TensorInfo] = []
        views: list[View] = []
        after = round_up(file.nbytes, _PAGE) + _PAGE  # apart from the last block of the file
        for name, tensor in tensors.items():
            info, view = archive.place(name, tensor, after)
            infos.append(info)
            if view is not None:
                views.append(view)
                after = round_up(view.stop, _ALIGNMENT)
        if after > _MOST_NBYTES:
            raise HeaderError(
                file.path, "its tensors are too large", f"at most {_MOST_NBYTES} bytes", after
            )
        infos.sort(key=lambda info: (info.start, info.stop, info.name))
        return Header(
            file.path,
            file.nbytes,
            archive.data_start,
            tuple(infos),
            {"format": "pt"},
            format="torch",
            views=tuple(views),
            versions=versions_beside(archive.root, tensors),
        )


@dataclass(frozen=True, slots=True)
class Archive:
    """The objects ``root`` of a file of torch.save, and the ranges of its storages.

    ``entries`` are by name in a zip archive, without the folder ``prefix``: ``data/0`` and so on.
    """

    file: File
    prefix: str
    entries: Mapping[str, zip_entries.Entry]
    root: Any = None

    @classmethod
    def of(cls, file: File) -> Archive:
        """Return the content of a file, without running its pickle; raise HeaderError."""
        head = file.read(0, _HEAD_NBYTES)
        if legacy.is_legacy(head):
            root, stored = legacy.read_legacy(file)
            return cls(file, "", stored, root)
        if not head.startswith(zip_entries.MAGIC):
            _refuse_other(file, head)
        listed = zip_entries.entries(file)
        names = [n for n in listed if n.count("/") == 1 and n.endswith("/data.pkl")]
        if len(names) != 1:
            problem = "is a zip archive, but not of torch.save"
            expected = "one entry data.pkl in one folder"
            found = f"{len(names)} of them, among {some(list(map(describe, listed)))}"
            raise HeaderError(file.path, problem, expected, found)
        prefix = names[0].removesuffix("data.pkl")
        entries = {n.removeprefix(prefix): e for n, e in listed.items() if n.startswith(prefix)}
        archive = cls(file, prefix, entries)
        archive._check_byteorder()
        scripted = "constants.pkl" in entries
        root = archive.unpickled("data.pkl", script.lookup if scripted else named_or_foreign).root
        return replace(archive, root=archive._scripted(root) if scripted else root)

    def find(self, name: str) -> zip_entries.Entry | None:
        """Return the entry of this name or None; raise HeaderError if it is compressed."""
        entry = self.entries.get(name)
        if entry is not None and entry.method:
            problem = f"its entry {name} is compressed"
            expected = "entries as torch.save stores them, or zip -0"
            raise HeaderError(self.file.path, problem, expected, f"method {entry.method}")
        return entry

    def _scripted(self, root: Any) -> dict[str, Tensor]:
        """Return the parameters and buffers of a TorchScript archive; raise HeaderError."""
        if (found := script.state_dict(root, self._source)) is not None:
            return found
        problem = "is a TorchScript archive that does not list its parameters"
        again = f'torch.save(torch.jit.load("{self.file.path.name}").state_dict(), "model.pth")'
        raise HeaderError(self.file.path, problem, again, "constants.pkl")

    def _source(self, name: str) -> bytes | None:
        """Return the code in an entry of a TorchScript archive; None if there is none."""
        if (entry := self.entries.get(name)) is None:
            return None
        check_length(self.file, entry.nbytes, name)
        raw = read_exactly(self.file, entry.start, entry.stop, name)
        source = script.inflate(raw) if entry.method else raw
        check_length(self.file, len(source or b""), name)
        return source

    @property
    def data_start(self) -> int:
        """The first file byte of all storages, chosen or not; 0 without any."""
        starts = (e.start for name, e in self.entries.items() if name.startswith("data/"))
        return min(starts, default=0)

    def unpickled(self, name: str, lookup: Lookup = named_or_foreign) -> Loaded:
        """Return the objects of a pickle, read without running it; raise HeaderError."""
        entry = self.find(name)
        assert entry is not None, "its name gave the prefix"
        check_length(self.file, entry.nbytes, name)
        raw = read_exactly(self.file, entry.start, entry.stop, name)
        return unpickle(self.file, raw, name, lookup=lookup)

    def _check_byteorder(self) -> None:
        """Raise HeaderError if a big-endian machine wrote the file."""
        entry = self.find("byteorder")
        if entry is None:
            return  # before torch 2.1
        stop = min(entry.stop, entry.start + _ORDER_NBYTES)
        found = read_exactly(self.file, entry.start, stop, "byteorder")
        if found != b"little":
            problem = "is of a machine with another byte order"
            again = _AGAIN.format(name=self.file.path.name)
            shown = describe(found.decode("ascii", "replace"))
            raise HeaderError(self.file.path, problem, f"little: {again}", shown)

    def locate(self, name: str, tensor: Tensor) -> tuple[DType, int]:
        """Return a tensor's dtype and the file byte of its first element."""
        fail = partial(HeaderError, self.file.path, tensor=name)
        check_name(name, self.file.path)
        if tensor.problem or tensor.storage is None:
            raise fail(f"cannot be read: {tensor.problem}", "a dense tensor with values")
        dtype = BY_NAME.get(tensor.dtype)
        if dtype is None or not dtype.itemsize:
            raise fail("unknown dtype", f"one of {', '.join(BY_NAME)}", tensor.dtype)
        storage = tensor.storage
        entry = self.find(f"data/{storage.key}")
        if entry is None:
            expected = f"the entry {self.prefix}data/{storage.key[:80]}"
            raise fail("its storage is missing", expected, "no such entry")
        of_storage = BY_NAME.get(storage.dtype)
        stated_nbytes = storage.numel * (of_storage.itemsize if of_storage else 1)
        if stated_nbytes != entry.nbytes:
            raise fail(
                "its storage has another length than data.pkl says", stated_nbytes, entry.nbytes
            )
        _check_layout(fail, tensor)
        if not math.prod(tensor.shape):
            return dtype, entry.start
        at = entry.start + (storage.offset + tensor.offset) * dtype.itemsize
        extents = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
        stop = at + (sum(extents) + 1) * dtype.itemsize
        if stop > entry.stop:
            expected = f"{entry.nbytes} bytes of data/{storage.key}"
            raise fail("leads out of its storage", expected, f"its end at {stop - entry.start}")
        return dtype, at

    def place(self, name: str, tensor: Tensor, after: int) -> tuple[TensorInfo, View | None]:
        """Return a tensor's info, and its `View` if its elements are not contiguous, else None.

        The view's virtual range begins at byte ``after``. Raises as `locate`.
        """
        dtype, at = self.locate(name, tensor)
        shape, path = tensor.shape, self.file.path
        numel = math.prod(shape)
        axes = _axes(shape, tensor.strides)
        if not numel or axes in ([], [(numel, 1)]):
            return TensorInfo(name, dtype, shape, path, at, at + numel * dtype.itemsize), None
        lengths, steps = zip(*axes, strict=True)
        steps = tuple(step * dtype.itemsize for step in steps)
        view = View.strided(after, at, dtype.itemsize, lengths, steps)
        return TensorInfo(name, dtype, shape, path, view.start, view.stop), view


def _check_whole(file: File, root: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raise HeaderError for DeepSpeed's ZeRO-3, whose files have the tensors in parts elsewhere."""
    stated = root.get("param_shapes") if type(root) is dict else None
    groups = stated if type(stated) is list else [stated]
    shapes = {name: s for group in groups if type(group) is dict for name, s in group.items()}
    for name, tensor in tensors.items():
        shape = shapes.get(name)
        if type(shape) is tuple and shape != tensor.shape and 0 in tensor.shape:
            raise HeaderError(
                file.path,
                "is one rank's part of a ZeRO-3 checkpoint, whose weights are in *_optim_states.pt",
                "what `python zero_to_fp32.py . OUT` writes, run in the folder above",
                f"{list(tensor.shape)} in place of {list(shape)[:_MOST_SHOWN]}",
                tensor=name,
            )


def _refuse_other(file: File, head: bytes) -> None:
    """Raise HeaderError for a file that is not a zip archive, and name its kind."""
    path = file.path
    if head[_TAR_AT:].startswith(_TAR):
        problem = "is a tar archive, of torch.save before version 0.1.10"
        again = _AGAIN.format(name=path.name).replace("True", "False")  # torch takes no other
        again += ", if you trust the file: that call runs what is in it"
        raise HeaderError(path, problem, again)
    if head[:1] == b"\x80":
        raise HeaderError(path, "is a pickle, which could run anything", SAVE, "a pickle alone")
    expected = "a file that torch.save wrote"
    raise HeaderError(path, "is not of torch.save", expected, describe(head[:16]))


def _check_layout(fail: Callable[..., HeaderError], tensor: Tensor) -> None:
    """Raise ``fail(...)`` if a tensor's offset, shape or strides break torch's rules."""
    shape, strides = tensor.shape, tensor.strides
    if len(shape) != len(strides):
        given = f"{len(shape)} lengths and {len(strides)} strides"
        raise fail("the shape and the strides do not agree", "a stride for each axis", given)
    numbers = (tensor.offset, *shape, *strides)
    if min(numbers) < 0 or max(numbers) > _MOST_NBYTES:
        found = next(number for number in numbers if not 0 <= number <= _MOST_NBYTES)
        raise fail("an offset, length or stride is not valid", f"0 to {_MOST_NBYTES}", found)
    if math.prod(shape) > _MOST_NBYTES // 8:
        raise fail("the shape is too large", f"at most {_MOST_NBYTES // 8} elements", list(shape))


def _axes(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Join axes if possible; return (length, stride) of each: one of stride 1 if contiguous."""
    axes: list[tuple[int, int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if axes and axes[-1][1] == n * stride:
            axes[-1] = axes[-1][0] * n, stride
        else:
            axes.append((n, stride))
    return axes
