"""`tk convert`: a checkpoint of Python pickles as safetensors that can be served."""

from experiments.commands.output import progress_bar
from experiments.commands.requests import ConvertRequest
from experiments.conversion.checkpoint import Conversion, PickledCheckpoint, find_checkpoint, write_safetensors
from experiments.planning.models import open_architectures
from tkernels.files import check_new_folder


def run(request: ConvertRequest) -> int:
    """Writes `out`, which must not exist yet (or be empty): whole, checked, or not at all."""
    out = request.out
    check_new_folder(out, "a model")
    architectures = open_architectures(request.architectures_from)
    original = find_checkpoint(request.source)
    with progress_bar("writing tensors", 0, stays=True) as update:
        conversion = write_safetensors(
            original, out, architectures, lambda known, count: update(total=known.num_tensors, advance=count)
        )
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    print(f"{out}: {_describe(original, conversion)}, {sum(sizes):,} bytes in {len(sizes)} files")
    for what, names in (
        ("plain numbers", conversion.numbers),
        ("second names of tensors", conversion.second_names),
    ):
        if names:
            print(f"left out, {what}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if names[5:] else ''}")
    return 0


def _describe(original: PickledCheckpoint, conversion: Conversion) -> str:
    what = "" if original.settings is None else f"SqueezeLLM of {original.settings.wbits} bits, "
    return f"{what}{conversion.num_tensors} tensors"
