"""What only the live registry tells of an experiment's kernels and shapes: config values, axes and their bounds."""

from experiments.document import Document, nearest
from experiments.planning.axes import choices_of
from experiments.planning.shape_axes import expanded_shapes
from experiments.schema import VariantChoice
from tkernels import Registry


def live_problems(document: Document, ops: Registry) -> list[str]:
    """Config values that no config has, pins of a variant without one, and shapes off their axes; unknown ops and
    variants are passed over.
    """
    return [*_pin_problems(document, ops), *_shape_problems(document, ops)]


def _pin_problems(document: Document, ops: Registry) -> list[str]:
    problems = []
    kernels = document.data.get("kernels")
    for op in kernels if isinstance(kernels, dict) else ():
        for index, choice in enumerate(choices_of(document, op)):
            path = ("kernels", op, index)
            if not isinstance(choice, VariantChoice) or op not in ops or choice.variant not in ops[op].variants:
                continue
            variant = ops[op].variants[choice.variant]
            if choice.pins and variant.launch is None:
                problems.append(document.problem(path, f"variant {choice.variant!r} has no config to pin"))
                continue
            known = variant.default_config("").as_dict() if choice.pins else {}
            for pin in choice.pins:
                if pin not in known:
                    message = f"unknown config value {pin!r}: there is {', '.join(known)}{nearest(pin, known)}"
                    problems.append(document.problem((*path, choice.variant, pin), message))
    return problems


def _shape_problems(document: Document, ops: Registry) -> list[str]:
    problems: dict[str, None] = {}
    for op, shapes in expanded_shapes(document, []).items():
        for shape in shapes if op in ops else ():
            known = ops[op].contract.axis_by_name
            for axis, value in shape.values.items():
                path = ("shapes", op, shape.entry, axis)
                if axis not in known:
                    message = f"unknown axis {axis!r}: there is {', '.join(known)}{nearest(axis, known)}"
                    problems[document.problem(path, message)] = None
                elif isinstance(value, int | str) and not known[axis].allows(value):
                    at = (*path, shape.places[axis]) if axis in shape.places else path
                    problems[document.problem(at, f"{axis} = {value}, but {known[axis].rule}")] = None
    return list(problems)
