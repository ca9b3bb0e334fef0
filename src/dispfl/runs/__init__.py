"""The run directory: config, metrics, checkpoints, resume."""

from dispfl.extras import require_posix

require_posix()  # before modules that import fcntl and resource
