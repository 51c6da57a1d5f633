"""An S3 service in this process, for tests of copies in an object store."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server_module = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def client(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of the service, with an empty bucket `models` and the variables that the S3 clients read."""
    import boto3

    from nsa_train.checkpoint.transfer import S3Prefix

    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3 = S3Prefix("s3://models/any").client
    s3.create_bucket(Bucket="models")
    yield s3
    everything = boto3.resource("s3").Bucket("models")
    everything.objects.delete()
    everything.delete()
