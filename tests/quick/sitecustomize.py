"""What `make test` has every Python process do first: a fifth of the time of `import torch` is a search for garbage."""

import gc

gc.set_threshold(100_000)
