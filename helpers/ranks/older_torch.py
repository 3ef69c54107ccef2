"""Newer names of PyTorch's functions, for machines whose PyTorch is older than the book's.

The book is for PyTorch 2.13 and newer. Colab and Kaggle may have 2.11 or 2.12, which have the same collectives under
other names. The cell that installs the helpers there calls ``use_newer_names``, and so do each rank and the doctor.
"""

NEWER_NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


def use_newer_names() -> None:
    """Let ``torch.distributed`` have the newer names too, where it has only the older ones."""
    import torch.distributed as dist  # here, because a rank imports its modules before PyTorch

    for newer, older in NEWER_NAMES.items():
        if not hasattr(dist, newer):
            setattr(dist, newer, getattr(dist, older))
