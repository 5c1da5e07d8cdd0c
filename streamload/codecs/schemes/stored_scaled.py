"""Weights of 8-bit or smaller values with scales beside them: int8, FP8, MXFP4.

Sources: ``FP8Linear`` and ``Fp8Dequantize`` in transformers/integrations/finegrained_fp8.py
(``weight_scale_inv``, blocks), compressed-tensors' int-quantized and float-quantized formats
(``weight_scale``), and gpt-oss (``*_blocks``, ``*_scales``; the OCP MX specification, version 1.0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from streamload.codecs.group import Group, Layouts, config_key
from streamload.core.tensors import TensorInfo

#: Where writers of quantised checkpoints put the scale of tensor ``{module}{leaf}``.
_SCALES = (
    "{module}{leaf}_scale_inv",  # DeepSeek; transformers' fine-grained FP8
    "{module}{leaf}_scale",  # compressed-tensors, ModelOpt, FBGEMM, Quark, torchao, quanto
    "{module}{leaf}_scales",  # gpt-oss
    "{module}{leaf}.scale",
    "{module}{leaf}_scale_2",  # ModelOpt, of a weight_scale that is itself float8
    "{module}{leaf}_global_scale",  # compressed-tensors, the same
    "{module}scale_{leaf}",  # ComfyUI
)
#: The same, for a leaf called "weight" only.
_WEIGHT_SCALES = (
    "{module}scale",  # DeepSeek's own inference layout
    "{module}scale_inv",
    "{module}qscale_weight",  # Mistral
)
#: Endings of quantised values that their scale's name does not have.
_VALUES = ("_packed", "_qdata", "_data", "_blocks", "_scale")

_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
#: Methods whose 8-bit weights all have scales.
_SCALED_METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8")
_USUAL_BLOCK = 128
_MX_BLOCK = 32
#: Tensors that a weight may have besides.
_BESIDE = (
    *("weight_zero_point", "weight_scale_2", "weight_global_scale", "weight_g_idx"),
    *("input_scale", "input_zero_point", "input_global_scale", "activation_scale"),
)

#: Ends of the last components of names that mark a group.
ENDS = ("_blocks", "weight_scale")


def scale_of(layouts: Layouts, name: str) -> str | None:
    """Why a tensor of 8-bit or smaller floats must not change its dtype.

    Quantised values are wrong by a factor without their scale, so that casting them alone gives
    wrong numbers.

    Returns:
        The name of the scale tensor beside it, or the key of ``config.json`` that says that the
        checkpoint is quantised ("quantization_config"); None where there is neither, and for every
        other dtype.

    Raises:
        KeyError: there is no such tensor.
    """
    dtype = layouts.tensors[name].dtype
    if dtype.kind != "float" or dtype.bits > 8:
        return None
    return _scale_beside(layouts, name) or config_key(layouts.config)


def _scale_beside(layouts: Layouts, name: str) -> str | None:
    return next((s for s in _scale_names(name) if s != name and s in layouts.tensors), None)


def _scale_names(name: str) -> Iterator[str]:
    """Names that a scale of tensor ``name`` would have."""
    stems = [name, *(name.removesuffix(ending) for ending in _VALUES if name.endswith(ending))]
    for stem in stems:
        module, dot, leaf = stem.rpartition(".")
        for pattern in _SCALES + _WEIGHT_SCALES * (leaf == "weight"):
            yield pattern.format(module=module + dot, leaf=leaf)


def fp8_of(layouts: Layouts, values: TensorInfo) -> Group | None:
    """The group of a tensor of 8-bit floats."""
    if values.dtype.code not in _FP8 or not values.shape or values.name.endswith("_scale"):
        return None
    scale = _scale_beside(layouts, values.name)
    if scale is None:
        if values.name.endswith(".weight") and layouts.method in _SCALED_METHODS:
            layouts.refuse(
                values.name, "its scale is missing", f"{values.name}_scale", "no such tensor"
            )
        return None
    return _scaled(layouts, values, layouts.tensors[scale], "fp8")


def group_of(layouts: Layouts, name: str) -> Group | None:
    """The group of another tensor that marks one."""
    if name.endswith("_blocks"):
        return _mxfp4(layouts, name)
    values = layouts.find(name.removesuffix("_scale"))
    if values is None or values.dtype.code != "I8" or not values.shape:
        return None
    return _scaled(layouts, values, layouts.tensors[name], "int8")


def int8_without_scale(layouts: Layouts, values: TensorInfo) -> None:
    """Raise CheckpointError for a weight of int8 to which the configuration gives a scale."""
    if values.dtype.code == "I8" and layouts.method == "compressed-tensors":
        name = f"{values.name}_scale"
        if values.name.endswith(".weight") and layouts.find(name) is None:
            layouts.refuse(values.name, "its scale is missing", name, "no such tensor")


def _scaled(layouts: Layouts, values: TensorInfo, scale: TensorInfo, kind: str) -> Group:
    """A weight and its scale: one for all, or for each row, group or block."""
    layouts.check(scale, _SCALE_DTYPES)
    block = _block(layouts, values, scale)
    members = {"weight": values, "scale": scale}
    module = values.name[: values.name.rfind(".") + 1]
    if values.name == f"{module}weight":
        for leaf in _BESIDE:
            info = layouts.find(module + leaf)
            if info is not None and info is not scale:
                members[leaf.removeprefix("weight_")] = info
    if (zeros := members.get("zero_point")) is not None:
        layouts.check(zeros, ("I8", "I32", values.dtype.code), scale.shape)
    return Group(kind, values.name, members, values.shape, block, 8)


def _block(layouts: Layouts, values: TensorInfo, scale: TensorInfo) -> tuple[int, ...]:
    """How many rows and columns share a scale."""
    *outer, columns = values.shape
    rows = outer.pop() if outer else 1
    lead = tuple(outer)
    if scale.numel == 1:
        return (rows, columns)
    found = scale.shape
    if found[: len(lead)] == lead and all(n == 1 for n in found[len(lead) :]):
        return (rows, columns)  # one for each matrix of a stack
    grid = found[len(lead) :] if found[: len(lead)] == lead else ()
    stated = _stated_blocks(layouts)
    # first what is stated: blocks of 128 in 64 x 8192 are 1 x 64, as many as rows
    if (block := _fitting(stated, rows, columns, grid)) is not None:
        return block
    if grid in ((rows,), (1, rows)):
        return (1, columns)
    if len(grid) == 2:
        sizes = stated or [(_USUAL_BLOCK, _USUAL_BLOCK)]
        if (block := _fitting(sizes, rows, columns, grid)) is not None:
            return block
        even = all(n and not whole % n for n, whole in zip(grid, (rows, columns), strict=True))
        if even and not stated:
            return (rows // grid[0], columns // grid[1])
        if grid[0] == rows and grid[1] and not columns % grid[1]:
            return (1, columns // grid[1])
        layouts.refuse(
            scale.name,
            f"its blocks do not divide {values.name} ({list(values.shape)})",
            f"blocks of {' or '.join(f'{a} x {b}' for a, b in sizes)}",
            list(found),
        )
    layouts.refuse(
        scale.name,
        "the shape of a quantised weight's tensor is wrong",
        f"one for all of {values.name} ({list(values.shape)}), for each row or each block",
        list(found),
    )


def _fitting(
    sizes: Sequence[tuple[int, int]], rows: int, columns: int, grid: tuple[int, ...]
) -> tuple[int, int] | None:
    """The first size of blocks that gives a matrix this grid, cut to the matrix, or None."""
    for tall, wide in sizes:
        if grid == (-(-rows // tall), -(-columns // wide)):
            return (min(tall, rows), min(wide, columns))
    return None


def _stated_blocks(layouts: Layouts) -> list[tuple[int, int]]:
    """The sizes of blocks that the configuration says."""
    stated = [layouts.quantization.get("weight_block_size")]
    groups = layouts.quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        stated.append(weights.get("block_structure") if isinstance(weights, Mapping) else None)
    return [
        (size[0], size[1])
        for size in stated
        if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    ]


def _mxfp4(layouts: Layouts, name: str) -> Group | None:
    """Blocks of 16 bytes, 32 values each, with an exponent for each block.

    The model of transformers has the transpose of its last two axes.
    """
    values, stem = layouts.tensors[name], name.removesuffix("_blocks")
    scales = layouts.find(f"{stem}_scales")
    fits = len(values.shape) > 2 and values.shape[-1] * 2 == _MX_BLOCK
    if values.dtype.code != "U8" or (layouts.method != "mxfp4" and not (fits and scales)):
        return None
    scales = layouts.need(f"{stem}_scales", name, "scale")
    if not fits:
        layouts.refuse(
            name,
            "the shape of a quantised weight's tensor is wrong",
            f"[..., blocks, {_MX_BLOCK // 2}]",
            list(values.shape),
        )
    layouts.check(scales, ("U8",), values.shape[:-1])
    shape = (*values.shape[:-2], values.shape[-2] * _MX_BLOCK)
    return Group("mxfp4", stem, {"weight": values, "scale": scales}, shape, (1, _MX_BLOCK), 4)
