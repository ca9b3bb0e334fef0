"""The build backend of the plug-in: one module, and the metadata of pyproject.toml, as a wheel."""

import tomllib
import zipfile
from pathlib import Path
from typing import Any

MODULE = "dispfl_plugin.py"


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None
) -> str:
    """Build the wheel (PEP 517)."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    name, version = project["name"].replace("-", "_"), project["version"]
    info = f"{name}-{version}.dist-info"
    entry_points = "".join(
        f"[{group}]\n" + "".join(f"{short} = {target}\n" for short, target in entries.items())
        for group, entries in project["entry-points"].items()
    )
    files = {
        MODULE: Path(MODULE).read_text(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n",
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: build_wheel\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
        f"{info}/entry_points.txt": entry_points,
    }
    record = f"{info}/RECORD"
    wheel = f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory) / wheel, "w") as archive:
        for file, text in {
            **files,
            record: "".join(f"{file},,\n" for file in [*files, record]),
        }.items():
            archive.writestr(file, text)
    return wheel
