"""What the experiments raise for bad input."""


class UserError(Exception):
    """Bad input: reported in one line, with exit code 2."""
