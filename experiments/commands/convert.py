"""`tk convert`: the original SqueezeLLM checkpoint, a Python pickle, as safetensors that can be served."""

from experiments.commands.output import progress_bar
from experiments.commands.requests import ConvertRequest
from experiments.planning.models import open_architectures
from experiments.quantization.squeezellm_pickle import read_original, write_safetensors
from tkernels.files import check_new_folder


def run(request: ConvertRequest) -> int:
    """Writes `out`, which must not exist yet (or be empty): whole, checked, or not at all."""
    out = request.out
    check_new_folder(out, "a model")
    architectures = open_architectures(request.architectures_from)
    original = read_original(request.source)
    with progress_bar("writing tensors", len(original.tensors), stays=True) as update:
        write_safetensors(original, out, architectures, lambda count: update(advance=count))
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    what = f"SqueezeLLM of {original.settings.wbits} bits, {len(original.tensors)} tensors"
    print(f"{out}: {what}, {sum(sizes):,} bytes in {len(sizes)} files")
    return 0
