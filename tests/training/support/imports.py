"""TRL for a process that trains many times."""

import atexit
import gc

from trainspan_training.objective.heavy_imports import import_training


def import_once() -> None:
    """`import_training`, and what is there then is taken from the garbage collector until the process ends.

    transformers calls it whenever a training begins: it would look through a million objects for half a second.
    """
    import_training()
    gc.freeze()
    atexit.register(gc.unfreeze)
