"""`transformers serve` with one model that is already loaded and verified, in this process.

vLLM is the server for production; this one answers requests one after another.
"""

import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from fastapi import HTTPException
from transformers.cli import serve as transformers_serve
from transformers.cli.serving import model_manager, server

from nsa.errors import NSAError
from nsa_train.infer.load_model import LoadedModel
from nsa_train.infer.request_guard import HostList, RequestGuard, encode_chat, error_response
from nsa_train.listen_address import free_port, in_url


class _FixedModelManager(model_manager.ModelManager):
    """Transformers' model manager for one loaded model: no request can load, replace or unload a model."""

    def __init__(self, loaded: LoadedModel, name: str) -> None:
        super().__init__(device=str(loaded.model.device))
        self._loaded, self.force_model = loaded, name

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._loaded.model, self._loaded.tokenizer

    async def load_model_streaming(self, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        yield f"data: {json.dumps({'status': 'ready', 'model': self.force_model, 'cached': True})}\n\n"

    def get_gen_models(self, *args: Any) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "nsa"}]

    def shutdown(self) -> None:
        """Do nothing: the model lives as long as the process."""


def serve_model(
    loaded: LoadedModel,
    *,
    name: str,
    host: str,
    port: int,
    context_length: int | None,
    allowed_hosts: Sequence[str],
    model_endpoints: bool,
    on_start: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM; requests that are being answered are finished first.

    context_length: tokens of a prompt and its answer together at most; default as in training.
    allowed_hosts: names besides loopback's and `host` that requests may address the server by.
    model_endpoints: answer `/load_model` and `/reset`, which have no effect, for clients that need an answer.
    on_start: called with the address once the server accepts connections there.
    """
    port = free_port(host, port)
    guard = partial(
        RequestGuard,
        loaded=loaded,
        name=name,
        context_length=context_length or loaded.trained_length,
        hosts=HostList(host, allowed_hosts),
        model_endpoints=model_endpoints,
        defaults=_set_server_defaults(loaded),
    )
    announce = partial(on_start, f"http://{in_url(host)}:{port}/v1")
    with _instead_of_transformers_own(_FixedModelManager(loaded, name), guard, announce):
        transformers_serve.Serve(host=host, port=port, log_level="error")


def _set_server_defaults(loaded: LoadedModel) -> dict[str, Any]:
    """Set defaults for what requests leave out: temperature 1 as in OpenAI's API; `"temperature": 0` is greedy."""
    defaults = dict(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        eos_token_id=sorted(loaded.end_ids) or None,
        pad_token_id=loaded.pad_id,
        prefill_chunk_size=loaded.prefill_chunk,
    )
    loaded.model.generation_config.update(**defaults)
    if loaded.tokenizer.chat_template:
        loaded.tokenizer.split_special_tokens = False  # a chat template spells them
    loaded.tokenizer.apply_chat_template = partial(encode_chat, loaded)
    return defaults


@contextmanager
def _instead_of_transformers_own(
    manager: _FixedModelManager, guard: Callable[[Any], RequestGuard], on_listening: Callable[[], None]
) -> Iterator[None]:
    """`Serve` takes a path and builds its own manager, which would load any model that a request names, an application
    without a guard, and a server that does not say when it listens."""
    manager_type, build_server, startup = model_manager.ModelManager, server.build_server, uvicorn.Server.startup

    def build_guarded(*args: Any, **kwargs: Any) -> RequestGuard:
        app = build_server(*args, **kwargs)
        app.add_exception_handler(NSAError, lambda request, error: error_response(400, str(error)))
        app.add_exception_handler(
            HTTPException, lambda request, error: error_response(error.status_code, str(error.detail))
        )
        return guard(app)

    async def startup_and_announce(self: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        await startup(self, sockets)
        on_listening()

    model_manager.ModelManager = lambda **settings: manager
    server.build_server = build_guarded
    uvicorn.Server.startup = startup_and_announce  # type: ignore[method-assign]
    try:
        yield
    finally:
        model_manager.ModelManager, server.build_server = manager_type, build_server
        uvicorn.Server.startup = startup  # type: ignore[method-assign]
