"""Errors of S3 clients as errors for the user, without credentials in their text."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from nsa.errors import CheckpointError, StoreRefused

_MAY_PASS = (408, 429)
_MAY_PASS_CODES = ("RequestTimeout",)  # which S3 sends with status 400
_HEADER_VALUE = re.compile(r"Invalid header value .*", re.DOTALL)
"""The HTTP client quotes the header: an access key or a session token with a line break in it."""
_NOT_SHOWN = "a credential holds a character that HTTP does not allow, such as a line break (it is not shown)"


@contextmanager
def explained(place: object) -> Iterator[None]:
    """Raise what boto3 raises as `StoreRefused`, or as `CheckpointError` if it may pass: `place` and the reason."""
    from boto3.exceptions import Boto3Error  # type: ignore[import-untyped]
    from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

    try:
        yield
    except (ClientError, BotoCoreError, Boto3Error) as error:
        reason = _HEADER_VALUE.sub(_NOT_SHOWN, str(error)).rstrip(".")
        kind = StoreRefused if _is_final(error) else CheckpointError
        # The original may quote a credential: it must not be printed with a traceback either.
        raise kind(f"{place} cannot be used: {reason}.") from (None if _HEADER_VALUE.search(str(error)) else error)


def _is_final(error: Exception) -> bool:
    """Whether the next attempt would fail in the same way."""
    from botocore import exceptions as botocore  # type: ignore[import-untyped]

    if isinstance(error, botocore.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = error.response.get("Error", {}).get("Code")
        return 300 <= status < 500 and status not in _MAY_PASS and code not in _MAY_PASS_CODES
    return bool(_HEADER_VALUE.search(str(error))) or isinstance(
        error,
        (
            botocore.NoCredentialsError,
            botocore.PartialCredentialsError,
            botocore.ProfileNotFound,
            botocore.ParamValidationError,
        ),
    )
