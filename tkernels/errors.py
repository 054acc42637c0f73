"""The root of every error that the four packages define."""


class TKernelsError(Exception):
    """What tkernels, tmodel, tsched and experiments refuse, or fail at, by an error of their own.

    Each derives from the built-in error that it is as well, ValueError, TypeError or RuntimeError as a rule. All that
    tsched refuses its callers is one; the other three raise plain TypeErrors and ValueErrors of some arguments too.
    """
