"""Brings pages that live elsewhere in the repository into the site: measured results, and the files at its top."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
TOP = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def on_files(files: Files, config: Any) -> Files:
    """Adds `results/*.md` with their pictures, and the files of `TOP` in lower case."""
    for path in sorted(ROOT.glob("results/**/*")):
        name = path.relative_to(ROOT).as_posix()
        is_page = path.suffix == ".md" and path.parent.name == "results"
        if is_page or path.suffix == ".png":
            files.append(File.generated(config, name, abs_src_path=str(path)))
    for name in TOP:
        files.append(File.generated(config, name.lower(), abs_src_path=str(ROOT / name)))
    return files
