"""The root of every error that the four packages define."""


class TKernelsError(Exception):
    """What tkernels, tmodel, tsched and experiments refuse, or fail at, by an error of their own.

    Each derives from the built-in error that it is as well, ValueError or RuntimeError as a rule. What is raised as a
    plain TypeError or ValueError, of an argument that could have none such, is no TKernelsError.
    """
