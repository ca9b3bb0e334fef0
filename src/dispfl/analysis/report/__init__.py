"""One self-contained HTML page that shows run directories: who won, at what cost, for which peers."""
