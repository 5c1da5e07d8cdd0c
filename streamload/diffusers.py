"""Pipelines of diffusers: `from_pretrained`, streamed under a budget."""

from streamload.core.system import install

try:
    from streamload.transformers.pipelines import from_pretrained
except ModuleNotFoundError as error:
    if error.name not in ("diffusers", "torch", "transformers"):
        raise
    raise ModuleNotFoundError(
        f"streamload.diffusers needs {error.name}, which is not installed; the extra diffusers has "
        f"all that it needs: {install('diffusers')}",
        name=error.name,
    ) from error

__all__ = ["from_pretrained"]
