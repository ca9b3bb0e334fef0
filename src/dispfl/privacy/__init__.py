"""Differentially private training: private steps, the accountant of a budget, and the audit of a
run."""
