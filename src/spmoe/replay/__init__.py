"""Traces of real generations, and a simulator that replays them under other policies, budgets and links."""
