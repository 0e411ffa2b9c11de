"""Layouts of frameworks. Each module imports its framework; nothing else of bascule does."""
