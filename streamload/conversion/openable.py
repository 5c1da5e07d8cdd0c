"""Which weights of a conversion transformers can hold quantized in the model.

The code that `streamload.transformers.from_pretrained` asks decides here, too: it is registered as
the judge. It imports torch and transformers, which take more memory than a conversion: where this
process has not imported them, a child does.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, Self

from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.codecs.weights import Packed
from streamload.core.memory import HostMemory
from streamload.core.units import format_bytes
from streamload.errors import DeviceError, StreamloadError
from streamload.planning.dequantize import dequantized
from streamload.planning.match import wants_of
from streamload.planning.quant_policy import QuantPolicy, kinds_of, no_holder
from streamload.planning.sources import sources

_NEEDED = ("torch", "transformers")
_CHILD_NBYTES = 2**30  # with transformers and torch imported: 0.6 GB on Linux
_KEPT_NBYTES = 2 * _CHILD_NBYTES  # free while it waits for another question
_TIMEOUT_S = 300.0
_ROOT = str(Path(__file__).parent.parent.parent)
_LISTED = 4
#: What the child does. What others print there goes to its standard error.
_CODE = (
    "import json, os, sys; sys.path[:0] = json.loads(sys.argv[1]); "
    "out = os.fdopen(os.dup(1), 'w'); os.dup2(2, 1); "
    "from streamload.conversion.openable import answer; answer(out)"
)


class Judge(Protocol):
    """Knows the models of transformers."""

    def holding(self, checkpoint: Checkpoint, formats: Mapping[str, str], /) -> Any:
        """Facts of a `Verdict` on formats by tensor; None without a model."""

    def why_not_opened(self, folder: Path, /) -> str:
        """Why a checkpoint is not opened; "" where it is."""


_judges: list[Callable[[], Judge]] = []


def register_judge(judge: Callable[[], Judge]) -> None:
    """Let the judge be asked that this gives; it is called where torch may be imported."""
    _judges[:] = [judge]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is left as it is, and how the rest is opened.

    Attributes:
        left: by tensor that no module can hold quantised, the class of its module.
        modules: modules that transformers' quantiser has to leave as they are to open the others;
            None where it has no modules for these.
        said: the ``quantization_config`` with which streamload alone opens them, or None.
        known: whether there was a model to ask.
        kinds: patterns of the names of what is left.
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
    """Ask which of the weights that are to be quantised modules can hold.

    Returns:
        None where there is no model to ask: no class in config.json, no transformers.

    Raises:
        ValueError: modules can hold none of them.
    """
    if not _is_here(checkpoint):
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


class Judging:
    """Asks the judge of one conversion, in this process or in a child, which is kept until closed.

    The child ends with this process, however that ends. Where little memory is free it is not kept.
    """

    def __init__(self) -> None:
        """Start nothing."""
        self._child: _Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def why_not_opened(self, folder: Path) -> str:
        """Why `from_pretrained` does not open a folder; "" where it does, or cannot be asked."""
        found = self.ask("why_not_opened", path=str(folder))
        return found["why"] if isinstance(found, dict) else ""

    def ask(self, question: str, **given: Any) -> Any:
        """The result of `_answered`, or text that explains why there is none."""
        if _is_imported():
            return _answered(question, **given)
        if self._child is None and (free_nbytes := _free_nbytes()) < _CHILD_NBYTES:
            return f"it takes {format_bytes(_CHILD_NBYTES)}, {format_bytes(free_nbytes)} are free"
        keeps = False
        try:
            if self._child is None:
                self._child = _Child()
            found = self._child.ask(json.dumps({"question": question, **given}))
            keeps = _free_nbytes() >= _KEPT_NBYTES
        except OSError as error:
            return str(error)
        finally:
            if not keeps:
                self._end()
        return found

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()


class _Child:
    """A process that answers questions, a line each, until its standard input ends.

    Raises:
        OSError: from each method; it has ended, or does not answer.
    """

    def __init__(self) -> None:
        paths = [*filter(os.path.isabs, sys.path), _ROOT]  # without the current folder
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (until `close`)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CODE, json.dumps(paths)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except BaseException:
            self._errors.close()
            raise

    def ask(self, question: str) -> Any:
        """The answer to a question, both JSON without line ends."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        left = memoryview(question.encode() + b"\n")
        with suppress(BrokenPipeError):  # it has ended, and its errors explain why
            while left:
                self._wait(stdin, selectors.EVENT_WRITE)
                left = left[os.write(stdin.fileno(), left[: select.PIPE_BUF]) :]
        self._wait(stdout, selectors.EVENT_READ)
        line = stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            raise ChildProcessError(said[-1] if said else f"exit {code}")
        return json.loads(line)

    def _wait(self, pipe: IO[bytes], event: int) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(pipe, event)
            if not waiting.select(_TIMEOUT_S):
                raise TimeoutError(f"no answer in {_TIMEOUT_S:g} s")

    def close(self) -> None:
        """End it at once: it writes nothing."""
        self._process.kill()
        with self._errors, suppress(BrokenPipeError), self._process:
            pass  # closes its pipes, and waits


def _is_here(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint names a class of transformers, and that is installed."""
    local = isinstance(checkpoint.path, Path)
    return (
        local
        and bool(checkpoint.config.get("architectures"))
        and all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    )


def _is_imported() -> bool:
    """Whether this process has imported what answers."""
    return all(name in sys.modules for name in _NEEDED)


def _free_nbytes() -> float:
    """Bytes of free memory; infinite if unknown."""
    with suppress(DeviceError):
        return HostMemory().available_nbytes()
    return math.inf


def answer(out: IO[str]) -> None:
    """Answer each line of the standard input by a line."""
    for line in sys.stdin:
        print(json.dumps(_answered(**json.loads(line))), file=out, flush=True)


def _answered(question: str, path: str, **given: Any) -> Any:
    judge = _judges[0]()
    if question == "why_not_opened":
        return {"why": judge.why_not_opened(Path(path))}
    try:
        checkpoint = dequantized(open_checkpoint(path), given["packed"])
    except StreamloadError as error:
        return str(error)
    return judge.holding(checkpoint, given["formats"])
