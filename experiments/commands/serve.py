"""`tk serve`: a model behind OpenAI's routes."""

import logging
import sys
from importlib.util import find_spec

from experiments.commands.requests import ServeRequest
from experiments.document import ExperimentError
from experiments.engine_flags import engine_options, parse_kernels

_EXTRA = ("fastapi", "uvicorn", "limits", "prometheus_client")


def run(request: ServeRequest) -> int:
    """Serves until a signal ends it."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise ExperimentError([f"tk serve needs {', '.join(missing)}: pip install 'tkernels[serve]'"])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    engine_options(request.engine)
    options = {
        **request.engine,
        "kernels": parse_kernels(request.kernels),
        "architectures_from": [str(folder) for folder in request.architectures_from],
    }
    from tsched.serving.app import create_app
    from tsched.serving.auth import KeyFileError, read_keys
    from tsched.serving.http import ServerStartError, open_socket, serve
    from tsched.serving.supervisor import SupervisedClient

    try:
        keys = None if request.api_key_file is None else read_keys(request.api_key_file)
        listening = open_socket(request.host, request.port)
        client = SupervisedClient(request.model, request.name, variants_from=request.variants_from, **options)
        app = create_app(client, keys=keys, chat_template=request.chat_template)
        host, port = listening.getsockname()[:2]
        print(f"serving {request.model} at http://{host}:{port}/v1", flush=True)
        serve(app, listening)
    except (KeyFileError, ServerStartError) as error:
        raise ExperimentError([str(error)]) from None
    return 0
