"""What a job needs, before it runs: bytes, messages, seconds, failures and cost, from numbers alone.

For chapters, the command ``plan`` and, as JSON, the doctor. It starts no ranks and needs no GPU; only trace.py imports
torch and starts a process, in which PyTorch itself shards. It may import ``ranks`` and ``command_line``.
"""
