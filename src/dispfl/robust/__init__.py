"""Averages that tolerate Byzantine peers, and the attacks that test them."""
