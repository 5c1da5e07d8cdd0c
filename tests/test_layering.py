"""The layout: who may import whom, and what is done in one place only."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "streamload"

#: Each file imports only from the lines above its own; files of one line do not import each other.
LAYERS = (
    ("_text",),
    (
        "errors",
        "units",
        "_system",
        "dtypes",
        "selection",
        "nesting",
        "_pages",
        "_kept",
        "chart",
        "computed",
    ),
    # their __init__.py: a docstring
    (
        "bench",
        "cast",
        "checkpoint",
        "conversion",
        "devices",
        "formats",
        "nodes",
        "offloading",
        "planning",
        "quant",
    ),
    ("nodes.group",),
    ("nodes.store",),
    ("nodes.mpi", "nodes.torch"),
    ("nodes.launch", "nodes.heartbeat"),
    ("nodes.session",),
    ("checkpoint.hub", "checkpoint.url", "checkpoint.variants", "planning.budget"),
    ("checkpoint.base", "checkpoint.guard"),
    ("checkpoint.header", "formats.gguf_types"),
    ("planning.parts", "checkpoint.limits"),
    ("formats.gguf_names", "formats.gguf_vocabulary"),
    ("formats.gguf_bytes", "formats.gguf_vocabulary_out"),
    ("formats.gguf_model",),
    ("checkpoint.strided", "checkpoint.wire"),
    ("checkpoint.remote",),
    ("formats.base",),
    ("formats.gguf", "formats.torch_objects", "formats.zip_entries"),
    ("formats.torch_pickle",),
    ("formats.torch_zip",),
    ("checkpoint.likeness",),
    ("checkpoint.checkpoint",),
    ("checkpoint.page_cache",),
    ("checkpoint.readers",),
    ("quant.group",),
    ("quant.stored_bnb", "quant.stored_packed", "quant.stored_scaled", "quant.stored_torchao"),
    ("quant.stored",),
    ("reading",),
    ("digests",),
    ("nodes.index",),
    ("cast.floats", "cast.llvm"),
    ("cast.kernels",),
    ("cast.reference",),
    ("cast.table",),
    ("quant.base",),
    ("quant.kernels", "quant.dynamic"),
    ("quant.units", "quant.transposing"),
    ("quant.four_bit", "quant.int8", "quant.q8_0", "quant.dequant_kernels"),
    ("quant.dequant",),
    ("quant.elements",),
    ("quant.dequant_fp8", "quant.dequant_four_bit", "quant.dequant_int8", "quant.dequant_mxfp4"),
    ("quant.dequant_blocks",),
    ("quant.dequant_gguf",),
    ("quant.dequant_gguf_k",),
    ("quant.mlc", "quant.q4_0"),
    ("planning.allocators", "planning.device_plan", "planning.kv_cache"),
    ("formats.writer",),
    ("formats.gguf_out", "formats.irpa", "formats.llmc", "formats.mlc", "formats.safetensors"),
    ("planning.activations", "planning.cuts", "planning.residency"),
    ("planning.partition",),
    ("planning.plan",),
    ("nodes.gather",),
    ("planning.blocks", "planning.demand"),
    ("planning.cache_room",),
    ("planning.fit",),
    ("planning.feasible",),
    ("planning.planner",),
    ("planning.chunks",),
    ("devices.base", "devices.staging"),
    ("devices.names", "devices.slots"),
    ("devices.probing",),
    ("devices.ptx",),
    ("quant.dequant_ptx", "quant.ptx", "quant.nested_ptx"),
    ("devices.bulk",),
    ("devices.cuda",),
    ("devices.tinygrad_buffers",),
    ("devices.tinygrad_tensors", "devices.torch_decoded", "devices.torch_tensors"),
    ("devices.host_streamed", "devices.torch_modules", "devices.torch_streamed", "nn"),
    ("devices.tinygrad_streamed", "devices.torch_experts"),
    ("devices.host", "devices.tinygrad", "devices.torch"),
    ("families",),
    ("mapping",),
    ("dequantise",),
    ("nodes.shares",),
    ("progress", "interrupt", "headroom"),
    ("changes", "quantise"),
    ("device_casts",),
    ("adapters",),
    ("options",),
    ("job",),
    ("reads", "steps"),
    ("turning",),
    ("worker",),
    ("stream",),
    ("report",),
    ("differences",),
    ("compare",),
    ("verify",),
    ("target",),
    ("lookup",),
    ("match",),
    ("engine", "hints"),
    ("decide",),
    (
        *("offloading.experts", "offloading.groups", "offloading.host"),
        *("offloading.layers", "offloading.reaper", "offloading.views"),
    ),
    ("offloading.sizes",),
    ("offloading.deciding", "offloading.rounds", "offloading.rows"),
    ("offloading.adapter",),
    ("offloading.report", "offloading.tinygrad_model", "offloading.torch_model"),
    ("offloading.models",),
    ("offloading.instead",),  # load says what to write where something does not fit
    ("load",),
    ("iterate",),
    ("offloading.entrance",),
    ("offloading.nodes",),
    ("offloading.streaming",),
    ("transformers.internals", "transformers.configuration", "transformers.rows"),
    ("transformers.packed", "transformers.packed_compressed", "transformers.packed_mxfp4"),
    ("transformers.adapter", "transformers.arguments"),
    ("transformers.names", "transformers.parts"),
    ("transformers.dtypes", "transformers.rest", "transformers.quantised", "transformers.saving"),
    ("transformers.quantising", "transformers.coded"),
    ("transformers.prepared",),
    ("transformers.loading", "transformers.holding"),
    ("transformers", "agreement", "diffusers"),
    ("distributed",),
    ("conversion.beside", "conversion.openable"),
    ("conversion.quantising", "conversion.renaming", "conversion.runtimes"),
    ("conversion.planning",),
    ("conversion.disk", "conversion.sums"),
    ("conversion.journal", "conversion.way"),
    ("conversion.destination",),
    ("conversion.blocks", "conversion.gathering"),
    ("conversion.writing",),
    ("conversion.convert",),
    ("bench.machine", "bench.limits", "bench.processes", "bench.loaders"),
    ("bench.worker", "bench.results", "bench.passes"),
    ("bench.compare", "bench.offloading"),
    ("",),  # streamload/__init__.py
    ("cli.output",),
    ("cli.flags",),
    ("cli.loads", "cli.files", "cli.benching"),
    ("cli",),
    ("__main__",),
)
LEVEL = {module: level for level, line in enumerate(LAYERS) for module in line}

#: Where each framework may be imported.
_TRANSFORMERS = tuple(name for name in LEVEL if name.startswith("transformers."))
FRAMEWORKS = {
    "tinygrad": (
        *("devices.tinygrad", "devices.tinygrad_buffers", "devices.tinygrad_streamed"),
        *("devices.tinygrad_tensors", "nn", "offloading.tinygrad_model"),
        "bench.loaders",
    ),
    "torch": (
        *("devices.torch", "devices.torch_decoded", "devices.torch_modules"),
        "devices.torch_streamed",
        "devices.torch_experts",
        *("devices.torch_tensors", "offloading.torch_model"),
        *("nodes.torch", "bench.loaders", "bench.passes"),
        *_TRANSFORMERS,
        "diffusers",
    ),
    "mpi4py": ("nodes.mpi",),
    "transformers": (*_TRANSFORMERS, "diffusers", "bench.passes"),
    "accelerate": (*_TRANSFORMERS, "diffusers"),
    "diffusers": ("diffusers", "bench.passes"),
    "httpx2": ("checkpoint.remote", "checkpoint.wire"),
    "httpcore2": ("checkpoint.wire",),
}
READ_ENVIRONMENT = (
    *("checkpoint.hub", "checkpoint.remote"),
    *("_kept", "devices.names", "devices.probing"),
    *("nodes.launch", "nodes.store", "nodes.torch"),
)
START_THREADS = (
    *("stream", "conversion.writing", "bench.limits"),  # of a process each
    "device_casts",  # to send scales ahead
    *("nodes.store", "nodes.heartbeat", "nodes.gather", "nodes.torch"),
    "offloading.reaper",  # what waits for a device that computes
    "offloading.rounds",  # what brings layers while the caller computes
    "checkpoint.wire",  # to connect, which nothing interrupts
    "verify",  # checksums of replicas, after the load
)
STARTERS = {
    *("Thread", "Timer", "start_new_thread", "ThreadPool", "ThreadPoolExecutor"),
    *("ProcessPoolExecutor", "to_thread", "run_in_executor"),
}


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(), FILES[module])


def _imports(module: str) -> Iterator[str]:
    """Full names of the modules that a file imports, inside functions too."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: line {node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = inner.removeprefix("streamload.") in FILES
                yield inner if is_module else str(node.module)


def _names(module: str) -> set[str]:
    """Every identifier that a file uses, as a name, an attribute or an import."""
    found: set[str] = set()
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.update(node.name.split("."))
    return found


def test_every_file_has_its_place() -> None:
    """The list of layers names every file of the package, and no other."""
    assert sorted(FILES) == sorted(LEVEL)


@pytest.mark.parametrize("module", FILES)
def test_a_file_imports_only_from_those_above(module: str) -> None:
    """A file imports only from files in a line above its own, lazily or not."""
    inside = {
        name.removeprefix("streamload").removeprefix(".")
        for name in _imports(module)
        if name.partition(".")[0] == "streamload"
    }
    below = [other for other in inside if LEVEL[other] >= LEVEL[module]]
    assert not below, f"{module} imports {below}"


@pytest.mark.parametrize("module", FILES)
def test_a_framework_is_imported_in_its_own_file_only(module: str) -> None:
    """tinygrad, torch and others are imported in their file and nowhere else, lazily or not."""
    roots = {name.partition(".")[0] for name in _imports(module)}
    foreign = [name for name, homes in FRAMEWORKS.items() if name in roots and module not in homes]
    assert not foreign, f"{module} imports {foreign}"


@pytest.mark.parametrize("module", FILES)
def test_threads_are_started_in_one_file_only(module: str) -> None:
    """Only loads, their checksums, conversions and benches start threads; locks may be anywhere."""
    started = _names(module) & STARTERS
    assert not started or module in START_THREADS, f"{module} uses {started}"


@pytest.mark.parametrize("module", FILES)
def test_the_environment_is_read_at_the_edge(module: str) -> None:
    """Environment variables are read where the world comes in, and nowhere else."""
    read = _names(module) & {"environ", "environb", "getenv", "getenvb"}
    assert not read or module in READ_ENVIRONMENT, f"{module} uses {read}"


@pytest.mark.parametrize("package", sorted(p.name for p in PACKAGE.iterdir() if p.is_dir()))
def test_no_package_hides_behind_a_function(package: str) -> None:
    """``import streamload.planning.planner as p`` finds the module."""
    if (PACKAGE / package / "__init__.py").exists():
        importlib.import_module(f"streamload.{package}")
        assert inspect.ismodule(getattr(importlib.import_module("streamload"), package))
