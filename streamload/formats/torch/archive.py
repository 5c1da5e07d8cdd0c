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
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from streamload.core.dtypes import BY_NAME
from streamload.core.memory import first_that_fits
from streamload.core.tensors import TensorInfo
from streamload.core.units import round_up
from streamload.errors import HeaderError
from streamload.files.header import Header, View, check_name, describe, some
from streamload.files.limits import check_nbytes
from streamload.formats.reader import File, FormatReader, read_exactly, register_reader
from streamload.formats.torch import zip_entries
from streamload.formats.torch.globals import PickleError, Tensor
from streamload.formats.torch.unpickler import load

_SAVE = 'torch.save(model.state_dict(), "model.pth")'
_AGAIN = 'torch.save(torch.load("{name}", weights_only=True), "model.pth")'

# First bytes of files that torch.save wrote before version 1.6; then those of other kinds of files.
_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_TAR_AT, _TAR = 257, b"ustar"
_HEAD_NBYTES = 512
_LOOKALIKES = {
    b"version ": "a Git LFS pointer, not the file that it stands for",
    b"<!DOCTYP": "a web page",
    b"<!doctyp": "a web page",
    b"\x93NUMPY": "an array of numpy",
    b"\x89HDF": "an HDF5 file",
}

#: Files that Trainers write with the weights, by the beginnings of their names.
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "random_states")

_LONG_NBYTES = 2**20  # of a pickle: free memory is checked before a longer one is read
_DEEPEST = 8  # levels of nested dicts that are searched
_LISTED = 8
_SHOWN = 80  # letters of a key
#: The key of the outermost dict.
ROOT = "."
_ALIGNMENT = 64  # of the virtual ranges of views
_PAGE = 4096
_MOST_NBYTES = 2**62  # end of the last view: fits an int64


@dataclass(frozen=True)
class TorchZip(FormatReader):
    """Reads the headers of torch.save's files; see `FormatReader`."""

    key: str | None = None  # of the dict that is the checkpoint; None: the only one with tensors

    name = "torch"
    suffixes = (".pth", ".bin", ".pt", ".ckpt")
    single = "pytorch_model.bin"
    index = "pytorch_model.bin.index.json"

    def looks(self, head: bytes) -> bool:
        stop = 30 + int.from_bytes(head[26:28], "little")
        is_zip = head.startswith(zip_entries.MAGIC) and head[30:stop].endswith(b"/data.pkl")
        return is_zip or head[2:].startswith(_LEGACY)

    def weights(self, names: Sequence[str]) -> Sequence[str]:
        found = [name for name in names if not name.startswith(_NO_WEIGHTS)]
        return [name for name in found if not name.endswith(".bin") or "model" in name]

    def keyed(self, key: str | None) -> FormatReader:
        return self if key is None else TorchZip(key)

    def read_header(self, file: File) -> Header:
        archive = _Archive.of(file)
        found = archive.unpickled()
        chosen = _chosen(file, found, self.key)
        infos: list[TensorInfo] = []
        views: list[View] = []
        after = round_up(file.nbytes, _PAGE) + _PAGE  # apart from the last block of the file
        for name, tensor in chosen.items():
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
            format=self.name,
            views=tuple(views),
        )


@dataclass(frozen=True, slots=True)
class _Archive:
    """A zip archive of torch.save; ``entries`` are by name without the folder ``prefix``."""

    file: File
    prefix: str
    entries: Mapping[str, zip_entries.Entry]

    @classmethod
    def of(cls, file: File) -> _Archive:
        """Return the archive of a file; raise HeaderError if no recent torch.save wrote it."""
        head = file.read(0, _HEAD_NBYTES)
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
        if "constants.pkl" in entries:
            problem = "is a TorchScript archive: code and tensors"
            again = f'torch.save(torch.jit.load("{file.path.name}").state_dict(), "model.pth")'
            raise HeaderError(file.path, problem, again, "constants.pkl")
        return cls(file, prefix, entries)

    def find(self, name: str) -> zip_entries.Entry | None:
        """Return the entry of this name or None; raise HeaderError if it is compressed."""
        entry = self.entries.get(name)
        if entry is not None and entry.method:
            problem = f"its entry {name} is compressed"
            expected = "entries as torch.save stores them, or zip -0"
            raise HeaderError(self.file.path, problem, expected, f"method {entry.method}")
        return entry

    @property
    def data_start(self) -> int:
        """The first file byte of all storages, chosen or not; 0 without any."""
        starts = (e.start for name, e in self.entries.items() if name.startswith("data/"))
        return min(starts, default=0)

    def unpickled(self) -> Any:
        """Return the objects of ``data.pkl``, read without running it; raise HeaderError."""
        self._check_byteorder()
        path, entry = self.file.path, self.find("data.pkl")
        assert entry is not None, "its name gave the prefix"
        check_nbytes(path, "data.pkl is too long", entry.nbytes)
        if entry.nbytes > _LONG_NBYTES:
            first_that_fits([(None, entry.nbytes)], [(f"data.pkl of {path}", entry.nbytes)])
        raw = read_exactly(self.file, entry.start, entry.stop, "data.pkl")
        try:
            return load(raw)
        except PickleError as error:
            if b"_parameters" in raw and b"_modules" in raw and error.named:
                problem = f"is a pickled module, of {error.found}: no code is run to open a file"
                raise HeaderError(path, problem, _SAVE, error.found) from error
            expected = f"{error.expected} ({_SAVE} writes them)" if error.named else error.expected
            raise HeaderError(path, f"data.pkl {error}", expected, error.found) from error

    def _check_byteorder(self) -> None:
        """Raise HeaderError if a big-endian machine wrote the file."""
        entry = self.find("byteorder")
        if entry is None:
            return  # before torch 2.1
        stop = min(entry.stop, entry.start + _LISTED)
        found = read_exactly(self.file, entry.start, stop, "byteorder")
        if found != b"little":
            problem = "is of a machine with another byte order"
            again = _AGAIN.format(name=self.file.path.name)
            shown = describe(found.decode("ascii", "replace"))
            raise HeaderError(self.file.path, problem, f"little: {again}", shown)

    def place(self, name: str, tensor: Tensor, after: int) -> tuple[TensorInfo, View | None]:
        """Return a tensor's info, and its `View` if its elements are not contiguous, else None.

        The view's virtual range begins at byte ``after``. Raise HeaderError if the tensor or its
        storage is not valid.
        """
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
        shape = tensor.shape
        numel = math.prod(shape)
        at = entry.start + tensor.offset * dtype.itemsize
        if not numel:
            return TensorInfo(name, dtype, shape, self.file.path, entry.start, entry.start), None
        axes = _axes(shape, tensor.strides)
        follows = axes in ([], [(numel, 1)])
        last = numel - 1 if follows else sum((n - 1) * stride for n, stride in axes)
        stop = at + (last + 1) * dtype.itemsize
        if stop > entry.stop:
            expected = f"{entry.nbytes} bytes of data/{storage.key}"
            raise fail("leads out of its storage", expected, f"its end at {stop - entry.start}")
        if follows:
            return TensorInfo(name, dtype, shape, self.file.path, at, stop), None
        lengths, steps = zip(*axes, strict=True)
        steps = tuple(step * dtype.itemsize for step in steps)
        view = View(after, at, dtype.itemsize, lengths, steps)
        return TensorInfo(name, dtype, shape, self.file.path, view.start, view.stop), view


def _refuse_other(file: File, head: bytes) -> None:
    """Raise HeaderError for a file that is not a zip archive, and name its kind."""
    path, again = file.path, _AGAIN.format(name=file.path.name)
    if head[2:].startswith(_LEGACY):
        raise HeaderError(path, "is of torch.save before version 1.6, no zip archive", again)
    if head[_TAR_AT:].startswith(_TAR):
        raise HeaderError(path, "is a tar archive, of torch.save before version 0.1.10", again)
    if head[:1] == b"\x80":
        raise HeaderError(path, "is a pickle, which could run anything", _SAVE, "a pickle alone")
    found = next((what for magic, what in _LOOKALIKES.items() if head.startswith(magic)), None)
    expected = "a zip archive, as torch.save writes"
    raise HeaderError(path, "is not of torch.save", expected, found or describe(head[:16]))


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


# --- which tensors --------------------------------------------------------------------------------


#: The keys that lead to a dict, as a linked list: (last key, those before); None for the outermost.
_Way: TypeAlias = "tuple[str, _Way] | None"


def _chosen(file: File, root: Any, key: str | None) -> Mapping[str, Tensor]:
    """Return the tensors of the dict at ``key``, or of the only dict with any; else HeaderError."""
    if key is not None and (tensors := _tensors_at(root, key)):
        return tensors
    found = sorted(_holders(root), key=lambda one: -len(one[1]))
    shown = [
        f"{describe(_key(way))} ({len(tensors)} tensor{'s' * (len(tensors) != 1)})"
        for way, tensors in found[:_LISTED]
    ]
    listed = some(shown, len(found))
    if key is not None:
        problem = f"key {describe(key)} holds no tensors by name"
        raise HeaderError(file.path, problem, listed or "a dict of tensors", "no such dict")
    if not found:
        what = "one tensor without a name" if isinstance(root, Tensor) else type(root).__name__
        raise HeaderError(file.path, "holds no tensors by name", _SAVE, what)
    if len(found) > 1:
        most = _key(found[0][0])[:_SHOWN]
        expected = f"open_checkpoint(path, key={most!r}), or --key {most}"
        raise HeaderError(file.path, "holds several dicts of tensors", expected, listed)
    return found[0][1]


def _holders(root: Any) -> Iterator[tuple[_Way, dict[str, Tensor]]]:
    """Yield each dict that holds tensors by name, with the string keys that lead to it."""
    # other keys are not followed: an optimizer's tensors are below numbers of parameters
    seen: set[int] = set()
    level: list[tuple[_Way, Any]] = [(None, root)] if type(root) is dict else []
    for _ in range(_DEEPEST):
        below: list[tuple[_Way, Any]] = []
        for way, each in level:
            if id(each) in seen:
                continue
            seen.add(id(each))
            if tensors := _tensors_in(each):
                yield way, tensors
            below += [((k, way), v) for k, v in each.items() if type(k) is str and type(v) is dict]
        level = below


def _tensors_at(root: Any, key: str) -> dict[str, Tensor]:
    """Return the tensors of the dict at a dotted key, whose parts may have dots; {} for none."""
    ends = [at for at, letter in enumerate(key) if letter == "."] + [len(key)]
    level = {(id(root), 0): root} if type(root) is dict else {}
    if key == ROOT:
        return _tensors_in(root) if level else {}
    for _ in range(_DEEPEST):
        below: dict[tuple[int, int], Any] = {}
        for (_, start), each in level.items():
            for end in ends[bisect_left(ends, start) :]:
                found = each.get(key[start:end])
                if type(found) is dict:
                    if end == len(key) and (tensors := _tensors_in(found)):
                        return tensors
                    below[id(found), end + 1] = found
        level = below
    return {}


def _tensors_in(found: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return the members of a dict that are tensors with string keys."""
    return {k: v for k, v in found.items() if type(k) is str and type(v) is Tensor}


def _key(way: _Way) -> str:
    """Return the dotted key of a dict; computed when needed, since keys may be long and shared."""
    keys: list[str] = []
    while way is not None:
        key, way = way
        keys.append(key)
    return ".".join(reversed(keys)) or ROOT


register_reader(TorchZip())
