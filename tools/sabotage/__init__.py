"""Lies about PyTorch and this project's code, and the cells that notice them: ``make sabotage``."""
