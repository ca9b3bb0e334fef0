"""Requests and responses between peers over HTTPS with mutual TLS."""
