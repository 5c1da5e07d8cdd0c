"""Models of transformers: `from_pretrained`, streamed under a budget.

transformers builds the model, names its weights, ties them, and computes the buffers that no
checkpoint holds; streamload moves the bytes. Tried with transformers 5.9, 5.17 and 5.23.
"""

from streamload.core.system import install

try:
    from streamload.transformers.loading import from_pretrained, streamed
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers"):
        raise
    raise ModuleNotFoundError(
        f"streamload.transformers needs {error.name}, which is not installed; the extra "
        f"transformers has all that it needs: {install('transformers')}",
        name=error.name,
    ) from error

__all__ = ["from_pretrained", "streamed"]
