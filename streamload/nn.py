"""Quantized layers for tinygrad models.

`QuantLinear` takes the place of `tinygrad.nn.Linear`; `replace_linears` puts it into a model.
"""

from streamload.devices.tinygrad.linear import QuantLinear, Replacement, replace_linears

__all__ = ["QuantLinear", "Replacement", "replace_linears"]
