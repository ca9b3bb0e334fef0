"""Real peers: a site's folder, its node, and the protocol between sites."""

from dispfl.extras import require, require_posix

require_posix()  # before modules that import fcntl
require("peer", "A real peer (dispfl up, dispfl peer)")
