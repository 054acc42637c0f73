"""Where tasks are carried out, by name. Needs no torch."""

from experiments.document import ExperimentError
from experiments.sweep.local import Local
from experiments.sweep.on_ray import OnRay
from experiments.sweep.tasks import Executor
from tsched.torch_free import suggest_name

NAMES = ("local", "ray")


def make_executor(name: str, serves: bool) -> Executor:
    """The executor of that name; a local one has begun to start.

    serves: whether its run has tasks with a model.

    Raises ExperimentError for another name, or where Ray is wanted and not installed.
    """
    if name == "ray":
        return OnRay()
    if name != "local":
        raise ExperimentError([f"--executor: unknown {name!r}: there is {', '.join(NAMES)}{suggest_name(name, NAMES)}"])
    local = Local()
    local.begin(serves)
    return local
