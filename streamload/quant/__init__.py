"""Quantising on the way: a file a format, each with its layout, kernel, oracle and error bound."""
