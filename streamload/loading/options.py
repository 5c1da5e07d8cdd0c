"""The options of a load: the type, default, description and flag of each, in one place.

A public function takes them as ``**options: Unpack[LoadOptions]``, and `takes` shows those that it
has by name in `help`, `inspect.signature` and completion. `Options` has their parsed values.
"""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    Literal,
    Self,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)
from typing import cast as typed

from streamload.codecs.cast_table import OutOfRange
from streamload.core.dtypes import DTypeArgument, DTypeLike
from streamload.core.memory import Budget, BudgetLike
from streamload.core.patterns import Patterns, Selection
from streamload.core.progress import Progress
from streamload.core.units import parse_bytes
from streamload.devices.names import environment_fp16_cast
from streamload.files.folder import ReaderKind
from streamload.files.page_cache import PageCacheKind
from streamload.files.reader import Fetch
from streamload.loading.lora import AdaptersArgument
from streamload.planning.kv_cache import CacheRequest
from streamload.planning.match import Shapes
from streamload.planning.moves import DTypePolicy
from streamload.planning.planner import Residence
from streamload.planning.quant_policy import QuantArgument, QuantPolicy
from streamload.planning.sources import MAPPINGS, MappingArgument, Rename
from streamload.planning.transforms import NO_CHANGES, Changes, Transform

#: The hint for callers of the former option ``transfer=``.
NO_TRANSFER = "nothing in its place: all bytes reach a GPU through staging"
CastArgument = Literal["auto", "llvm", "numpy", "device"]
#: The effect of a pass of more tokens than there is room for: warn once, or raise.
OnOverrun = Literal["warn", "error"]

#: Options that some functions lack, for `takes`.
NAMES = ("rename", "mapping")
CHANGES = ("transform", "adapters")
PLACE = ("budget", "device", "residence")
CACHE = ("context", "batch", "cache_dtype")
OF_MODELS = ("strict", "shapes", "progress")
OF_PASSES = ("tokens", "stay", "layers", "host", "on_overrun")

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Option:
    """The default and the description of an option, and its flag of commands.

    Attributes:
        flag: name of the value in the help; "" if no command has the flag.
        flag_help: the help of the flag, where it is not the description.
    """

    default: Any
    text: str
    flag: str = ""
    flag_help: str = ""

    @property
    def lines(self) -> list[str]:
        """The lines of the description."""
        return inspect.cleandoc(self.text).splitlines()


# fmt: off
class LoadOptions(TypedDict, total=False):
    """The options of `streamload.load_state_dict`, in the order in which they are shown."""

    budget: Annotated[BudgetLike, Option(None, """
        most bytes on the device, during the load and after it: a number, "3GB",
        "2.5GiB", "80%" (of what is free), a dict by device, or a `Budget`. None is what is
        free, less a reserve. Staging and scratch count too where the device shares the host's
        memory; elsewhere staging counts against ``Budget(host=...)``.
        """, "SIZE",
        "Most bytes per device: 3GB, 2.5GiB, 80% (of what is free), one size for each device "
        "(3GB,8GB), or DEVICE=SIZE,...  Default: what is free, less a reserve.")]
    device: Annotated[str | Sequence[str] | None, Option(None, """
        "cuda:0", "cpu", "torch:xpu:0" (torch's), "CL", "CPU", "CPU:1", "tinygrad:CUDA"
        (tinygrad's), "host" (numpy's), a list of devices to split the layers over, or "auto"
        for the first device that works. None: where the model's parameters are, else
        ``STREAMLOAD_DEVICE``, else the default of the model's framework; without a model
        tinygrad's, or torch's where tinygrad is not installed.
        """, "NAME",
        "A device (CL, CPU and so on are tinygrad's; cuda:0, cpu and so on torch's; host), "
        "several separated by commas (the layers are split over them), or auto. Default: "
        "STREAMLOAD_DEVICE, or the choice of tinygrad (where it is not installed, of torch).")]
    residence: Annotated[Residence, Option("memory", """
        "memory" loads all weights. If the CPU computes (torch's CPU, the host), "mapped"
        makes them private views on the mapped files, which take no memory until they are
        written; weights with a cast, on a device with memory of its own or not aligned in the
        file are an error. "auto" maps what can be mapped of files on a local disk that nobody
        can truncate, and loads the rest. Rewriting a mapped file changes the weights, and
        truncating it ends the process: see `LoadReport.check_files`.
        """, "WHERE",
        "memory, mapped (weights stay in the files, where the CPU computes), or auto (those that "
        "can).")]
    dtype: Annotated[DTypeArgument, Option(None, """
        a dtype or its name, "checkpoint", or patterns by name, the first that matches
        deciding: ``{"*norm*": "float32", "*": "float16"}``. Floats only; all else passes
        unchanged, but for weights that are stored quantized (FP8 and int8 with scales, MXFP4,
        bitsandbytes' nf4, fp4 and int8): these are dequantized on the way to bfloat16, float16
        or float32, unless the model has modules for the stored form. None: arrays, and tensors
        of torch and tinygrad that hold memory, keep their dtype; otherwise bfloat16 stays where
        the device computes in it natively and becomes float16 elsewhere, and everything else
        stays as it is in the checkpoint.
        """, "DTYPE",
        "float16, checkpoint (as it is there), or PATTERN=DTYPE by tensor name, such as "
        "'*norm*=float32'; repeatable, the first that matches decides. Default: bfloat16 becomes "
        "float16 if the device does not compute in it natively.")]
    quant: Annotated[QuantArgument, Option(None, """
        quantize the weights of layers on the way: a format, or patterns by name as for
        ``dtype``, where None leaves a tensor as it is: ``{"*.mlp.*": "nf4", "*": "q8_0"}``.
        Formats: "nf4" and "fp4" (bitsandbytes' 4 bits), "int8" (by rows), "q8_0", "q6_k" and
        "q4_0" (GGUF's). "stored" keeps the codes of a GGUF file or of MLX. Norms, routers,
        the embedding and (but for "stored") the head stay as they are unless a pattern
        other than "*" names them, and so do tensors with one axis. Each weight becomes several
        tensors; see `streamload.codecs`. The report has each weight's error. In a torch model,
        Linears (and transformers' Conv1D and fused experts) hold them, and dequantize a weight
        to compute; a weight that no module can hold stays as it is, and a note names it.
        """, "FORMAT",
        "Quantize the weights of layers: q8_0, int8, nf4, fp4, q4_0, stored (GGUF's blocks as "
        "they are), auto (what fits and loses least), or PATTERN=FORMAT (or =none) by tensor "
        "name; repeatable.")]
    out_of_range: Annotated[OutOfRange, Option("inf", """
        finite values beyond the target dtype become infinite ("inf", with a
        warning), the largest finite value ("clamp"), or an error ("error").
        """, "WHAT")]
    cast: Annotated[CastArgument, Option("auto", """
        "auto", "llvm", "numpy", or "device" for the device's own where that is exact.
        """, "ENGINE")]
    reader: Annotated[ReaderKind, Option("auto", """
        "auto", "mmap", "pread", or "direct" to read past the page cache. "auto" decides for
        each file: "direct" for a file on a local disk, not in the page cache, and staged; else
        "mmap", or "pread" on network filesystems. A file that others may truncate is read by
        pread instead of mapped: another user's file, or one that is open for writing.
        """, "READER")]
    fetch: Annotated[Fetch, Option("auto", """
        how files of the Hugging Face Hub that its local cache lacks are read: "stream" reads
        the bytes that are needed, and leaves nothing on the disk; "cache" downloads the files
        that the load reads to that cache, and loads each once it is there. "auto" is "cache" if
        the disk has room, and for several ranks "stream". Weights that stay in the files
        (offload, ``residence="mapped"``) need "cache".
        """, "HOW")]
    page_cache: Annotated[PageCacheKind, Option("auto", """
        treatment of the page cache that the load fills: "keep" leaves it, for the next
        load; "drop" frees it once it is read; "auto" does that if memory is short. Pages that
        were cached before stay.
        """, "WHAT")]
    rename: Annotated[Rename | None, Option(None, """
        checkpoint names to parameter names: a dict, or a callable that returns a name, or
        None to skip the tensor.
        """)]
    mapping: Annotated[MappingArgument | None, Option(None, """
        "hf-llama" (Hugging Face names and rows to Meta's), "meta-llama" (the other way),
        "hf-gpt2" (Conv1D to Linear), "hf-mixtral", "hf-olmoe" and "hf-whisper" (to tinygrad's
        examples), "hf-qwen" (to tinygrad.llm; experts are stacked), or a dict from parameter
        names to the tensors or `RowRange` s that they consist of, or to a `Source` (transposed,
        stacked). A family and a dict for the rest: ``("hf-llama", {...})``.
        """, "FAMILY",
        f"Rename and reorder a family's tensors: {' or '.join(MAPPINGS)}.")]
    transform: Annotated[Transform | None, Option(None, """
        by pattern of the checkpoint's names, a function that gets some whole rows as a
        numpy array, in the dtype of the checkpoint and read-only, and returns as many, which
        are cast once: ``{"*norm.weight": lambda rows: rows + 1}``. The first pattern that
        matches decides. Threads call it, with at most 1 MiB at a time (or one row); the plan
        counts three such arrays for each thread, in float32 or a wider dtype.
        """)]
    adapters: Annotated[AdaptersArgument | None, Option(None, """
        folders of LoRA adapters as peft saves them, or (folder, scale), merged into the
        weights on the way, in float64, and rounded once: LoRA, rsLoRA, DoRA of Linears,
        lora_bias and trained tokens. All else is refused by name; `convert` also takes whole
        modules. ``transform`` comes after the adapters, and gets float64.
        """)]
    strict: Annotated[bool, Option(True, """
        every parameter must be in the checkpoint and the other way round, but for tensors
        that models compute (positions, masks, rotary frequencies). With False, matches are
        loaded and the report names the rest; a warning follows if few match.
        """)]
    shapes: Annotated[Shapes, Option("error", """
        "error" for a parameter whose shape is not that of its tensor, or "skip" to leave
        it as it is and name it in the report.
        """)]
    progress: Annotated[Progress, Option("auto", """
        "auto", True, False, or a callable that gets (bytes done, bytes in all).
        """)]
    reserve: Annotated[float | str, Option(0, """
        bytes, or a size, that stay free on each device or node besides the weights: for
        activations, other parameters. Taken off its budget and of what is free.
        """, "SIZE")]
    context: Annotated[int | None, Option(None, """
        leave room for the KV cache of so many tokens, so that the model can run: on each
        device for the layers that it holds, by ``config.json``. Nothing is allocated for it,
        and during the load its bytes may be the load's own.
        """, "TOKENS")]
    batch: Annotated[int, Option(1, """
        how many sequences of ``context`` tokens the cache is for.
        """, "N",
        "With --context: how many sequences at once.")]
    cache_dtype: Annotated[DTypeLike | None, Option(None, """
        the dtype of the cache; None is that of the weights as they are loaded.
        """, "DTYPE",
        "With --context: the dtype of the cache. Default: that of the weights.")]
    chunk_nbytes: Annotated[int | None, Option(None, """
        most bytes read and cast at once; None: 8 MiB, or 16 MiB past the
        page cache to CUDA.
        """)]
    threads: Annotated[int | None, Option(None, """
        most streaming threads; None: the CPUs that this process may use (affinity, and
        the limit of its cgroup), at most 8, and past the page cache to CUDA 2.
        """)]


class OffloadOptions(LoadOptions, total=False):
    """The options of `streamload.offload`."""

    tokens: Annotated[int | None, Option(None, """
        leave room for the activations of a pass of so many tokens (of all sequences
        together), sized from ``config.json``, and without ``context`` for the KV cache of these
        tokens, so that all of it stays under the budget. None leaves no room: activations come
        on top of the budget.
        """, "N",
        "With --offload: leave memory for the activations of a pass of so many tokens.")]
    stay: Annotated[Patterns, Option((), """
        patterns of names of parameters that stay on the device.
        """, "PATTERN",
        "With --offload: parameters that stay, such as 'lm_head.*'; repeatable.")]
    layers: Annotated[Patterns, Option((), """
        patterns of names of the modules that are layers ("encoder.stage_*"), if these names
        do not show it ("layers.3", "h.3", "blocks.3").
        """, "PATTERN",
        "With --offload: modules that are layers, if names do not show it; repeatable.")]
    host: Annotated[float | str, Option(0, """
        most bytes of streamed layers to keep in host memory ("8GB"), as stored in the files;
        experts last, all of a layer together. The rest comes from the page cache if all that
        streams fits into free memory, else from the disk.
        """, "SIZE",
        "With --offload: most bytes of layers to keep in host memory, such as 8GB.")]
    on_overrun: Annotated[OnOverrun, Option("warn", """
        the effect of a pass of more tokens than ``tokens`` or ``context`` leave room
        for, in the pass itself or in the KV cache: "warn" once (RuntimeWarning), with a line in
        the report, or "error" for an OffloadError before it computes.
        """)]
# fmt: on


_HINTS = get_type_hints(OffloadOptions, include_extras=True)
#: All options by name, in the order in which they are shown.
OPTIONS: Mapping[str, Option] = {name: get_args(hint)[1] for name, hint in _HINTS.items()}
#: The type of each option, by name.
TYPES: Mapping[str, Any] = {name: get_args(hint)[0] for name, hint in _HINTS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a call, parsed and checked."""

    budget: Budget
    device: str | Sequence[str] | None
    residence: Residence
    policy: DTypePolicy
    quant: QuantPolicy
    out_of_range: OutOfRange
    cast: CastArgument
    reader: ReaderKind
    fetch: Fetch
    page_cache: PageCacheKind
    rename: Rename | None
    mapping: MappingArgument | None
    transform: Transform | None
    adapters: AdaptersArgument | None
    strict: bool
    shapes: Shapes
    progress: Progress
    reserve_nbytes: int  # kept free on each device or node, of its budget and of what is free
    cache: CacheRequest | None
    chunk_nbytes: int | None
    threads: int | None
    tokens: int | None
    stay: tuple[str, ...]
    layers: tuple[str, ...]
    host_nbytes: int
    on_overrun: OnOverrun
    changes: Changes = NO_CHANGES  # transform and adapters, read once the checkpoint is open
    rank_cpus: int | None = None  # of a rank, whose budget is a part of the call's; None: no rank

    @classmethod
    def parse(cls, given: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Parse a call's options, with defaults for missing ones; ValueError if one is invalid."""
        rest: dict[str, Any] = {n: given.get(n, each.default) for n, each in OPTIONS.items()}
        cache = (rest.pop(name) for name in CACHE)
        parsed: dict[str, Any] = {
            "budget": Budget.parse(rest.pop("budget")),
            "policy": DTypePolicy.parse(rest.pop("dtype"), environment_fp16_cast()),
            "quant": QuantPolicy.parse(rest.pop("quant")),
            "reserve_nbytes": parse_bytes(rest.pop("reserve")),
            "cache": CacheRequest.read(*cache),
            "stay": Selection.parse(rest.pop("stay")).select,
            "layers": Selection.parse(rest.pop("layers")).select,
            "host_nbytes": parse_bytes(rest.pop("host")),
        }
        for name, value in rest.items():
            check_value(name, value)
        return cls(**parsed, **rest)

    def trying(self, quant: QuantPolicy) -> Self:
        """Return these options with what is tried for ``quant=``: formats, or a dtype."""
        dtype = () if quant.dtype is None else (("*", quant.dtype),)
        rules = (*self.policy.rules, *dtype)
        return replace(self, quant=quant, policy=replace(self.policy, rules=rules))


def check_value(name: str, value: object) -> None:
    """Raise ValueError if the value is none of its choices, no bool, or no count of at least 1."""
    choices = get_args(TYPES[name])
    if TYPES[name] is bool and not isinstance(value, bool):
        raise ValueError(f"{name} is True or False, not {value!r}")
    if get_origin(TYPES[name]) is Literal and value not in choices:
        raise ValueError(f"{name} is one of {', '.join(choices)}, not {value!r}")
    if int in choices and value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name} is a whole number of at least 1, not {value!r}")


def takes(
    *,
    without: Collection[str] = (),
    defaults: Mapping[str, object] = MappingProxyType({}),
    **former: str,
) -> Callable[[_Function], _Function]:
    """Return a decorator for functions with ``**options: Unpack[LoadOptions]``.

    A function gets all of its options: those that a caller leaves out have their defaults. Its
    signature, its type hints and the section Args of its docstring list each by name; options that
    the docstring does not describe get the description of their `Option`.

    Args:
        without: options of the dictionary that the function has not.
        defaults: defaults of this function that are not those of the options.
        **former: arguments that the function had once, with the hint that the error gives.
    """

    def decorate(function: _Function) -> _Function:
        *_, last = inspect.signature(function).parameters.values()
        (dictionary,) = get_args(get_type_hints(function)[last.name])
        values = {
            name: defaults.get(name, OPTIONS[name].default)
            for name in dictionary.__annotations__
            if name not in without
        }

        @functools.wraps(function)
        def entrance(*args: Any, **given: Any) -> Any:
            unknown = [name for name in given if name not in known]
            if unknown:
                said = f"got an unexpected keyword argument {unknown[0]!r}"
                instead = f": write {former[unknown[0]]}" if unknown[0] in former else ""
                raise TypeError(f"{function.__name__}() {said}{instead}")
            return function(*args, **(values | given))

        options = {
            name: inspect.Parameter(name, last.KEYWORD_ONLY, default=value, annotation=TYPES[name])
            for name, value in values.items()
        }
        of_passes = [options.pop(name) for name in OF_PASSES if name in options]
        known = shows(entrance, options.values(), of_passes)
        entrance.__doc__ = _described(function.__doc__, known)
        return typed(_Function, entrance)

    return decorate


def shows(
    function: Callable[..., Any],
    options: Iterable[inspect.Parameter],
    last: Iterable[inspect.Parameter] = (),
) -> list[str]:
    """Show options in place of a function's last parameter, after what is required.

    Returns the names of all parameters; those in ``last`` follow the function's own.
    """
    signature = inspect.signature(function)
    hints = get_type_hints(function, include_extras=True)
    *own, _ = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values()]
    required = [each for each in own if each.default is each.empty]
    shown = [*required, *options, *(each for each in own if each not in required), *last]
    function.__annotations__ = {each.name: each.annotation for each in shown}
    function.__annotations__["return"] = hints["return"]
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=shown, return_annotation=hints["return"]
    )
    return [each.name for each in shown]


def _described(doc: str | None, names: Sequence[str]) -> str | None:
    """Return a docstring whose section Args describes each parameter, if it has that section."""
    doc = inspect.cleandoc(doc or "")  # python -OO leaves none
    parts = re.fullmatch(r"((?s:.*)\nArgs:\n)((?: {4}.*\n)+)((?s:.*))", f"{doc}\n")
    if parts is None:
        return doc
    own = {each[1]: each[0] for each in re.finditer(r" {4}(\w+):.*\n(?: {8}.*\n)*", parts[2])}
    return parts[1] + "".join(own.get(name) or _entry(name) for name in names) + parts[3][:-1]


def _entry(name: str) -> str:
    return f"    {name}: " + "\n        ".join(OPTIONS[name].lines) + "\n"
