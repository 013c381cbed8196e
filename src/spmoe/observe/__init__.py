"""Clocks, the ledger and profiles."""
