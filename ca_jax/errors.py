"""Every exception the public API raises on purpose.

Each message says what was wanted and what was found. `CaJaxError` is the common base, so that a caller may catch all
of them at once; classes that report a bad argument are `ValueError` too.

Not here: failures of the store. Those never reach a caller: they are counted misses and a recompute.
"""


class CaJaxError(Exception):
    """Base of every error ca_jax raises on purpose."""


class UnknownModelError(CaJaxError, ValueError):
    """A model name that is neither a preset, a file, a directory nor a hub name that can be had."""


class CheckpointError(CaJaxError, ValueError):
    """A checkpoint that cannot be read: truncated, missing a tensor, or a tensor of another shape."""


class UnsupportedArchitectureError(CaJaxError, ValueError):
    """A model this engine cannot serve; the message names the architecture and the reason."""


class UnsupportedQuantizationError(CaJaxError, ValueError):
    """Weights quantised in a way that is not read: a GGUF tensor type, or a config.json; the message names it."""


class AdapterError(CaJaxError, ValueError):
    """A LoRA adapter that cannot be read or served; the message names the file and the field or tensor."""


class UnknownAdapterError(CaJaxError, LookupError):
    """The name of an adapter that is not loaded, or that is loaded with other weights."""


class AdapterInUseError(CaJaxError):
    """An adapter that is to be unloaded while sessions or jobs use it."""


class ContextWindowError(CaJaxError, ValueError):
    """A prompt longer than the context window."""


class EmptyMessageError(CaJaxError, ValueError):
    """A message or prompt without any token."""


class InvalidRequestError(CaJaxError, ValueError):
    """A sampling parameter or prompt outside its range."""


class SessionClosedError(CaJaxError):
    """A call on a session, or an engine, that has been closed."""


class SessionBusyError(CaJaxError):
    """A second turn sent to a session whose last turn still runs."""


class SessionMovedError(CaJaxError):
    """A turn for a session that does not stand where its caller says: it was gone on with, or lost its last turns."""


class TenantError(CaJaxError):
    """A session id that is another tenant's."""


class UnknownSessionError(CaJaxError, LookupError):
    """A session id under which nothing is stored."""


class ProcessesError(CaJaxError, RuntimeError):
    """Processes that are to serve as one do not: one does not answer, does something else, or holds other shards."""


def check(holds: bool, name: str, wanted: str, found: object, error: type[Exception] = ValueError) -> None:
    """Raises an error that says what a value must be and what was got, unless it holds.

    Raises:
      Exception: it does not; of the type `error`.
    """
    if not holds:
        raise error(f"{name} must be {wanted}{';' if wanted.startswith('one of ') else ','} got {found!r}")


def is_count(value: object, least: int = 0) -> bool:
    """Whether a value is a whole number of at least so many."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
