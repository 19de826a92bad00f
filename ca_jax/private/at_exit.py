"""What is called at the interpreter's end while thread pools still take work. Python has no public name for it.

Private: `threading._register_atexit`, which `concurrent.futures` ends its pools by; Python 3.9 to 3.14 have it. Without
it a function is called as `atexit` calls it, when the pools have ended and nothing can be written any more.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable


def before_pools_end(function: Callable[[], object]) -> None:
    """Has a function be called then, the last one that was given first."""
    getattr(threading, "_register_atexit", atexit.register)(function)
