"""What `make test` has every Python process do first: a third of `import torch` and of its end is a search for garbage.

The search is made less often, and not at the end. The chapters' scripts in test_scripts.py end without this.
"""

import atexit
import gc

gc.set_threshold(100_000)
atexit.register(gc.freeze)
