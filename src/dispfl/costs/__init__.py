"""What a round costs, in two currencies: the paper's, and what really goes over the wire."""
