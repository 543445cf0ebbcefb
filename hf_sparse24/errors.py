"""The one exception of the package that is not a builtin."""


class CheckpointError(ValueError):
    """A checkpoint contradicts itself, is damaged, or is in a form that this version cannot read; nothing was loaded."""
