"""A notebook's tagged cells become one script for torchrun, and the files that start it on many nodes.

For ``python -m helpers`` and ``jupyter nbconvert --to torchrun``. It imports helpers.source, and reads helpers/runtime
as text. No cell is executed.
"""
