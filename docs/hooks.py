"""MkDocs hooks. They publish files of the repository without a second copy of them in a page.

A page refers to a plot, or to the table of models, by its place in the repository, such as
``../benchmarks/results/<name>.png``, so that the link also works where the page is read as a file. For the same reason
it refers to an example by a link; a line that consists of a link to ``examples/<name>.py`` is followed by the code in
the site. A link to a file of the repository that the site lacks, such as ``../ARCHITECTURE.md``, is its text there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

IN_REPOSITORY = "../benchmarks/results/"
IN_SITE = "results/"
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./(?!benchmarks/results/)[^)]*\)")
EXAMPLE = re.compile(r"^\[`\w+\.py`\]\((examples/\w+\.py)\)$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the plots, and the table of models, to the site."""
    results = Path(config.docs_dir) / IN_REPOSITORY
    for file in [*sorted(results.glob("*.png")), results / "models.md"]:
        files.append(File.generated(config, f"{IN_SITE}{file.name}", abs_src_path=str(file.resolve())))
    return files


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Point links to what the site has, and add the code of the examples."""

    def with_code(link: re.Match[str]) -> str:
        code = (Path(config.docs_dir) / link[1]).read_text()
        return f"{link[0]}\n\n```python\n{code}```"

    markdown = OUTSIDE.sub(r"\1", markdown)
    return EXAMPLE.sub(with_code, markdown).replace(f"]({IN_REPOSITORY}", f"]({IN_SITE}")
