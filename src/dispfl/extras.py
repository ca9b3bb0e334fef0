"""Optional dependencies (extras) and supported platforms: one sentence where one is missing."""

import logging
import os
from importlib.util import find_spec

from dispfl.errors import ConfigError

log = logging.getLogger("dispfl")

EXTRAS = {
    "peer": ("aiohttp", "cryptography"),
    "outbox": ("aiohttp", "cryptography", "obstore"),
    "report": ("matplotlib",),
    "view": ("aiohttp",),
    "ray": ("ray",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "hub": ("datasets",),
    "privacy": ("dp_accounting",),
    "pandas": ("pandas",),
    "metrics": ("prometheus_client",),
}
"""The packages that each extra of pyproject.toml installs, by the names that they are imported
under."""

_warned: set[str] = set()


def require(extra: str, feature: str, *packages: str) -> None:
    """Refuse to continue unless an extra, or only these packages of it, is installed."""
    sentence = _missing(extra, feature, packages)
    if sentence:
        raise ConfigError(sentence)


def can_draw() -> bool:
    """Whether figures can be drawn; if not, warn once that they are skipped."""
    sentence = _missing("report", "A figure")
    if sentence and "report" not in _warned:
        _warned.add("report")
        log.warning("Figures are skipped. %s", sentence)
    return not sentence


def _missing(extra: str, feature: str, packages: tuple[str, ...] = ()) -> str | None:
    """Return the sentence about the first package that is not installed."""
    for package in packages or EXTRAS[extra]:
        if find_spec(package) is None:
            return (
                f"{feature} needs {package}, which is not installed: pip install 'dispfl[{extra}]'."
            )
    return None


def require_posix() -> None:
    """Refuse Windows: locks, memory measurements and signals are those of POSIX."""
    if os.name == "nt":
        raise ConfigError(
            "dispfl runs on Linux and macOS; Windows is not supported. Use the Linux subsystem"
            " (WSL)."
        )
