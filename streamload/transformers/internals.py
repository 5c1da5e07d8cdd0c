"""Private parts of transformers that are used here, imported by name."""

from __future__ import annotations

import transformers

__all__ = [
    "AutoHfQuantizer",
    "HfQuantizer",
    "WeightConverter",
    "WeightRenaming",
    "build_glob_alternation",
    "dot_natural_key",
    "get_model_conversion_mapping",
    "leave_out_what_is_ignored",
    "plan_of_dtypes",
    "rename_source_key",
    "revert_weight_conversion",
    "should_convert_module",
]

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        build_glob_alternation,
        dot_natural_key,
        rename_source_key,
        revert_weight_conversion,
    )
    from transformers.quantizers.auto import AutoHfQuantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    plan_of_dtypes = transformers.PreTrainedModel._get_dtype_plan
    leave_out_what_is_ignored = transformers.PreTrainedModel._adjust_missing_and_unexpected_keys
except (ImportError, AttributeError) as error:
    if error.name not in (
        *("transformers.conversion_mapping", "transformers.core_model_loading"),
        *("_get_dtype_plan", "_adjust_missing_and_unexpected_keys"),
    ):
        raise  # something that transformers itself imports is missing, or broken
    raise ImportError(
        "streamload.transformers needs transformers 5.9 or later, whose loader says how it names "
        f"and fuses weights; this is {transformers.__version__}"
    ) from error
