"""Newer names of PyTorch's functions, for machines whose PyTorch is older than the book's.

The book is for PyTorch 2.13 and newer. Colab and Kaggle may have 2.10 to 2.12, which have the same collectives under
other names. The cell that installs the helpers there calls ``use_newer_names``, and so do each rank and the doctor.
"""

from importlib import import_module

# {module: {newer name: older name}}
NEWER_NAMES = {
    "torch.distributed": {
        "all_gather_single": "all_gather_into_tensor",
        "reduce_scatter_single": "reduce_scatter_tensor",
    },
    # Backward goes through the newer functions. Of the older ones, it goes through those whose names end in autograd.
    "torch.distributed._functional_collectives": {
        "all_gather_single": "all_gather_tensor_autograd",
        "reduce_scatter_single": "reduce_scatter_tensor_autograd",
    },
}


def use_newer_names() -> None:
    """Let PyTorch's modules have the newer names too, where they have only the older ones."""
    import torch.distributed as dist  # here, because a rank imports its modules before PyTorch

    if hasattr(dist, "all_gather_single"):
        return  # PyTorch 2.13 or newer, which has all of them
    for module_name, names in NEWER_NAMES.items():
        module = import_module(module_name)
        for newer, older in names.items():
            setattr(module, newer, getattr(module, older))
