"""Errors that are the user's to mend."""


class BadInput(ValueError):
    """A file, a flag or a request is wrong; its one line names it, what is wrong and what is right.

    Commands print the line and exit with code 2; a server answers with status 400.
    """
