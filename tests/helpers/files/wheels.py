"""Wheels that tests install."""

import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str) -> None:
    """Write a wheel with one empty module."""
    wheel, about = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in (*files, f"{about}/RECORD"))
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in {**files, f"{about}/RECORD": record}.items():
            archive.writestr(file, text)
