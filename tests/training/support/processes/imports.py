"""TRL for a process that trains many times."""

import atexit
import gc

from trainspan_training.objective.heavy_imports import import_training


def import_once() -> None:
    """Runs `import_training`, and then hides all current objects from the garbage collector until the process ends.

    transformers calls the collector whenever a training begins: it would scan a million objects for half a second.
    """
    import_training()
    gc.freeze()
    atexit.register(gc.unfreeze)
