"""`transformers serve` with one model that is already loaded and verified, in this process.

vLLM is the server for production; this one answers requests one after another.
"""

import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from fastapi import HTTPException
from transformers.cli import serve as transformers_serve
from transformers.cli.serving import model_manager

from nsa.errors import ConfigError
from nsa.infer.load_model import LoadedModel


class FixedModelManager(model_manager.ModelManager):
    """Transformers' model manager for one loaded model: no request can load, replace or unload a model."""

    def __init__(self, loaded: LoadedModel, name: str) -> None:
        super().__init__(device=str(loaded.model.device))
        self._loaded, self.force_model = loaded, name

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._loaded.model, self._loaded.tokenizer

    async def load_model_streaming(self, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        yield f'data: {{"status": "ready", "model": "{self.force_model}", "cached": true}}\n\n'

    def get_gen_models(self, *args: Any) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "nsa"}]

    def shutdown(self) -> None:
        """Nothing: the model lives as long as the process."""


def serve_model(
    loaded: LoadedModel, *, name: str, host: str, port: int, on_start: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until SIGINT or SIGTERM; requests that are being answered are finished first.

    on_start: called with the address just before the server listens there.
    """
    port = free_port(host, port)
    set_server_defaults(loaded)
    on_start(f"http://{_in_url(host)}:{port}/v1")
    with _instead_of_model_manager(FixedModelManager(loaded, name)):
        transformers_serve.Serve(host=host, port=port, log_level="error")


def set_server_defaults(loaded: LoadedModel) -> None:
    """What a request leaves out: sampling at temperature 1 as in OpenAI's API; `"temperature": 0` is greedy."""
    loaded.model.generation_config.update(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        eos_token_id=sorted(loaded.end_ids) or None,
        pad_token_id=loaded.pad_id,
        prefill_chunk_size=loaded.prefill_chunk,
    )
    if loaded.tokenizer.chat_template:
        loaded.tokenizer.split_special_tokens = False  # a chat template spells them
    else:
        loaded.tokenizer.apply_chat_template = _refuse_chat


def _refuse_chat(*args: Any, **kwargs: Any) -> NoReturn:
    raise HTTPException(400, "the model has no chat template: it continues text. Use /v1/completions.")


@contextmanager
def _instead_of_model_manager(manager: FixedModelManager) -> Iterator[None]:
    """`Serve` takes a path and builds its own manager, which would load any model that a request names."""
    theirs = model_manager.ModelManager
    model_manager.ModelManager = lambda **settings: manager
    try:
        yield
    finally:
        model_manager.ModelManager = theirs


def free_port(host: str, port: int) -> int:
    """The port, or a free one for 0; raises if nothing can listen there."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            found: int = probe.getsockname()[1]
            return found
    except (OSError, UnicodeError) as error:  # a label of a name may have 63 characters
        raise ConfigError(
            f"cannot listen on {host}, port {port} ({getattr(error, 'strerror', error)}). Choose another --port (0 for "
            f"a free one) or --host."
        ) from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
