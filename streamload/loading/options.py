"""The options of a load: the type, the default and the description of each, in one place.

A public function takes them as ``**options: Unpack[LoadOptions]``, or those of a narrower
dictionary, and `takes` shows each by name in `help`, `inspect.signature`, completion and typer.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypedDict, TypeVar, cast, get_args, get_type_hints

from streamload.codecs.cast_table import OutOfRange
from streamload.core.dtypes import DTypeArgument, DTypeLike
from streamload.core.memory import BudgetLike
from streamload.core.progress import Progress
from streamload.files.hub import Fetch
from streamload.files.local import ReaderKind
from streamload.files.page_cache import PageCacheKind
from streamload.loading.lora import AdaptersArgument
from streamload.planning.match import Shapes
from streamload.planning.planner import Residence
from streamload.planning.quant_policy import QuantArgument
from streamload.planning.sources import MappingArgument, Rename
from streamload.planning.transforms import Transform

#: The hint for callers of the former option ``transfer=``.
NO_TRANSFER = "nothing in its place: all bytes reach a GPU through staging"
CastArgument = Literal["auto", "llvm", "numpy", "device"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class WeightOptions(TypedDict, total=False):
    """Options for the dtype of the weights and the memory kept free; see `LoadOptions`."""

    dtype: DTypeArgument
    quant: QuantArgument
    reserve: float | str
    context: int | None
    batch: int
    cache_dtype: DTypeLike | None


class NameOptions(TypedDict, total=False):
    """Options that map tensors to parameters; see `LoadOptions`."""

    rename: Rename | None
    mapping: MappingArgument | None


class ChangeOptions(TypedDict, total=False):
    """Options that change the values of weights during a load; see `LoadOptions`."""

    transform: Transform | None
    adapters: AdaptersArgument | None


class PlaceOptions(TypedDict, total=False):
    """Options for the devices, their budgets and the residence; see `LoadOptions`."""

    budget: BudgetLike
    device: str | Sequence[str] | None
    residence: Residence


class StreamOptions(TypedDict, total=False):
    """Options for reading, casting and moving bytes; see `LoadOptions`."""

    out_of_range: OutOfRange
    cast: CastArgument
    reader: ReaderKind
    fetch: Fetch
    page_cache: PageCacheKind
    chunk_nbytes: int | None
    threads: int | None


class IterateOptions(NameOptions, ChangeOptions, StreamOptions, total=False):
    """The options of `streamload.iterate`; see `LoadOptions`."""

    budget: BudgetLike
    device: str | None
    dtype: DTypeArgument
    quant: QuantArgument
    reserve: float | str


class SplitOptions(WeightOptions, NameOptions, StreamOptions, total=False):
    """The options of `streamload.split`; see `LoadOptions`."""


class PlanOptions(SplitOptions, ChangeOptions, PlaceOptions, total=False):
    """The options of `streamload.plan`; see `LoadOptions`."""


class ModelOptions(WeightOptions, ChangeOptions, StreamOptions, PlaceOptions, total=False):
    """The options of `streamload.transformers.from_pretrained`; see `LoadOptions`."""

    strict: bool
    shapes: Shapes
    progress: Progress


class LoadOptions(PlanOptions, ModelOptions, total=False):
    """The options of `streamload.load_state_dict`.

    Attributes:
        budget: most bytes on the device, during the load and after it: a number, "3GB",
            "2.5GiB", "80%" (of what is free), a dict by device, or a `Budget`. None is what is
            free, less a reserve. Staging and scratch count too where the device shares the host's
            memory; elsewhere staging counts against ``Budget(host=...)``.
        device: "cuda:0", "cpu", "torch:xpu:0" (torch's), "CL", "CPU", "CPU:1", "tinygrad:CUDA"
            (tinygrad's), "host" (numpy's), a list of devices to split the layers over, or "auto"
            for the first device that works. None: where the model's parameters are, else
            ``STREAMLOAD_DEVICE``, else the default of the model's framework; without a model
            tinygrad's, or torch's where tinygrad is not installed.
        residence: "memory" loads all weights. If the CPU computes (torch's CPU, the host), "mapped"
            makes them private views on the mapped files, which take no memory until they are
            written; weights with a cast, on a device with memory of its own or not aligned in the
            file are an error. "auto" maps what can be mapped of files on a local disk that nobody
            can truncate, and loads the rest. Rewriting a mapped file changes the weights, and
            truncating it ends the process: see `LoadReport.check_files`.
        dtype: a dtype or its name, "checkpoint", or patterns by name, the first that matches
            deciding: ``{"*norm*": "float32", "*": "float16"}``. Floats only; all else passes
            unchanged, but for weights that are stored quantized (FP8 and int8 with scales, MXFP4,
            bitsandbytes' nf4, fp4 and int8): these are dequantized on the way to bfloat16, float16
            or float32, unless the model has modules for the stored form. None: arrays, and tensors
            of torch and tinygrad that hold memory, keep their dtype; otherwise bfloat16 stays where
            the device computes in it natively and becomes float16 elsewhere, and everything else
            stays as it is in the checkpoint.
        quant: quantize the weights of layers on the way: a format, or patterns by name as for
            ``dtype``, where None leaves a tensor as it is: ``{"*.mlp.*": "nf4", "*": "q8_0"}``.
            Formats: "nf4" and "fp4" (bitsandbytes' 4 bits), "int8" (by rows), "q8_0", "q6_k" and
            "q4_0" (GGUF's). "stored" keeps the codes of a GGUF file or of MLX. Norms, routers,
            the embedding and (but for "stored") the head stay as they are unless a pattern
            other than "*" names them, and so do tensors with one axis. Each weight becomes several
            tensors; see `streamload.codecs`. The report has each weight's error. In a torch model,
            Linears (and transformers' Conv1D and fused experts) hold them, and dequantize a weight
            to compute; a weight that no module can hold stays as it is, and a note names it.
        out_of_range: finite values beyond the target dtype become infinite ("inf", with a
            warning), the largest finite value ("clamp"), or an error ("error").
        cast: "auto", "llvm", "numpy", or "device" for the device's own where that is exact.
        reader: "auto", "mmap", "pread", or "direct" to read past the page cache. "auto" decides for
            each file: "direct" for a file on a local disk, not in the page cache, and staged; else
            "mmap", or "pread" on network filesystems. A file that others may truncate is read by
            pread instead of mapped: another user's file, or one that is open for writing.
        fetch: how files of the Hugging Face Hub that its local cache lacks are read: "stream" reads
            the bytes that are needed, and leaves nothing on the disk; "cache" downloads the files
            that the load reads to that cache, and loads each once it is there. "auto" is "cache" if
            the disk has room, and for several ranks "stream". Weights that stay in the files
            (offload, ``residence="mapped"``) need "cache".
        page_cache: treatment of the page cache that the load fills: "keep" leaves it, for the next
            load; "drop" frees it once it is read; "auto" does that if memory is short. Pages that
            were cached before stay.
        rename: checkpoint names to parameter names: a dict, or a callable that returns a name, or
            None to skip the tensor.
        mapping: "hf-llama" (Hugging Face names and rows to Meta's), "meta-llama" (the other way),
            "hf-gpt2" (Conv1D to Linear), "hf-mixtral", "hf-olmoe" and "hf-whisper" (to tinygrad's
            examples), "hf-qwen" (to tinygrad.llm; experts are stacked), or a dict from parameter
            names to the tensors or `RowRange` s that they consist of, or to a `Source` (transposed,
            stacked). A family and a dict for the rest: ``("hf-llama", {...})``.
        transform: by pattern of the checkpoint's names, a function that gets some whole rows as a
            numpy array, in the dtype of the checkpoint and read-only, and returns as many, which
            are cast once: ``{"*norm.weight": lambda rows: rows + 1}``. The first pattern that
            matches decides. Threads call it, with at most 1 MiB at a time (or one row); the plan
            counts three such arrays for each thread, in float32 or a wider dtype.
        adapters: folders of LoRA adapters as peft saves them, or (folder, scale), merged into the
            weights on the way, in float64, and rounded once: LoRA, rsLoRA, DoRA of Linears,
            lora_bias and trained tokens. All else is refused by name; `convert` also takes whole
            modules. ``transform`` comes after the adapters, and gets float64.
        strict: every parameter must be in the checkpoint and the other way round, but for tensors
            that models compute (positions, masks, rotary frequencies). With False, matches are
            loaded and the report names the rest; a warning follows if few match.
        shapes: "error" for a parameter whose shape is not that of its tensor, or "skip" to leave
            it as it is and name it in the report.
        progress: "auto", True, False, or a callable that gets (bytes done, bytes in all).
        reserve: bytes, or a size, that stay free on each device or node besides the weights: for
            activations, other parameters. Taken off its budget and of what is free.
        context: leave room for the KV cache of so many tokens, so that the model can run: on each
            device for the layers that it holds, by ``config.json``. Nothing is allocated for it,
            and during the load its bytes may be the load's own.
        batch: how many sequences of ``context`` tokens the cache is for.
        cache_dtype: the dtype of the cache; None is that of the weights as they are loaded.
        chunk_nbytes: most bytes read and cast at once; None: 8 MiB, or 16 MiB past the
            page cache to CUDA.
        threads: most streaming threads; None: the CPUs that this process may use (affinity, and
            the limit of its cgroup), at most 8, and past the page cache to CUDA 2.
    """


#: The default of each option, in the order in which they are shown.
DEFAULTS: LoadOptions = {
    "budget": None,
    "device": None,
    "residence": "memory",
    "dtype": None,
    "quant": None,
    "out_of_range": "inf",
    "cast": "auto",
    "reader": "auto",
    "fetch": "auto",
    "page_cache": "auto",
    "rename": None,
    "mapping": None,
    "transform": None,
    "adapters": None,
    "strict": True,
    "shapes": "error",
    "progress": "auto",
    "reserve": 0,
    "context": None,
    "batch": 1,
    "cache_dtype": None,
    "chunk_nbytes": None,
    "threads": None,
}


def takes(
    changed: Mapping[str, object] = MappingProxyType({}), **former: str
) -> Callable[[_Function], _Function]:
    """Return a decorator for functions with ``**options: Unpack[...]``.

    A function gets all options of that dictionary: those that a caller leaves out have their
    defaults. Its signature, its type hints and the section Args of its docstring list each by name;
    options that the docstring does not describe get the description in `LoadOptions`.

    Args:
        changed: defaults of this function that `DEFAULTS` lacks, or has otherwise.
        **former: arguments that the function had once, with the hint that the error gives.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        hints = get_type_hints(function, include_extras=True)
        *own, last = signature.parameters.values()
        (dictionary,) = get_args(hints.pop(last.name))
        types = get_type_hints(dictionary, include_extras=True)
        new = {name: value for name, value in changed.items() if name not in DEFAULTS}
        defaults = {n: value for n, value in {**new, **DEFAULTS, **changed}.items() if n in types}
        own = [each.replace(annotation=hints[each.name]) for each in own]
        required = [each for each in own if each.default is each.empty]
        options = [
            inspect.Parameter(name, last.KEYWORD_ONLY, default=value, annotation=types[name])
            for name, value in defaults.items()
        ]
        shown = [*required, *options, *(each for each in own if each not in required)]
        known = {each.name for each in shown}

        @functools.wraps(function)
        def entrance(*args: Any, **given: Any) -> Any:
            unknown = [name for name in given if name not in known]
            if unknown:
                said = f"got an unexpected keyword argument {unknown[0]!r}"
                instead = f": write {former[unknown[0]]}" if unknown[0] in former else ""
                raise TypeError(f"{function.__name__}() {said}{instead}")
            return function(*args, **(defaults | given))

        entrance.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=shown, return_annotation=hints["return"]
        )
        returns = {"return": hints["return"]}
        entrance.__annotations__ = {each.name: each.annotation for each in shown} | returns
        entrance.__doc__ = _described(function.__doc__, [each.name for each in shown])
        return cast(_Function, entrance)

    return decorate


def _described(doc: str | None, names: Sequence[str]) -> str | None:
    """Return a docstring whose section Args also describes the options in `names`."""
    before, own, after = _sections(doc, "Args")
    if not own:
        return doc
    entries = [own.get(name) or _option_entries()[name] for name in names]
    return "\n".join([*before, *(line for entry in entries for line in entry), *after])


@functools.cache
def _option_entries() -> Mapping[str, list[str]]:
    return _sections(LoadOptions.__doc__, "Attributes")[1]


def _sections(
    doc: str | None, heading: str
) -> tuple[list[str], Mapping[str, list[str]], list[str]]:
    """Split a docstring: lines up to a section's heading, its entries by name, and the rest."""
    lines = inspect.cleandoc(doc or "").splitlines()  # python -OO leaves none
    start = lines.index(f"{heading}:") + 1 if f"{heading}:" in lines else len(lines)
    entries: dict[str, list[str]] = {}
    name = ""
    for stop, line in enumerate(lines[start:], start):
        if not line.startswith("    "):
            return lines[:start], entries, lines[stop:]
        if line[4] != " ":
            name = line[4:].partition(":")[0]
        entries.setdefault(name, []).append(line)
    return lines[:start], entries, []


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that need no parsing: choices, flags and numbers.

    Raises:
        ValueError: one is none of its choices, no bool, or no whole number of at least 1.
    """
    names = (*StreamOptions.__annotations__, "residence", "strict", "shapes")
    found = {name: options[name] for name in names}
    for name, value in found.items():
        choices = get_args(LoadOptions.__annotations__[name])
        if not choices:
            if not isinstance(value, bool):
                raise ValueError(f"{name} is True or False, not {value!r}")
        elif int in choices:
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is a whole number of at least 1, not {value!r}")
        elif value not in choices:
            raise ValueError(f"{name} is one of {', '.join(choices)}, not {value!r}")
    return found
