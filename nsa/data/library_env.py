"""Variables that libraries take from the environment alone. They are set here and nothing is ever read."""

import os


def one_tokenizer_thread() -> None:
    """In a worker process: the other cores belong to the model, or to the other workers."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def plain_s3_checksums() -> None:
    """Some S3 services (Ceph 16) refuse the client's trailing checksums with status 411; a user's own choice wins."""
    os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
