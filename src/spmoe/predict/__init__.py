"""Guesses at which experts will be needed."""
