"""The layout: who may import whom, and what is done in one place only."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "streamload"

#: Each file imports only from the lines above its own; files of one line do not import each other.
LAYERS = (
    (
        "_system",
        "dtypes",
        "errors",
        "families",
        "selection",
        "nesting",
        "checkpoint.wire",
        "checkpoint.variants",
        "chart",
        "_kept",
        "planning.device_plan",
        "planning.cuts",
        "computed",
        "_pages",
        "offloading.experts",
        "interrupt",
        "transformers.internals",
        "devices.torch_decoded",
        "transformers.packed_compressed",
        "devices.torch_lent",
        "transformers.packed",
        "transformers.packed_mxfp4",
        "bench.machine",
        "bench",
        "cast",
        "checkpoint",
        "conversion",
        "devices",
        "devices.staging",
        "formats",
        "formats.gguf_types",
        "nodes",
        "offloading",
        "planning",
        "quant",
    ),
    (
        "cast.llvm",
        "cast.floats",
        "cast.reference",
        "checkpoint.url",
        "units",
        "checkpoint.guard",
        "checkpoint.mapped",
        "checkpoint.hub",
        "quant.base",
        "planning.kv_cache",
        "planning.activations",
        "offloading.overrun",
        "devices.torch_refused",
        "transformers.repacked",
        "devices.stays",
        "devices.torch_faces",
        "cli.output",
        "nodes.group",
        "devices.tinygrad_buffers",
        "formats.gguf_vocabulary",
        "formats.torch_objects",
    ),
    (
        "cast.kernels",
        "planning.budget",
        "planning.parts",
        "checkpoint.page_cache",
        "checkpoint.base",
        "planning.allocators",
        "planning.residency",
        "progress",
        "quant.dynamic",
        "nodes.launch",
        "nodes.heartbeat",
        "formats.gguf_bytes",
        "formats.gguf_vocabulary_out",
        "nodes.store",
    ),
    (
        "cast.table",
        "checkpoint.header",
        "quant.kernels",
        "devices.base",
        "planning.blocks",
        "planning.partition",
        "devices.ptx",
        "devices.host_streamed",
        "formats.gguf_names",
        "formats.torch_pickle",
        "nodes.mpi",
        "nodes.torch",
    ),
    (
        "checkpoint.strided",
        "checkpoint.remote",
        "checkpoint.limits",
        "quant.dequant_kernels",
        "devices.names",
        "offloading.layers",
        "quant.units",
        "offloading.reaper",
        "devices.slots",
        "quant.transposing",
        "devices.bulk",
        "formats.gguf_model",
    ),
    (
        "checkpoint.readers",
        "formats.base",
        "devices.probing",
        "quant.ptx",
        "quant.four_bit",
        "devices.torch_tensors",
        "quant.int8",
        "quant.q8_0",
        "devices.cuda",
        "devices.host",
    ),
    (
        "quant.group",
        "checkpoint.likeness",
        "planning.plan",
        "reading",
        "quant.nested_ptx",
        "devices.torch_modules",
        "devices.torch_streamed",
        "bench.processes",
        "bench.limits",
        "devices.tinygrad_tensors",
        "formats.gguf",
        "quant.mlc",
        "formats.zip_entries",
        "quant.q4_0",
    ),
    (
        "quant.stored_scaled",
        "quant.stored_packed",
        "quant.stored_torchao",
        "quant.stored_bnb",
        "headroom",
        "quant.dequant",
        "transformers.saving",
        "transformers.parts",
        "formats.writer",
        "conversion.sums",
        "nn",
        "devices.torch",
        "devices.torch_experts",
        "formats.torch_zip",
    ),
    (
        "quant.stored",
        "report",
        "quant.dequant_ptx",
        "formats.safetensors",
        "quant.elements",
        "devices.tinygrad",
        "devices.tinygrad_streamed",
        "formats.gguf_out",
        "formats.irpa",
        "formats.llmc",
        "formats.mlc",
        "quant.dequant_blocks",
        "quant.dequant_four_bit",
        "quant.dequant_fp8",
        "quant.dequant_int8",
        "quant.dequant_mxfp4",
    ),
    (
        "checkpoint.checkpoint",
        "conversion.gathering",
        "quant.dequant_gguf",
    ),
    (
        "mapping",
        "planning.demand",
        "changes",
        "offloading.views",
        "offloading.rows",
        "planning.chunks",
        "target",
        "offloading.host",
        "digests",
        "nodes.gather",
        "transformers.arguments",
        "transformers.adapter",
        "quant.dequant_gguf_k",
    ),
    (
        "offloading.groups",
        "quantise",
        "planning.cache_room",
        "dequantise",
        "adapters",
        "transformers.rows",
        "nodes.shares",
        "conversion.disk",
        "conversion.renaming",
        "nodes.index",
    ),
    (
        "match",
        "planning.fit",
        "device_casts",
        "conversion.beside",
        "conversion.journal",
        "conversion.runtimes",
        "conversion.way",
        "differences",
        "nodes.session",
    ),
    (
        "planning.feasible",
        "job",
        "hints",
        "conversion.openable",
        "conversion.blocks",
        "compare",
    ),
    (
        "planning.planner",
        "steps",
        "reads",
        "conversion.quantising",
        "verify",
    ),
    (
        "options",
        "turning",
    ),
    (
        "read_choice",
        "lookup",
        "engine",
        "worker",
        "transformers.configuration",
        "cli.flags",
    ),
    (
        "decide",
        "stream",
        "transformers.names",
    ),
    (
        "offloading.rounds",
        "offloading.sizes",
        "load",
        "transformers.quantised",
        "transformers.dtypes",
        "transformers.rest",
    ),
    (
        "offloading.deciding",
        "transformers.coded",
        "transformers.quantising",
        "conversion.planning",
        "iterate",
        "bench.loaders",
    ),
    (
        "offloading.adapter",
        "conversion.destination",
        "bench.results",
        "bench.worker",
    ),
    (
        "offloading.models",
        "offloading.report",
        "conversion.writing",
        "bench.compare",
        "offloading.tinygrad_model",
        "offloading.torch_model",
    ),
    (
        "offloading.instead",
        "conversion.convert",
    ),
    (
        "offloading.entrance",
        "cli.files",
    ),
    (
        "transformers.prepared",
        "bench.offloading",
        "offloading.nodes",
        "offloading.streaming",
    ),
    (
        "transformers.holding",
        "cli.benching",
        "agreement",
        "transformers.loading",
        "diffusers",
    ),
    (
        "",
        "distributed",
        "transformers",
    ),
    (
        "cli.loads",
        "bench.passes",
    ),
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
        "devices.torch_refused",
        "devices.torch_streamed",
        *("devices.torch_experts", "devices.torch_lent"),
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
