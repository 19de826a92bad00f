"""The key-value service that processes of `jax.distributed` share. jax has no public name for it.

Private: `jax._src.distributed.global_state.client` and three methods of it, `key_value_set`, `key_value_delete` and
`blocking_key_value_get`. jax 0.10, 0.11 and 0.12 have them, and `pyproject.toml` allows no other. Without them several
processes cannot serve one model; one process needs none of this.

Not here: what processes agree upon, and when (`device.processes`).
"""

from __future__ import annotations

from typing import Any

from ca_jax.errors import ProcessesError


class KeyValues:
    """A dictionary of texts that all processes of `jax.distributed` read and write. Any thread may call.

    Raises:
      ProcessesError: `jax.distributed` is not initialised, or this jax has no such service.
    """

    def __init__(self) -> None:
        import jax  # Here: what runs without it imports this module too.

        if not jax.distributed.is_initialized():
            raise ProcessesError("jax.distributed.initialize must be called before, and was not")
        try:
            from jax._src.distributed import global_state

            client: Any = global_state.client
            self._set, self._delete = client.key_value_set, client.key_value_delete
            self._get = client.blocking_key_value_get
        except (ImportError, AttributeError) as error:
            raise ProcessesError(
                f"several processes need a jax whose key-value service is known, got jax {jax.__version__}: install a "
                "version that ca_jax allows"
            ) from error

    def set(self, key: str, text: str) -> None:
        """Gives a key its text, once: jax raises `JaxRuntimeError` where it has one."""
        self._set(key, text)

    def get(self, key: str, timeout_s: float) -> str:
        """The text of a key; waits until it has one.

        Raises:
          jax.errors.JaxRuntimeError: it has none in time, or the service is gone.
        """
        return self._get(key, int(timeout_s * 1000))

    def delete(self, key: str) -> None:
        """Takes a key's text away; nothing where it has none."""
        self._delete(key)
