"""The error of this folder, in a file of its own: who only reads facts need not load nbformat, which takes long."""


class ExportError(Exception):
    """A notebook that cannot become a script, or a file that cannot be written: where, why, and what to change."""
