"""`nsa serve`: an OpenAI-compatible HTTP server for one model."""

from contextlib import suppress
from pathlib import Path

import typer

from nsa_train.cli.model_options import DEVICE, DTYPE, KEY, MODEL, TOKENIZER, open_model
from nsa_train.cli.outputs import print_error
from nsa_train.cli.progress_line import ProgressLine
from nsa_train.cli.sigterm import sigterm_as_interrupt


def serve(
    model: Path = MODEL,
    port: int = typer.Option(8000, min=0, max=65535, help="Port to listen on; 0 chooses a free one."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; other than loopback, the network can use it."),
    context_length: int = typer.Option(
        None, min=2, help="Tokens of a prompt and its answer together at most. Default: as in training."
    ),
    allowed_host: list[str] = typer.Option(
        [], help="Another name that requests may have in their Host header, e.g. that of a proxy; repeatable."
    ),
    model_endpoints: bool = typer.Option(
        False,
        "--model-endpoints",
        help="Answer /load_model and /reset, as `transformers chat` needs it; neither changes the model.",
    ),
    device: str = DEVICE,
    dtype: str = DTYPE,
    tokenizer: str = TOKENIZER,
    key_file: Path = KEY,
) -> None:
    """Serve a model over HTTP with OpenAI's API (/v1/completions, /v1/chat/completions) until stopped.

    This is the server of Transformers with this one model: requests are answered one after another, in the order of
    their arrival. It has no password and no encryption, and listens on loopback unless --host names another address.
    Requests must name the server as loopback, as --host or as an --allowed-host.

    **Examples:**

    `nsa serve artifacts/cpu_quickstart --port 8000`

    `curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json'
    -d '{"prompt": "The ", "max_tokens": 100, "temperature": 0.8, "stream": true}'`
    """
    from nsa_train.watch.exporter import is_loopback

    with ProgressLine("loading the server"):
        from nsa_train.infer.serve import serve_model

    loaded = open_model(model, device=device, dtype=dtype, tokenizer=tokenizer, key_file=key_file)
    if not is_loopback(host):
        print_error(
            f"WARNING: listening on {host}, not on loopback: whoever reaches this machine on that address can use the "
            f"model, without a password and unencrypted. Use --host 127.0.0.1 and an ssh tunnel, or a firewall."
        )

    def say(url: str) -> None:
        print(f"serving {loaded.source} as model {str(model)!r} at {url}", flush=True)
        print("requests are answered one after another, in the order of their arrival; stop with Ctrl-C", flush=True)

    with suppress(KeyboardInterrupt), sigterm_as_interrupt():
        serve_model(
            loaded,
            name=str(model),
            host=host,
            port=port,
            context_length=context_length,
            allowed_hosts=allowed_host,
            model_endpoints=model_endpoints,
            on_start=say,
        )
