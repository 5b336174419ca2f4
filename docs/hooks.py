"""MkDocs hooks. They publish the plots of ``benchmarks/results`` without a second copy of them in ``docs/``.

A page refers to a plot by its place in the repository, ``../benchmarks/results/<name>.png``, so that the link
also works where the page is read as a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

IN_REPOSITORY = "../benchmarks/results/"
IN_SITE = "results/"


def on_files(files: Files, config: Any) -> Files:
    """Add the plots to the site."""
    for plot in sorted((Path(config.docs_dir) / IN_REPOSITORY).glob("*.png")):
        files.append(File.generated(config, f"{IN_SITE}{plot.name}", abs_src_path=str(plot.resolve())))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to the plots at their place in the site."""
    return markdown.replace(f"]({IN_REPOSITORY}", f"]({IN_SITE}")
