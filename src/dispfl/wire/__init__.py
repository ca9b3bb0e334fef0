"""Messages as bytes, and back. docs/protocol.md specifies them byte by byte."""
