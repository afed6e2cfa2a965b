"""UserError: what a user caused and can mend; printed without traceback, with exit code 2."""


class UserError(ValueError):
    """One clear sentence that names the file, field, function or sample and what would be legal."""
