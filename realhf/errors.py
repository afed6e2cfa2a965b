"""UserError: what a user caused and can mend; the command line prints it without traceback and exits with 2."""


class UserError(ValueError):
    """One clear sentence that names the file, field, function or sample and what would be legal."""
