"""What a chapter uses of these modules is copied into its exported script.

So they import torch, the standard library, the data's library and each other alone.
"""
