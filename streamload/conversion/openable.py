"""Ask transformers which weights of a conversion its model can hold quantized.

`streamload.transformers` registers a `Judge` that answers as `from_pretrained` decides. The judge
imports torch and transformers, which take more memory than a conversion: if this process has not
imported them, a child process does.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import select
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.codecs.weights import Packed
from streamload.core.memory import HostMemory
from streamload.core.system import KILLED_FIRST, python_command
from streamload.core.units import format_bytes
from streamload.errors import DeviceError, StreamloadError
from streamload.planning.dequantize import dequantized
from streamload.planning.match import wants_of
from streamload.planning.quant_policy import QuantPolicy, kinds_of, no_holder
from streamload.planning.sources import sources

_NEEDED = ("torch", "transformers")
_CHILD_NBYTES = 2**30  # with transformers and torch imported: 0.6 GB on Linux
_KEPT_NBYTES = 2 * _CHILD_NBYTES  # the child is kept for the next question if so much is free
_TIMEOUT_S = 300.0
_LISTED = 4
#: Code of the child process. Other output there goes to its standard error.
_CODE = KILLED_FIRST + (
    "import os; out = os.fdopen(os.dup(1), 'w'); os.dup2(2, 1); "
    "from streamload.conversion.openable import answer; answer(out)"
)


class Judge(Protocol):
    """Answers questions about a checkpoint's model in transformers."""

    def holding(self, checkpoint: Checkpoint, formats: Mapping[str, str], /) -> Any:
        """Find tensors that modules can hold in ``formats`` (by tensor); None without a model.

        Returns fields of a `Verdict`, and ``holders``: classes of such modules, in words.
        """

    def why_not_opened(self, folder: Path, /) -> str:
        """Return the reason why `from_pretrained` cannot open a folder; "" if it can."""

    def why_not_run(self, folder: Path, /) -> str:
        """Return the reason why a small checkpoint's model computes nothing; "" if it does."""


_judges: list[Callable[[], Judge]] = []


def register_judge(judge: Callable[[], Judge]) -> None:
    """Register a function that returns the judge; it may import torch, so is called when needed."""
    _judges[:] = [judge]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judge's answer: weights that cannot be quantized, and how the others are opened.

    Attributes:
        left: tensors that no module can hold quantized: name to class of the module.
        modules: modules that transformers' quantizer must not replace, so that it opens the other
            weights; None if transformers cannot open these weights quantized.
        said: the ``quantization_config`` with which only streamload opens the weights, or None.
        known: whether there was a model to ask.
        kinds: patterns of the names in ``left``.
        notes: sentences for users.
    """

    left: Mapping[str, str] = field(default_factory=dict)
    modules: list[str] | None = None
    said: Mapping[str, Any] | None = None
    known: bool = False
    kinds: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def asked_of_models(
    checkpoint: Checkpoint, policy: QuantPolicy, judging: Judging
) -> Verdict | None:
    """Ask transformers for weights that its modules cannot hold in the formats of ``policy``.

    Returns:
        The answer; if transformers could not be asked, a verdict with a note. None if nothing is
        to quantize, or there is no model to ask: no class in config.json, no transformers.

    Raises:
        ValueError: modules can hold none of these weights.
    """
    if not is_here(checkpoint):
        return None
    fill, _, _ = sources(checkpoint, None, None)
    found = policy.formats(checkpoint, wants_of(checkpoint, fill))
    tensors = (source.rows[0].tensor for source in fill.values())
    formats = {t: form for t, form in zip(tensors, found, strict=True) if form is not None}
    if not formats:
        return None
    packed = [t.name for t in checkpoint.tensors.values() if isinstance(t, Packed)]
    said = judging.ask("holding", path=str(checkpoint.path), formats=dict(formats), packed=packed)
    if isinstance(said, str):
        return Verdict(notes=(f"transformers was not asked what it opens: {said}",))
    if said is None:
        return None
    left = said["left"]
    classes = ", ".join(dict.fromkeys(left.values()))
    if left and len(left) == len(formats):
        raise ValueError(no_holder(list(left), said["holders"], classes))
    notes = []
    if left:
        nbytes = sum(checkpoint.tensors[name].nbytes for name in left)
        listed = ", ".join(list(left)[:_LISTED]) + ", ..." * (len(left) > _LISTED)
        notes.append(
            f"not quantised, {len(left)} tensors of {format_bytes(nbytes)}: their modules "
            f"({classes}) open no quantised weights of a checkpoint, though from_pretrained(quant=)"
            f" may quantise them on the way: {listed}"
        )
    kinds = tuple(kinds_of(list(left), [name for name in formats if name not in left]))
    return Verdict(left, said["modules"], said["said"], True, kinds, tuple(notes))


class Judging(ExitStack):
    """Asks the judge for one conversion, in this process or in a child process.

    The child answers until the ``with`` or this process ends; if little memory is free, one
    question only.
    """

    _ask_child: Callable[[str], Any] | None = None  # while there is a child

    def why_not_opened(self, folder: Path, source: Path | None) -> str:
        """Return why `from_pretrained` cannot open a folder, or run its model; "" if it can.

        "" also if it cannot be asked, or if the model of ``source`` does not run, either; with None
        the model is not run.
        """
        why = self._why("why_not_opened", folder)
        if why or source is None or not (why := self._why("why_not_run", folder)):
            return why
        return "" if self._why("why_not_run", source) else why

    def _why(self, question: str, folder: Path) -> str:
        found = self.ask(question, path=str(folder))
        return found["why"] if isinstance(found, dict) else ""

    def ask(self, question: str, **given: Any) -> Any:
        """Call the `Judge` method named ``question``; return its result, or an error as text.

        ``given``: JSON values, the method's arguments, with ``path`` of the checkpoint or folder.
        """
        if _is_imported():
            return _answered(question, **given)
        if self._ask_child is None and (free_nbytes := _free_nbytes()) < _CHILD_NBYTES:
            return f"it takes {format_bytes(_CHILD_NBYTES)}, {format_bytes(free_nbytes)} are free"
        keeps = False
        try:
            self._ask_child = self._ask_child or self.enter_context(_child())
            found = self._ask_child(json.dumps({"question": question, **given}))
            keeps = _free_nbytes() >= _KEPT_NBYTES
        except OSError as error:
            return str(error)
        finally:
            if not keeps:
                self._ask_child = None
                self.close()
        return found


@contextmanager
def _child() -> Iterator[Callable[[str], Any]]:
    """Run a child process in a ``with``; yields a function from a JSON question to its answer."""
    command, pipe = python_command(_CODE), subprocess.PIPE
    with (
        tempfile.TemporaryFile() as errors,
        suppress(BrokenPipeError),  # its pipes are closed at the end
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors) as process,
    ):
        try:
            yield partial(_ask, process, errors)
        finally:
            process.kill()  # it writes nothing


def _ask(process: subprocess.Popen[bytes], errors: IO[bytes], question: str) -> Any:
    """Return a child's answer to a question, both JSON; OSError if it ends or is too slow."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None
    left = memoryview(question.encode() + b"\n")
    with suppress(BrokenPipeError):  # it has ended, and its errors explain why
        while left:
            _wait(stdin, selectors.EVENT_WRITE)
            left = left[os.write(stdin.fileno(), left[: select.PIPE_BUF]) :]
    _wait(stdout, selectors.EVENT_READ)
    line = stdout.readline()
    if not line:
        code = process.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
        raise ChildProcessError(said[-1] if said else f"exit {code}")
    return json.loads(line)


def _wait(pipe: IO[bytes], event: int) -> None:
    """Wait until a pipe can be read or written; TimeoutError after `_TIMEOUT_S`."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(pipe, event)
        if not waiting.select(_TIMEOUT_S):
            raise TimeoutError(f"no answer in {_TIMEOUT_S:g} s")


def is_here(checkpoint: Checkpoint) -> bool:
    """Whether there is a model to ask: a class in a local config.json, and transformers."""
    return (
        isinstance(checkpoint.path, Path)
        and bool(checkpoint.config.get("architectures"))
        and all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    )


def _is_imported() -> bool:
    """Whether this process has imported torch and transformers already."""
    return all(name in sys.modules for name in _NEEDED)


def _free_nbytes() -> float:
    """Return the bytes of free host memory; infinity if unknown."""
    with suppress(DeviceError):
        return HostMemory().available_nbytes()
    return math.inf


def answer(out: IO[str]) -> None:
    """Answer questions until standard input ends, a line of JSON each: the child's main loop."""
    for line in sys.stdin:
        print(json.dumps(_answered(**json.loads(line))), file=out, flush=True)


def _answered(question: str, path: str, **given: Any) -> Any:
    """Ask the `Judge`; returns its answer as JSON values, or the error of opening ``path``."""
    judge = _judges[0]()
    if question in ("why_not_opened", "why_not_run"):
        return {"why": getattr(judge, question)(Path(path))}
    try:
        checkpoint = dequantized(open_checkpoint(path), given["packed"])
    except StreamloadError as error:
        return str(error)
    return judge.holding(checkpoint, given["formats"])
