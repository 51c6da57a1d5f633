"""Checks HTTP requests before Transformers' server sees them: host, path, size, JSON, fields, length of the prompt.

Transformers' server answers most malformed requests with status 500, some after they have waited in the queue. What
passes here is rewritten to the few fields that it needs; what does not gets a 4xx status and OpenAI's form of an error.
"""

import asyncio
import inspect
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from ipaddress import ip_address
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import JSONResponse
from transformers import PreTrainedTokenizerFast, StopStringCriteria

from nsa.errors import ConfigError, NSAError
from nsa_train.convert.folder_files import parse_json
from nsa_train.infer.generate import SamplingSettings
from nsa_train.infer.load_model import LoadedModel

_COMPLETIONS, _CHAT, _LOAD_MODEL = "/v1/completions", "/v1/chat/completions", "/load_model"
_METHODS = {_COMPLETIONS: "POST", _CHAT: "POST", "/v1/models": "GET", "/health": "GET"}
_MODEL_METHODS = {_LOAD_MODEL: "POST", "/reset": "POST"}
_DEFAULT_NEW_TOKENS = 1024
_SPARE_BYTES, _BYTES_PER_TOKEN = 1 << 16, 32
"""A request has at most the first number of bytes, and the second for each token of the context: text of many bytes
per token and JSON's escapes fit."""
_MOST_DISCARDED = 64 << 20

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_Fields = TypeVar("_Fields", bound=BaseModel)
_Number = TypeVar("_Number", int, float)
_StopText = Annotated[str, Field(min_length=1, max_length=256)]


class _RequestRefused(Exception):
    """A request that is answered with this status and message."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.response = error_response(status, message, param=param, code=code)


def error_response(status: int, message: str, *, param: str | None = None, code: str | None = None) -> JSONResponse:
    """An error in the form of OpenAI's API."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    content = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return JSONResponse(content, status, {"Connection": "close"} if status in (413, 421) else None)


class _StrictFields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _GenerationFields(_StrictFields):
    """Settings of Transformers' `GenerationConfig` that a request may have, as JSON text (`transformers chat`)."""

    do_sample: bool | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    transformers_version: str | None = None


class _RequestFields(_StrictFields):
    """Fields that both endpoints have. Settings that are not implemented may be given with the value of no effect."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: _StopText | Annotated[list[_StopText], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    frequency_penalty: Annotated[float, Field(gt=-1, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    n: Literal[1] | None = None
    user: str | None = None
    generation_config: str | None = None


class _CompletionFields(_RequestFields):
    """A request to `/v1/completions`."""

    prompt: str
    suffix: str | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None


class _TextPart(_StrictFields):
    type: Literal["text", "input_text", "output_text"]
    text: str


class _FunctionCall(_StrictFields):
    name: str
    arguments: str


class _ToolRequest(_StrictFields):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _FunctionCall


class _ChatMessage(_StrictFields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    name: str | None = None
    tool_calls: list[_ToolRequest] | None = None
    tool_call_id: str | None = None


class _ChatFields(_RequestFields):
    """A request to `/v1/chat/completions`."""

    messages: list[_ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    modalities: list[Literal["text"]] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None


class HostList:
    """Names under which the server may be addressed.

    A page of another site whose DNS name is made to point here (DNS rebinding) has the browser send that name.
    """

    def __init__(self, host: str, more: Sequence[str] = ()) -> None:
        """host: the address that the server listens on. more: names that a proxy or the local DNS has for it."""
        self._names = {name.lower().strip("[]") for name in ("localhost", "127.0.0.1", "::1", host, *more)}
        self._every_address = _is_address(host) and ip_address(host.strip("[]")).is_unspecified
        if self._every_address:
            self._names.add(socket.gethostname().lower())

    def allows(self, netloc: str) -> bool:
        """Whether a Host header, or the same part of an Origin, names this server. Ports are not compared."""
        try:
            name = (urlsplit(f"//{netloc}").hostname or "").removesuffix(".")
        except ValueError:
            return False
        return name in self._names or (self._every_address and _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class RequestGuard:
    """ASGI application in front of Transformers' one."""

    def __init__(
        self,
        app: Callable[[_Scope, _Receive, _Send], Awaitable[None]],
        loaded: LoadedModel,
        *,
        name: str,
        context_length: int,
        hosts: HostList,
        model_endpoints: bool,
        defaults: dict[str, Any],
    ) -> None:
        """defaults: generation settings of a request that brings others as `generation_config`."""
        self._app, self._loaded, self._name, self._hosts = app, loaded, name, hosts
        self._context_length, self._defaults = context_length, defaults
        self._methods = _METHODS | (_MODEL_METHODS if model_endpoints else {})
        self._most_bytes = _SPARE_BYTES + _BYTES_PER_TOKEN * context_length

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] == "http":
            try:
                receive = await self._checked(scope, receive)
            except _RequestRefused as refused:
                return await refused.response(scope, receive, send)
            except NSAError as error:  # e.g. of the chat template
                return await error_response(400, str(error))(scope, receive, send)
            if scope["path"] in (_COMPLETIONS, _CHAT):
                send = _with_stream_end(send)
        await self._app(scope, receive, send)

    async def _checked(self, scope: _Scope, receive: _Receive) -> _Receive:
        """A source of the request's body as Transformers' server should see it."""
        self._require_host(scope["headers"])
        path: str = scope["path"]
        if path not in self._methods:
            more = " It is off unless `nsa serve --model-endpoints` is given." if path in _MODEL_METHODS else ""
            raise _RequestRefused(
                404, f"there is no {path!r:.200}; this server has {', '.join(sorted(self._methods))}.{more}"
            )
        if scope["method"] != self._methods[path]:
            raise _RequestRefused(405, f"{path} takes {self._methods[path]} requests, not {scope['method']}.")
        if scope["method"] == "GET":
            return receive
        raw = await self._read(scope["headers"], receive)
        fields = _parse(raw) if raw or path in (_COMPLETIONS, _CHAT, _LOAD_MODEL) else {}
        if path == _COMPLETIONS:
            fields = await asyncio.to_thread(self._completion, fields)
        elif path == _CHAT:
            fields = await asyncio.to_thread(self._chat, fields)
        else:
            self._require_model(fields.get("model"))
        body = json.dumps(fields).encode()
        headers = [(key, value) for key, value in scope["headers"] if key not in (b"content-length", b"content-type")]
        json_headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
        scope["headers"] = [*headers, *json_headers]
        parts = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> MutableMapping[str, Any]:
            return next(parts, None) or await receive()  # what follows the body is the end of the connection

        return replay

    def _require_host(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        hosts = [value.decode("latin-1") for key, value in headers if key == b"host"]
        if not hosts or not all(map(self._hosts.allows, hosts)):
            raise _RequestRefused(
                421,
                f"this server does not answer for the host {', '.join(hosts)!r:.200}. Start it with --allowed-host.",
            )
        for origin in (value.decode("latin-1") for key, value in headers if key == b"origin"):
            if not self._hosts.allows(origin.partition("://")[2]):
                raise _RequestRefused(403, f"this server does not answer pages of another site ({origin!r:.200}).")

    async def _read(self, headers: Sequence[tuple[bytes, bytes]], receive: _Receive) -> bytes:
        """The body. One that is too long is read to its end and forgotten, so that clients see the answer."""
        lengths = [int(value) for key, value in headers if key == b"content-length"]
        parts, n_bytes, more = list[bytes](), 0, max(lengths, default=0) <= _MOST_DISCARDED
        while more and n_bytes <= _MOST_DISCARDED:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _RequestRefused(400, "the connection ended before the request.")
            n_bytes += len(message.get("body", b""))
            if n_bytes <= self._most_bytes:
                parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        if max(n_bytes, *lengths, 0) > self._most_bytes:
            raise _RequestRefused(
                413,
                f"the request has more than {self._most_bytes:,} bytes, the limit for a context of "
                f"{self._context_length:,} tokens.",
                code="context_length_exceeded",
            )
        return b"".join(parts)

    def _completion(self, raw: dict[str, Any]) -> dict[str, Any]:
        fields = _validated(_CompletionFields, raw)
        if not fields.prompt:
            raise _RequestRefused(400, "prompt is empty: give some text to continue.", param="prompt")
        n_tokens = len(self._loaded.tokenizer(fields.prompt, verbose=False)["input_ids"])
        return self._rewritten(fields, n_tokens, "prompt") | {"prompt": fields.prompt, "suffix": fields.suffix}

    def _chat(self, raw: dict[str, Any]) -> dict[str, Any]:
        fields = _validated(_ChatFields, raw)
        fields.max_tokens = _first(fields.max_completion_tokens, fields.max_tokens)
        variables = fields.chat_template_kwargs or {}
        if reserved := sorted(variables.keys() & _TEMPLATE_PARAMETERS):
            raise _RequestRefused(
                400,
                f"chat_template_kwargs has {reserved[0]!r}, which is no variable of a template.",
                param="chat_template_kwargs",
            )
        if wrong := [token for token in fields.logit_bias or {} if int(token) >= self._loaded.model.config.vocab_size]:
            raise _RequestRefused(
                400, f"logit_bias has token {wrong[0]}, which the model does not have.", param="logit_bias"
            )
        messages = [_plain_message(message) for message in fields.messages]
        rendered = [_with_parsed_arguments(message) for message in messages]
        n_tokens = len(encode_chat(self._loaded, rendered, tools=fields.tools, **variables)["input_ids"])
        return self._rewritten(fields, n_tokens, "messages") | {
            "messages": messages,
            "tools": fields.tools,
            "logit_bias": fields.logit_bias,
            "chat_template_kwargs": variables,
        }

    def _rewritten(self, fields: _RequestFields, n_tokens: int, param: str) -> dict[str, Any]:
        """The fields of both endpoints, after checking them."""
        self._require_model(fields.model)
        more = _GenerationFields()
        if fields.generation_config is not None:
            more = _validated(_GenerationFields, _parse(fields.generation_config.encode("utf-8", "replace")))
        n_new = _first(fields.max_tokens, more.max_new_tokens)
        room = self._context_length - n_tokens
        if n_tokens == 0:
            raise _RequestRefused(400, f"{param} has no tokens: give some text.", param=param)
        if room < (1 if n_new is None else n_new):
            raise _RequestRefused(
                400,
                f"{n_tokens:,} tokens of the prompt and {n_new or 1:,} new ones are more than the context of "
                f"{self._context_length:,} tokens.",
                param=param if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
        chosen: dict[str, Any] = {
            "max_new_tokens": min(_DEFAULT_NEW_TOKENS, room) if n_new is None else n_new,
            "temperature": _first(fields.temperature, more.temperature),
            "top_p": _first(fields.top_p, more.top_p),
            "top_k": more.top_k or None,
            "seed": fields.seed,
            "stop": tuple(stop),
        }
        try:
            SamplingSettings(**{key: value for key, value in chosen.items() if value is not None})
            _require_stop_strings(self._loaded.tokenizer, stop)
        except ConfigError as error:
            raise _RequestRefused(400, str(error)) from error
        sampling = more.model_dump(include={"do_sample", "top_k", "repetition_penalty"}, exclude_none=True)
        return {
            "model": self._name,
            "max_tokens": chosen["max_new_tokens"],
            "temperature": chosen["temperature"],
            "top_p": chosen["top_p"],
            "seed": fields.seed,
            "stop": stop or None,
            "stream": bool(fields.stream),
            "frequency_penalty": fields.frequency_penalty,
            "generation_config": json.dumps(self._defaults | sampling)
            if fields.generation_config is not None
            else None,
        }

    def _require_model(self, name: object) -> None:
        if name is not None and name != self._name:
            raise _RequestRefused(
                400,
                f"this server has one model, {self._name!r}, not {name!r:.200}.",
                param="model",
                code="model_not_found",
            )


def _with_stream_end(send: _Send) -> _Send:
    """Send what OpenAI's API sends after the last piece of a stream, which Transformers' server does not."""
    streams = False

    async def forward(message: MutableMapping[str, Any]) -> None:
        nonlocal streams
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        elif streams and not message.get("more_body", False):
            message = {**message, "body": message.get("body", b"") + b"data: [DONE]\n\n"}
        await send(message)

    return forward


_TEMPLATE_PARAMETERS = {"conversations", "messages", "load_audio_from_video"} | {
    *inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
}
"""Keywords of a tokenizer's `apply_chat_template`, which are no variables of a template."""


def encode_chat(
    loaded: LoadedModel,
    conversation: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    return_tensors: str | None = None,
    **variables: Any,
) -> Any:
    """Do the work of a tokenizer's `apply_chat_template` for Transformers' server, with limits on the template."""
    variables = {key: value for key, value in variables.items() if key not in _TEMPLATE_PARAMETERS}
    text = loaded.chat_template.render(conversation, tools=tools, **variables)
    return loaded.tokenizer(text, add_special_tokens=False, return_tensors=return_tensors, verbose=False)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        fields = parse_json(raw.decode("utf-8"), "the request")
        json.dumps(fields, ensure_ascii=False).encode("utf-8")  # escapes may spell halves of characters, without tokens
    except (UnicodeError, RecursionError, NSAError) as error:
        raise _RequestRefused(400, str(error)) from error
    return fields


def _validated(kind: type[_Fields], raw: dict[str, Any]) -> _Fields:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(map(str, first["loc"]))[:200]
        why = "this server has no such field" if first["type"] == "extra_forbidden" else first["msg"]
        raise _RequestRefused(400, f"{param}: {why}.", param=param) from error


def _require_stop_strings(tokenizer: Any, stop: Sequence[str]) -> None:
    """Raise for a text that no tokens of the vocabulary can end with; the result is kept for the generation."""
    try:
        if stop:
            StopStringCriteria(tokenizer, list(stop))
    except ValueError as error:
        raise ConfigError(f"stop is {stop!r:.200}: the model has no tokens that write it.") from error


def _plain_message(message: _ChatMessage) -> dict[str, Any]:
    """A message with its text in one piece."""
    content = message.content
    if isinstance(content, list):
        content = " ".join(part.text for part in content)
    calls = [call.model_dump(exclude_none=True) for call in message.tool_calls or []]
    for call in calls:
        _parse(call["function"]["arguments"].encode("utf-8", "replace"))
    values = {"role": message.role, "content": content or "", "tool_call_id": message.tool_call_id}
    return {key: value for key, value in {**values, "tool_calls": calls or None}.items() if value is not None}


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message as Transformers' server gives it to the template."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": "", "tool_calls": calls}


def _first(*values: _Number | None) -> _Number | None:
    return next((value for value in values if value is not None), None)
