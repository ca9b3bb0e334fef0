"""What a node keeps and shows: its saved rounds, its status and its log."""
